"""What a run will need, before it is started: memory, network, and how many workers one server keeps busy.

    seconds of the server per commit   t = fixed + pass·P + wire·bytes
    bytes of a commit, both ways       those of the chosen formats; 0 through shared memory
    a worker's cycle                   its local steps' compute time and a round trip; the longer of the two if they overlap
    workers that fill the server       cycle / t

The constants are fitted to `python -m benchmarks.peers`, which prints its measurements beside what this predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

from gem_api.region import region_bytes
from gem_api.wire import gradient_format, theta_format

FLOAT_BYTES = 4
PROCESS_BYTES = 130 << 20  # the server without a model


@dataclass(frozen=True)
class Kept:
    """Arrays of P floats that a rule keeps, or makes while it works.

    Attributes:
        each: For each worker, beside the one that its gradient arrives in.
        shared: For all of them.
        temporaries: For the length of a commit.
        by_reference: Whether it reads a gradient where its worker has put it, in shared memory; else it gets a copy.
    """

    each: int = 1
    shared: int = 0
    temporaries: int = 0
    by_reference: bool = False


IN_PLACE = Kept(by_reference=True)
KEPT = {
    "gem": Kept(each=2, by_reference=True), "downpour": IN_PLACE, "adaptive": IN_PLACE, "agn": IN_PLACE, "ringmaster": IN_PLACE,
    "aeasgd": Kept(temporaries=2), "dcasgd": Kept(temporaries=4), "fedasync": Kept(temporaries=1),
    "fedbuff": Kept(shared=1, temporaries=1), "diloco": Kept(shared=2, temporaries=2),
}  # fmt: skip
PROXIES = {
    "momentum": KEPT["gem"], "nesterov": Kept(each=2, temporaries=1), "adam": Kept(each=3, temporaries=3),
    "global": Kept(shared=8, temporaries=1), "yellowfin": Kept(each=2, shared=2, temporaries=3),
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Seconds that one commit costs a server.

    Attributes:
        by_reference: Fixed cost of a commit through shared memory.
        by_network: Fixed cost of a commit over the network.
        parameter: Of the check and the pass, for each parameter.
        byte: Of receiving or sending, for each byte.
        conversion: Of reading or writing a format other than float32, for each parameter and direction.
    """

    by_reference: float = 2.0e-4
    by_network: float = 2.5e-4
    parameter: float = 8.5e-10
    byte: float = 5.2e-10
    conversion: float = 3.0e-10


MEASURED = Costs()  # two cores of an AMD EPYC, server and workers on the same two


@dataclass(frozen=True)
class Setup:
    """A run to plan for.

    Attributes:
        parameters: P.
        workers: How many.
        compute_seconds: Forward and backward pass of a step.
        local_steps: Steps that a worker makes for each commit.
        rule: The update rule.
        proxy: Of `gem`.
        durability: Of the server.
        shared_memory: Whether the workers are on the server's machine and share memory with it.
        overlap: Whether they compute while a commit is under way.
        gradient_dtype, theta_dtype: Formats over the network.
    """

    parameters: int
    workers: int
    compute_seconds: float
    local_steps: int = 1
    rule: str = "gem"
    proxy: str = "momentum"
    durability: str = "snapshot"
    shared_memory: bool = False
    overlap: bool = False
    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"


@dataclass(frozen=True)
class Plan:
    """What is predicted for a setup.

    Attributes:
        worker_bytes: Server memory for each worker.
        server_bytes: Server memory in all.
        commit_bytes: On the network for each commit, both ways.
        server_seconds: The server's time for each commit.
        commits_per_second: Of all workers together.
        bytes_per_second: On the network, of all workers together.
        full_at: Workers with which the server is busy all the time.
        load: Share of the time that the server is busy, 0 to 1.
    """

    worker_bytes: int
    server_bytes: int
    commit_bytes: int
    server_seconds: float
    commits_per_second: float
    bytes_per_second: float
    full_at: float
    load: float


def plan(setup: Setup, costs: Costs = MEASURED) -> Plan:
    """Predicts. Raises InvalidRequest for a format that does not exist."""
    size = setup.parameters
    kept = PROXIES[setup.proxy] if setup.rule == "gem" else KEPT[setup.rule]
    copied = not setup.shared_memory or not kept.by_reference or setup.durability == "log"
    worker_bytes = size * FLOAT_BYTES * (kept.each + copied + setup.overlap)
    worker_bytes += region_bytes(size) if setup.shared_memory else 0
    central_bytes = size * FLOAT_BYTES * (1 + kept.shared + kept.temporaries)
    commit_bytes = 0 if setup.shared_memory else _wire_bytes(setup)
    seconds = server_seconds(setup, costs)
    compute = setup.local_steps * setup.compute_seconds
    alone = max(compute, seconds) if setup.overlap else compute + seconds
    rate = min(setup.workers / alone, 1 / seconds)
    return Plan(
        worker_bytes=worker_bytes,
        server_bytes=PROCESS_BYTES + central_bytes + setup.workers * worker_bytes,
        commit_bytes=commit_bytes,
        server_seconds=seconds,
        commits_per_second=rate,
        bytes_per_second=rate * commit_bytes,
        full_at=alone / seconds,
        load=rate * seconds,
    )


def server_seconds(setup: Setup, costs: Costs = MEASURED) -> float:
    """The server's time for one commit."""
    arithmetic = costs.parameter * setup.parameters
    if setup.shared_memory:
        return costs.by_reference + arithmetic
    converted = sum(dtype != "float32" for dtype in (setup.gradient_dtype, setup.theta_dtype))
    conversion = converted * costs.conversion * setup.parameters
    return costs.by_network + arithmetic + conversion + costs.byte * _wire_bytes(setup)


def _wire_bytes(setup: Setup) -> int:
    formats = gradient_format(setup.gradient_dtype), theta_format(setup.theta_dtype)
    return sum(form.nbytes(setup.parameters) for form in formats)
