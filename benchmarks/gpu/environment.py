"""Section a: what the machine has. Packages, processor, GPU and its link; whether CUDA copies from the server's region by
itself; whether the server's passes compile."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.gpu.checks import Checks, Found
from benchmarks.lib import machine

_PACKAGES = (
    "torch", "numpy", "numba", "grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "prometheus-client",
    "click", "rich", "safetensors", "structlog", "crc32c", "scikit-learn", "triton",
)  # fmt: skip
_MODULES = ("gem_server.cli", "gem_client.torch", "gem_worker.process.cli", "sklearn.datasets")
_NO_GPU: Found = {"ok": None, "skipped": "no GPU"}
_QUERY = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
_ELEMENTS = 1 << 20


def run(checks: Checks) -> None:
    checks.check("a.packages", _packages)
    checks.check("a.machine", _machine)
    checks.check("a.gpu", _gpu, checks.on_gpu)
    checks.check("a.host-register", _host_register, checks.on_gpu)
    checks.check("a.kernels", _kernels)


def _packages() -> Found:
    """Versions, and whether all that a worker and a server import is there."""
    for module in _MODULES:
        import_module(module)
    return {"versions": {each.name: each.version for each in metadata.distributions() if each.name.lower() in _PACKAGES}}


def _machine() -> Found:
    flags, nodes = Path("/proc/cpuinfo").read_text(), list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    free = machine.available_bytes()
    return {**machine.description(), "available_bytes": free, "avx512": "avx512f" in flags, "numa_nodes": len(nodes)}


def _gpu(on_gpu: bool) -> Found:
    import torch

    if not on_gpu:
        return _NO_GPU
    about = torch.cuda.get_device_properties(0)
    smi = subprocess.run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True, text=True)
    return {
        "name": about.name,
        "bytes": about.total_memory,
        "cuda": torch.version.cuda,
        "nvidia_smi": (smi.stdout or smi.stderr).strip(),
    }


def _host_register(on_gpu: bool) -> Found:
    """Whether CUDA can page-lock a region where it is, and copies there."""
    import torch
    from gem_api.region import create_region

    if not on_gpu:
        return _NO_GPU
    region, descriptor = create_region(_ELEMENTS)
    os.close(descriptor)
    memory, source = torch.from_numpy(region.gradient), torch.rand(_ELEMENTS, device="cuda")
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    locked = memory.is_pinned()
    memory.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    arrived = torch.equal(memory, source.cpu())
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return {"ok": arrived and locked and status == 0, "status": status, "is_pinned": locked, "arrived": arrived}


def _kernels() -> Found:
    """Compiles the passes of all rules into numba's cache, so that no later section waits for that."""
    done = subprocess.run([sys.executable, "-m", "gem_server.warm_up"], capture_output=True, text=True)
    return {"ok": done.returncode == 0, "rules": done.stderr.count("compiled"), "printed": done.stderr.splitlines()[-1:]}
