"""Everything that is compared, one family a file."""

from __future__ import annotations

from benchmarks.peers.contenders.base import Contender
from benchmarks.peers.contenders.floors import FLOORS
from benchmarks.peers.contenders.ours import OURS
from benchmarks.peers.contenders.pytorch import GLOO, PYTORCH_RPC

CONTENDERS: tuple[Contender, ...] = (*OURS, *FLOORS, *PYTORCH_RPC, *GLOO)
