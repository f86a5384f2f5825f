"""Section b: one worker with a server has the parameters of a plain loop, whatever features of PyTorch the loop uses."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import gem_client
import torch
from gem_client.torch import Optimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.loop import RATE, RATE_ADAMW, Case, Loop, network, values
from benchmarks.gpu.model import Trainee, sizes
from benchmarks.gpu.timing import synchronise
from benchmarks.lib.processes import server

CASES = {
    "SGD": Case(),
    "SGD, weight decay": Case(decay=0.01),
    "SGD over TCP": Case(connect={"shared_memory": False}),
    "AdamW on the worker": Case(adamw="worker"),
    "AdamW on the worker, 4 local steps": Case(adamw="worker", local=4, steps=12),
    "AdamW on the server": Case(adamw="server"),
    "autocast in bfloat16": Case(amp="bfloat16", tolerance=0.02),
    "autocast in float16, GradScaler, overflow": Case(amp="float16", scaler=True, adamw="server", tolerance=0.05),
    "accumulated gradients": Case(accumulate=2),
    "clipped gradients": Case(clip=0.05),
    "parameters in bfloat16": Case(dtype="bfloat16", tolerance=0.02),
    "channels last": Case(channels_last=True),
    "overlap": Case(overlap=True),
    "a stream of its own": Case(stream=True),
    "the last layer on the CPU": Case(head_on_cpu=True),
    "torch.compile": Case(compiled="default"),
}
_GRAPHS = {  # what fails here may leave CUDA unusable, so they come last
    "torch.compile with CUDA graphs": Case(compiled="reduce-overhead"),
    "forward and backward as CUDA graphs": Case(graphed=True),
}
_VIEWS = (  # they move nothing
    "view", "detach", "split", "as_strided", "alias", "t.default", "_unsafe_view", "lift_fresh", "profiler",
)  # fmt: skip


def run(checks: Checks) -> None:
    for name, case in CASES.items():
        checks.check(f"b.{name}", equality, case, checks.device)
    checks.check("b.load_final", _load_final, checks.device)
    for overlap in (False, True):
        checks.check(f"b.operations of a step{', overlap' * overlap}", _operations, checks, overlap)
    for name, case in _GRAPHS.items() if checks.on_gpu else ():
        checks.check(f"b.{name}", equality, case, checks.device)


def equality(case: Case, device: str) -> Found:
    """The difference between a worker's θ and the parameters of a plain loop."""
    begin, expected = values(network(case, device)), _plain(case, device)
    model = network(case, device)
    stream = torch.cuda.stream(torch.cuda.Stream()) if case.stream and device == "cuda" else nullcontext()
    sgd = ("--optimizer=sgd", f"--learning-rate={RATE}", f"--weight-decay={case.decay}")
    synchronise()  # before another stream is used, and after
    rule, options = ("gem", (f"--local-steps={case.local}",)) if case.adamw else ("downpour", sgd)
    with (
        server(rule, None, "--until-stopped", *options) as (address, _),
        gem_client.connect(address, **case.connect) as session,
        stream,
    ):
        optimizer = Optimizer(
            _adamw(case, model) or model.named_parameters(), session, on=case.adamw or None,
            batches_per_step=case.accumulate, overlap=case.overlap,
        )  # fmt: skip
        places = [each.data_ptr() for each in model.parameters()]
        Loop(case, model, device).run(optimizer, lambda loss: optimizer.step(loss=loss))
        optimizer.finish()
        synchronise()
        transport, theta = session.transport, torch.from_numpy(session.read())
    error, apart = float((theta - expected).norm() / (expected - begin).norm()), float((values(model) - theta).abs().max())
    return {
        "ok": error < case.tolerance and (apart == 0 or case.dtype != "float32"), "relative_error": error,
        "worker_from_server": apart, "transport": transport,
        "kept_memory": places == [each.data_ptr() for each in model.parameters()],
    }  # fmt: skip


def _adamw(case: Case, model: nn.Module) -> torch.optim.Optimizer | None:
    return torch.optim.AdamW(model.named_parameters(), lr=RATE_ADAMW) if case.adamw else None


def _plain(case: Case, device: str) -> Tensor:
    """The parameters after the loop without a server."""
    model = network(case, device)
    loop = Loop(case, model, device)
    if case.overlap or case.dtype != "float32":
        return _by_hand(case, list(model.parameters()), loop)
    optimizer = _adamw(case, model) or torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=case.decay)
    loop.run(optimizer, lambda loss: optimizer.step())
    return values(model)


def _by_hand(case: Case, parameters: list[Tensor], loop: Loop) -> Tensor:
    """SGD on a float32 θ beside the model. With overlap each gradient is computed at the θ of the commit before the last."""
    points = [[each.detach().float().clone() for each in parameters]]
    for number in range(case.steps):
        with torch.no_grad():
            torch._foreach_copy_(parameters, points[max(0, number - case.overlap)])
        loop.compute(number)
        points.append([theta - RATE * each.grad.float() for theta, each in zip(points[-1], parameters, strict=True)])  # type: ignore[union-attr]
    return torch.cat([each.flatten().cpu() for each in points[-1]])


def _load_final(device: str) -> Found:
    case = Case(steps=4)
    model = network(case, device)
    options = ("--optimizer=sgd", f"--learning-rate={RATE}", f"--steps={case.steps}")
    with server("downpour", None, *options) as (address, _), gem_client.connect(address) as session:
        optimizer = Optimizer(model.named_parameters(), session)
        Loop(case, model, device).run(optimizer, lambda loss: optimizer.step(loss=loss))
        optimizer.load_final()
        return {"ok": torch.equal(values(model), torch.from_numpy(session.read()))}


class _Counting(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def _operations(checks: Checks, overlap: bool) -> Found:
    """The operations of one `step()`: on a GPU each is at least a launch or a copy, and `_local_scalar_dense` waits for it."""
    trainee = Trainee(list(sizes(checks).values())[-1], checks.device)
    with server("gem", None, "--until-stopped") as (address, _), gem_client.connect(address) as session:
        inner = torch.optim.AdamW(trainee.model.named_parameters())
        optimizer = Optimizer(inner, session, on="server", overlap=overlap)
        for _ in range(5):  # the first ones compare all values
            loss = trainee.backward()
            with _Counting() as counting:
                optimizer.step(loss=loss)
    moving = {name: count for name, count in counting.seen.items() if not name.startswith(_VIEWS)}
    return {"tensors": len(list(trainee.model.parameters())), "operations": sum(moving.values()), "by_kind": moving}
