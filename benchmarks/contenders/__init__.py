"""Everything that is compared, one family a file."""

from __future__ import annotations

from benchmarks.contenders.base import Contender
from benchmarks.contenders.floors import FLOORS
from benchmarks.contenders.gloo import GLOO
from benchmarks.contenders.ours import OURS
from benchmarks.contenders.pytorch_rpc import PYTORCH_RPC
from benchmarks.contenders.ray_actor import RAY

CONTENDERS: tuple[Contender, ...] = (*OURS, *FLOORS, *PYTORCH_RPC, *RAY, *GLOO)
