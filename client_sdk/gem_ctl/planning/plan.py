"""Predicts in closed form what a run needs: memory, network traffic, and how many workers one server can serve.

    seconds of the server per commit   t = fixed + pass·P + wire·bytes
    bytes of a commit, both ways       those of the chosen formats; 0 through shared memory
    a worker's cycle                   its local steps' compute time and a round trip; the longer of the two if they overlap
    workers that fill the server       cycle / t

With N servers, on a machine each, every one holds P/N parameters and receives a part of each commit, all at the same time:

    seconds of a server per commit     t = fixed + (pass·P + wire·bytes) / N
    a round trip                       fixed + pass·P / N + wire·bytes: the worker sends and receives all parts itself
    memory of a server                 process + what one server would hold for model and workers, / N

With one server, the round trip is t.

The constants are fitted to `python -m benchmarks.peers`, which prints its measurements beside what this predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

from gem_api.framing import upload_buffers
from gem_api.ranges import UNIT
from gem_api.region import region_bytes
from gem_api.rules import PROXIES, RULES, RuleRow, row_of
from gem_api.wire import wire_format

FLOAT_BYTES = 4
PROCESS_BYTES = 190 << 20  # the server without a model, and the files of its libraries


@dataclass(frozen=True)
class Costs:
    """Seconds that one commit costs a server.

    Attributes:
        by_reference: Fixed cost of a commit through shared memory.
        by_network: Fixed cost of a commit over the network.
        parameter: Cost of checking and applying, per parameter.
        average: Cost of the average of θ, per parameter: computed from the bytes that it moves, 12 beside 28.
        byte: Cost of receiving or sending, per byte.
        conversion: Cost of reading or writing a format other than float32, per parameter and direction.
    """

    by_reference: float = 4.0e-4
    by_network: float = 4.0e-4
    parameter: float = 2.4e-9
    average: float = 1.0e-9
    byte: float = 3.1e-10
    conversion: float = 7.0e-10


# Two cores of an Intel Xeon that server and workers share. The pass is bound by memory, which is slow there: on an AMD EPYC it
# took a third of that.
MEASURED = Costs()


@dataclass(frozen=True)
class Setup:
    """A run to plan for.

    Attributes:
        parameters: P, the number of the model's parameters.
        workers: Number of workers.
        compute_seconds: Seconds for the forward and backward pass of a step.
        local_steps: Steps that a worker makes per commit.
        rule: The update rule.
        proxy: The proxy of the rule `gem`.
        optimizer: The optimizer that the workers share on the server.
        durability: What the server keeps on disk.
        shared_memory: Whether the workers are on the server's machine and share memory with it.
        overlap: Whether they compute while a commit is under way.
        gradient_dtype, theta_dtype: Formats on the network.
        servers: N, the number of servers that hold a range of the parameters each.
        average: Whether the server keeps an average of θ.
    """

    parameters: int
    workers: int
    compute_seconds: float
    local_steps: int = 1
    rule: str = "gem"
    proxy: str = "momentum"
    optimizer: str = "sgd"
    durability: str = "snapshot"
    shared_memory: bool = False
    overlap: bool = False
    gradient_dtype: str = "float32"
    theta_dtype: str = "float32"
    servers: int = 1
    average: bool = False


@dataclass(frozen=True)
class Plan:
    """The prediction for a setup. What is said of the server holds for each of several.

    Attributes:
        servers: Number of servers.
        fixed_bytes: Server memory for all workers together.
        worker_bytes: Server memory per worker, besides `fixed_bytes`.
        server_bytes: Server memory in total.
        checkpoint_fixed_bytes: Server memory that copies may take while a checkpoint is written, for all workers together. They
            take less if `memory_limit` has no room for more.
        checkpoint_worker_bytes: The same per worker.
        commit_bytes: Bytes on the network per commit, both ways, of all servers together.
        server_seconds: The server's time per commit.
        commits_per_second: Commits of all workers together.
        bytes_per_second: Bytes on the network, of all workers and servers together.
        full_at: Number of workers that keep the server busy all the time.
        load: Fraction of the time that the server is busy, 0 to 1.
    """

    servers: int
    fixed_bytes: int
    worker_bytes: int
    server_bytes: int
    checkpoint_fixed_bytes: int
    checkpoint_worker_bytes: int
    commit_bytes: int
    server_seconds: float
    commits_per_second: float
    bytes_per_second: float
    full_at: float
    load: float


def plan(setup: Setup, costs: Costs = MEASURED) -> Plan:
    """Predicts what the setup needs. Raises InvalidRequest for an unknown format."""
    size = -(-setup.parameters // setup.servers)
    fixed_bytes = PROCESS_BYTES + _central_bytes(setup, size) + _upload_bytes(setup, size)
    worker_bytes = _worker_bytes(setup, size)
    copied = size * FLOAT_BYTES
    commit_bytes = sum(wire_bytes(setup))
    seconds = server_seconds(setup, costs)
    round_trip = seconds + sum(transfer_seconds(setup, costs))
    compute = setup.local_steps * setup.compute_seconds
    alone = max(compute, round_trip) if setup.overlap else compute + round_trip
    rate = min(setup.workers / alone, 1 / seconds)
    return Plan(
        servers=setup.servers,
        fixed_bytes=fixed_bytes,
        worker_bytes=worker_bytes,
        server_bytes=fixed_bytes + setup.workers * worker_bytes,
        checkpoint_fixed_bytes=copied * (1 + setup.average + len(_row(setup).shared)),
        checkpoint_worker_bytes=copied * (len(_row(setup).each) + setup.overlap),
        commit_bytes=commit_bytes,
        server_seconds=seconds,
        commits_per_second=rate,
        bytes_per_second=rate * commit_bytes,
        full_at=alone / seconds,
        load=rate * seconds,
    )


def one_server_only(setup: Setup) -> str:
    """The reason why several servers can't hold the model; empty if they can."""
    if setup.shared_memory:
        return "several servers are planned on a machine each, where --shared-memory does not reach"
    if not RULES[setup.rule].by_element:
        return f"--rule {setup.rule} needs one server: it decides about a commit as a whole"
    if setup.rule == "gem" and not PROXIES[setup.proxy].by_element:
        return f"--rule gem:proxy={setup.proxy} needs one server: it measures the whole gradient"
    if setup.parameters < setup.servers * UNIT:
        return f"{setup.parameters} parameters are too few for {setup.servers} servers: each holds at least {UNIT}"
    return ""


def _worker_bytes(setup: Setup, size: int) -> int:
    """Memory for one worker on a server that holds `size` parameters."""
    differences = setup.theta_dtype == "int8" and not setup.shared_memory
    held = size * FLOAT_BYTES * (len(_row(setup).each) + setup.overlap + differences)
    return held + (region_bytes(size) if setup.shared_memory else 0)


def _upload_bytes(setup: Setup, size: int) -> int:
    """Memory where gradients arrive, on a server that holds `size` parameters."""
    by_reference = setup.shared_memory and _row(setup).reads_once and setup.durability != "log"
    return 0 if by_reference else size * FLOAT_BYTES * upload_buffers(setup.workers, size * FLOAT_BYTES)


def _central_bytes(setup: Setup, size: int) -> int:
    """Memory for the model on a server that holds `size` parameters."""
    row = _row(setup)
    return size * FLOAT_BYTES * (1 + setup.average + len(row.shared) + row.temporaries)


def server_seconds(setup: Setup, costs: Costs = MEASURED) -> float:
    """The time of a server for one commit, or for its part of it, in seconds."""
    arithmetic = (costs.parameter + costs.average * setup.average) * setup.parameters
    if setup.shared_memory:
        return costs.by_reference + arithmetic / setup.servers
    converted = sum(dtype != "float32" for dtype in (setup.gradient_dtype, setup.theta_dtype))
    conversion = converted * costs.conversion * setup.parameters
    return costs.by_network + (arithmetic + conversion + costs.byte * sum(wire_bytes(setup))) / setup.servers


def transfer_seconds(setup: Setup, costs: Costs = MEASURED) -> tuple[float, float]:
    """The time of a worker for sending all parts of a commit, and for receiving all parts of the answer, in seconds.

    It does not include the time that a server spends on its part at the same moment. With one server it is 0."""
    up, down = (costs.byte * count * (1 - 1 / setup.servers) for count in wire_bytes(setup))
    return up, down


def _row(setup: Setup) -> RuleRow:
    return row_of(setup.rule, setup.proxy, setup.optimizer)


def wire_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes on the network of a commit and of its answer, of all servers together; 0 through shared memory."""
    if setup.shared_memory:
        return 0, 0
    up, down = wire_format(setup.gradient_dtype), wire_format(setup.theta_dtype)
    return up.nbytes(setup.parameters), down.nbytes(setup.parameters)
