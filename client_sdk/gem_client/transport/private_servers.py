"""The private servers of a dry run (`gem-ctl doctor`): one for each address that a script names.

The script's processes and gem-ctl meet in a folder. A process makes a link `address-N` to the N-th address that it names, and
gem-ctl answers with a link `server-N` to the address of a server of its own. A link is made whole, or not at all.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from gem_api.errors import ServerUnavailable
from gem_api.process.addresses import host_and_port, is_tcp_address, is_this_machine

# The folder. It is set for a script and all processes that this starts, so that none of them reaches the user's own run.
FOLDER_VARIABLE = "GEM_DOCTOR_SERVERS"
PATIENCE_SECONDS = 120.0  # for a server, or the script's process, that starts; the first server compiles its update pass
POLL_SECONDS = 0.05


def private_server(folder: Path, address: str) -> str:
    """The address of the private server that takes the place of the one at `address`. Waits until it serves. Raises
    ServerUnavailable if it does not in two minutes."""
    deadline, number = time.monotonic() + PATIENCE_SECONDS, _number_of(folder, address)
    while not (answer := folder / f"server-{number}").is_symlink():
        if time.monotonic() > deadline:
            raise ServerUnavailable(f"the dry run has started no server in place of {address}")
        time.sleep(POLL_SECONDS)
    return os.readlink(answer)


def _number_of(folder: Path, address: str) -> int:
    """The number of an address, with its port, among those that the script names. All names of this machine are one."""
    local = is_tcp_address(address) and is_this_machine(address)
    same = f"127.0.0.1:{host_and_port(address)[1]}" if local else address
    number = 0
    while True:
        link = folder / f"address-{number}"
        with suppress(FileExistsError):
            os.symlink(same, link)
        if os.readlink(link) == same:
            return number
        number += 1


def addresses(folder: Path) -> list[str]:
    """The addresses that a script has named so far, in their order."""
    named: list[str] = []
    while (link := folder / f"address-{len(named)}").is_symlink():
        named.append(os.readlink(link))
    return named


def serve(folder: Path, number: int, address: str) -> None:
    """Says that the server at this address takes the place of the N-th one that the script names."""
    os.symlink(address, folder / f"server-{number}")
