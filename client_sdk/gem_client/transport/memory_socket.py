"""Fetches a region of shared memory from a server on the same machine."""

from __future__ import annotations

import os
import socket

from gem_api.region import Region, attach_region, socket_address
from gem_api.v1 import training_pb2 as pb


def fetch_region(offer: pb.ShareMemoryResponse, parameters: int, timeout: float) -> Region:
    """Fetches the shared memory that a server offers, for P parameters.

    Raises:
        OSError: The socket is on another machine or unreachable, or its region is not valid.
    """
    if not hasattr(socket, "recv_fds"):
        raise OSError("this system can't pass memory through a socket")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(socket_address(offer.socket))
        connection.sendall(offer.token)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError("the server sent no memory")
    try:
        return attach_region(descriptors[0], parameters)
    finally:
        os.close(descriptors[0])
