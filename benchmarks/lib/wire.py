"""A link between machines, on one machine: a rate, a delay and a queue, between this network and a namespace of its own.

It runs in user space, on two TUN devices, because not every kernel has netem. It needs Linux and root. The system passes the
segments of up to 64 KiB of a stream on as one packet, as to a network card that divides them itself: that costs a twentieth of
the processor time.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

NEAR, FAR = "10.213.0.1", "10.213.0.2"  # the addresses of the two ends
DEVICE = "gemwire"  # the network device, which has the same name at both ends
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUN, _NO_PROTOCOL, _OFFLOAD_HEADER, _SET_DEVICE, _SET_OFFLOAD = 0x0001, 0x1000, 0x4000, 0x400454CA, 0x400454D0
_CHECKSUMS, _SEGMENTS = 0x01, 0x02  # what the device takes over: the checksums, and cutting TCP over IPv4 into packets
HEADER = struct.Struct("<BBHHHH")  # before a packet: flags, kind, bytes of headers, of a segment, 2 of checksums
_LARGEST = 1500  # bytes of a packet, as on most networks
_MOST = (64 << 10) + HEADER.size  # bytes of a stream that are passed on at once
_AT_ONCE = 64  # packets that are read before others are sent


@dataclass
class Direction:
    """The packets on their way to one end: each waits for those before it, takes its time at the rate, then the delay.

    Args:
        rate: Bits per second.
        delay: Seconds.
        longest: Seconds that a packet may wait for those before it; if it would wait longer, it is lost.
    """

    rate: float
    delay: float
    longest: float = 0.1
    _free: float = field(default=0.0, init=False)
    _packets: deque[tuple[float, bytes]] = field(default_factory=deque, init=False)

    def put(self, packet: bytes, now: float) -> None:
        """Takes a packet in, with the header before it."""
        begin = max(now, self._free)
        if begin - now <= self.longest:
            self._free = begin + 8 * size_on_wire(packet) / self.rate
            self._packets.append((self._free + self.delay, packet))

    def arrived(self, now: float) -> list[bytes]:
        """The packets that have reached the end; each is returned once."""
        found = []
        while self._packets and self._packets[0][0] <= now:
            found.append(self._packets.popleft()[1])
        return found

    @property
    def next(self) -> float:
        """When the next packet arrives; infinity if none is on its way."""
        return self._packets[0][0] if self._packets else float("inf")


def size_on_wire(packet: bytes) -> int:
    """The bytes of a packet on the network, or of all the packets that it is cut into, each with headers of its own."""
    _, _, headers, segment, _, _ = HEADER.unpack_from(packet)
    size = len(packet) - HEADER.size
    return size + headers * ((size - headers - 1) // segment) if segment else size


def possible() -> bool:
    """Whether this machine and user can have a wire."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        return False
    tried = subprocess.run(["unshare", "--net", "ip", "tuntap", "add", "dev", DEVICE, "mode", "tun"], capture_output=True)
    return tried.returncode == 0


def run(folder: Path, rate: float, delay: float) -> None:
    """Carries packets until the process ends. Once both ends are up, other processes may `enter`.

    Args:
        folder: Receives a file that `enter` reads.
        rate: Bits per second, in each direction.
        delay: Seconds from end to end, one way.
    """
    near = _opened(NEAR)
    _call("unshare", _NEW_NETWORK)
    far = _opened(FAR)
    _place(folder).with_suffix(".part").write_text(str(os.getpid()))
    _place(folder).with_suffix(".part").rename(_place(folder))
    _carry(near, far, Direction(rate, delay), Direction(rate, delay))


def is_up(folder: Path) -> bool:
    """Whether the wire in this folder can be entered."""
    return _place(folder).exists()


def enter(folder: Path) -> None:
    """Moves this thread, and all that it starts, to the far end of the wire in this folder."""
    with open(f"/proc/{_place(folder).read_text()}/ns/net") as namespace:
        _call("setns", namespace.fileno(), _NEW_NETWORK)


def _place(folder: Path) -> Path:
    return folder / "wire.pid"


def _carry(near: int, far: int, up: Direction, down: Direction) -> None:
    """Carries packets: `up` from the far end to the near one, `down` the other way."""
    ways = {near: (down, far), far: (up, near)}
    while True:
        wait = min(up.next, down.next) - time.monotonic()
        ready, _, _ = select.select([near, far], [], [], max(0.0, wait) if wait < float("inf") else None)
        for source in ready:
            _read(source, ways[source][0])
        for direction, target in ways.values():
            for packet in direction.arrived(time.monotonic()):
                os.write(target, packet)


def _read(source: int, direction: Direction) -> None:
    for _ in range(_AT_ONCE):
        try:
            direction.put(os.read(source, _MOST), time.monotonic())
        except BlockingIOError:
            return


def _opened(address: str) -> int:
    """The device in this thread's namespace, up, with an address. Returns a descriptor for packets, each with a header before
    it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _TUN | _NO_PROTOCOL | _OFFLOAD_HEADER))
    fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUMS | _SEGMENTS)
    for arguments in (
        f"addr add {address}/30 dev {DEVICE}",
        f"link set {DEVICE} mtu {_LARGEST} txqueuelen 1000 up",
        "link set lo up",
    ):
        subprocess.run(["ip", *arguments.split()], check=True)
    return device


def _call(function: str, *arguments: int) -> None:
    """Calls a function of the C library that Python has from 3.12 on. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function} failed: {os.strerror(ctypes.get_errno())}")
