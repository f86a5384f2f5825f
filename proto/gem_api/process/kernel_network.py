"""The kernel's settings that limit how fast one TCP connection gets, and what to set instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/proc/sys/net")
FAR = 0.02  # seconds: the round trip that the limits of buffers are judged at
ENOUGH = 1e9  # bits per second that they should allow then
ADVISED = 16 << 20  # bytes of a buffer


@dataclass(frozen=True)
class KernelSetting:
    """A setting of this machine's kernel.

    Attributes:
        name: Its name, as sysctl takes it.
        value: Its value.
        advice: The value to set instead, and when; empty if it is good as it is.
        why: The reason.
    """

    name: str
    value: str
    advice: str
    why: str


def kernel_settings(folder: Path = FOLDER) -> list[KernelSetting]:
    """The settings that matter, as far as this system has them; none on other systems than Linux.

    Args:
        folder: Where the system shows its network settings.
    """
    return list(_known(folder))


def _known(folder: Path) -> Iterator[KernelSetting]:
    for name, judge in _JUDGES.items():
        try:
            value = _text(folder, name)
            advice, why = judge(value, folder)
        except (OSError, ValueError):  # another system, or a kernel that writes it differently
            continue
        yield KernelSetting(f"net.ipv4.{name}", value, advice, why)


def _text(folder: Path, name: str) -> str:
    return " ".join((folder / "ipv4" / name).read_text().split())


def _slow_start(value: str, folder: Path) -> tuple[str, str]:
    if value == "0":
        return "", "a connection goes on at its rate after a pause"
    if _text(folder, "tcp_congestion_control") == "bbr":
        return "", "bbr goes on at its rate after a pause, whatever this setting"
    return "0", (
        "with 1, a connection that has sent nothing for about 0.2 s begins again with few packets, and takes many round trips "
        "to fill a far link; a worker's pauses at each commit, while it computes or receives θ"
    )


def _congestion_control(value: str, folder: Path) -> tuple[str, str]:
    if value == "bbr":
        return "", (
            "bbr keeps its rate if packets are lost. But if round trips take less than about 1 ms, set it to cubic: there "
            "acknowledgements wait behind the other direction's data, bbr takes that for a slow network, and its rate can "
            "collapse"
        )
    load = "" if "bbr" in _text(folder, "tcp_available_congestion_control").split() else " (first: modprobe tcp_bbr)"
    return f"bbr, if round trips take more than about 1 ms{load}", (
        f"{value} takes each lost packet for a full network, so that one lost in a hundred leaves it a small part of a far "
        "link; bbr does not"
    )


def _buffer(value: str, folder: Path) -> tuple[str, str]:
    least, usual, most = map(int, value.split())
    rate = 8 * most / 2 / FAR
    why = (
        f"about half of the last number of bytes can be under way on a connection: {rate / 1e9:.2g} Gbit/s at a round trip of "
        f"{1000 * FAR:.0f} ms. It should be 2 × bandwidth × round trip, as large gradients travel one at a time"
    )
    return "" if rate >= ENOUGH else f"{least} {usual} {ADVISED}", why


# net.core.rmem_max and wmem_max are not among them: they limit programs that choose a buffer's size themselves.
_JUDGES: dict[str, Callable[[str, Path], tuple[str, str]]] = {
    "tcp_slow_start_after_idle": _slow_start,
    "tcp_congestion_control": _congestion_control,
    "tcp_rmem": _buffer,
    "tcp_wmem": _buffer,
}
