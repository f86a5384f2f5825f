"""GEM for PyTorch loops: an optimizer whose step is one round trip, and a sampler that feeds from leased shards.

What is trained: every parameter with `requires_grad` at construction, in float32 on the server whatever its dtype here;
a tied weight counts once. What is not: frozen parameters and buffers (BatchNorm's running statistics among them) stay
with each worker. Workers must load frozen parameters themselves.

To evaluate, read θ into another model; that changes nothing for the one in training:

    tensors = session.layout.split(session.read())
    evaluated.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)

A model with BatchNorm must recompute its statistics then, for example with `torch.optim.swa_utils.update_bn`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import accumulate
from typing import Any, TypeAlias

from gem_api.errors import InvalidRequest, RejectedCommit
from gem_api.layout import Vector
from gem_api.process.extras import install
from gem_api.schedule import rate

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"gem_client.torch needs PyTorch: {install('torch')}", name=error.name) from error
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gem_client.session import Answer, Session
from gem_client.shards import Shards
from gem_client.torch.local_steps import LocalSteps, dense

__all__ = ["Loader", "Optimizer", "ShardSampler"]

Parameters: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class Optimizer(torch.optim.Optimizer):
    """Commits the parameters' gradients and loads the new θ: `step()` is one round trip with the server.

    In a run with local steps (λ > 1), or whose rule takes deltas, `step()` makes a step of SGD on the worker's own parameters,
    and each λ-th commits what the window has come to: `LocalSteps` has the equations. A window is dropped where the lease ends
    under it or the server refuses it; the next begins on fresh θ, with a velocity of zero. Call `finish` after the last step:
    it commits a window that the end of the data has cut short. Call `skip` for a batch that gets no step. A worker ends on
    the θ of its own last commit, while others go on: `load_final` waits for them and loads the run's final θ.

    Args:
        params: `model.named_parameters()`, or `model.parameters()`: then tensors are named by their position.
        session: A fresh session; the optimizer joins the run with it and loads θ into the parameters.
        batches_per_step: Batches of the session's shards that go into one step, if gradients are accumulated; a commit
            of λ local steps completes λ times as many. What is left at the end of the data is committed by `finish`.
        overlap: Whether the next gradient is computed while a commit is under way, on the θ that the commit before that
            brought: a step then waits for the network only if that takes longer than computing. The staleness grows by
            one, and is counted; the server keeps one more snapshot for the worker. A step raises what became of the
            commit before it; `finish` waits for the last. Not for runs with local steps or deltas.
        in_place: Whether the parameters may live in the memory that the server writes θ to, instead of being copied from it.
            Only packed float32 parameters on the CPU can, in shared memory, without `overlap` and without local steps;
            others are copied all the same. It saves P·4 bytes, and the time of a copy: 0.3 % of a step of ResNet-50 on
            batches of 8, 2 to 8 % of a step of a perceptron on batches of 64 (docs/performance.md). Do not use it if the
            model keeps views of its parameters (a weight tied by `.t()` or `.detach()`), or if the process forks: a view goes
            stale, and a child shares the parameters' memory.

    The parameters behave as with any optimizer of PyTorch: the model may be moved or converted (`.cuda()`, `.bfloat16()`),
    shared with other processes, and viewed. If a conversion replaces its Parameter objects
    (`torch.__future__.set_overwrite_module_params_on_conversion`), make the optimizer after it.

    Raises:
        InvalidRequest: A parameter is no real floating-point tensor, two have one name, or there is `overlap` in a run with
            local steps or deltas.
        LayoutMismatch: The model is not the run's.

    Attributes:
        answer: What the last commit to be finished brought back; None before the first.

    The learning rate is the server's: `param_groups` shows η_t at the version that the parameters hold, and a step with another
    one is refused, so that a scheduler that would have no effect does not go unnoticed. So is the weight decay: it is added
    here, to each gradient at the parameters that it was computed on.
    """

    def __init__(
        self,
        params: Parameters,
        session: Session,
        *,
        batches_per_step: int = 1,
        overlap: bool = False,
        in_place: bool = False,
    ) -> None:
        given: list[Any] = list(params)
        self._trained = _trained(given)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        self._in_place = _alone_in_memory(list(self._trained.values()), tensors) if in_place else [False] * len(self._trained)
        self._session = session
        self._batches_per_step = batches_per_step
        self._overlap = overlap
        self.answer: Answer | None = None
        self._joined = False
        self._scaled = False
        first = {name: _to_host(parameter.detach()) for name, parameter in self._trained.items()}
        session.join(first, overlap=overlap)
        session.pull_only_reads = True
        self._bound: Any = None
        self._generation = 0
        super().__init__(list(self._trained.values()), {"lr": session.learning_rate})
        self._joined = True
        self._load()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused with InvalidRequest: the run's tensors are fixed once it is joined."""
        if self._joined:
            raise InvalidRequest("parameters can't be added: the run's tensors are fixed once it is joined")
        _bare(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the parameters' gradients."""
        _bare(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Commits the gradients; the parameters hold the new θ afterwards. A parameter without a gradient counts as zero. With
        local steps, makes one, and commits with the λ-th.

        Args:
            closure: Re-evaluates the model and returns the loss, as in every PyTorch optimizer.
            loss: The batch's loss (a number or a one-element tensor), reported to the server; its mean over a window.

        Returns:
            What `closure` returned, else `loss`.

        Raises:
            NonFiniteGradient: A gradient holds a NaN or an infinity; θ is untouched.
            NormOutOfBounds: Their norm is beyond the bound of a server that has one; θ is untouched, and a loop may go on.
            Quarantined: Too many in a row were refused.
            TransportError: The server was out of reach for longer than the session allows.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_servers_rate()
        reported = float(loss.detach() if isinstance(loss, Tensor) else loss) if loss is not None else None
        self._make_step(reported, self._batches_per_step)
        return loss

    def skip(self, batches: int = 1) -> None:
        """Leaves the batch in hand out of the run: call it instead of `step`, for a loss that is not finite or after a
        GradScaler that made no step. Without it the batch's shard goes back and is trained on again, whole. If gradients are
        accumulated, `batches` of them, the last ones. Raises InvalidRequest if there are not so many."""
        self._session.skip(batches)

    def finish(self) -> None:
        """At the end of the data: makes a step with gradients that are accumulated of fewer than `batches_per_step` batches,
        commits a window of local steps that is not full, with `overlap` waits for the commit under way, and loads θ. Raises as
        `step` does.

        With a GradScaler such gradients are left alone, as they are scaled still: call its `step` for them, or their batches go
        back."""
        rest = self._session.batches_in_hand
        if 0 < rest < self._batches_per_step and not self._scaled and self._gradients_are_new():
            self._make_step(None, rest)
        if self._local is not None and self._local.made:
            self._commit_window(self._local)
        self.answer = self._session.finish_commit() or self.answer
        self._load()

    def load_final(self) -> None:
        """Loads the run's final θ into the parameters: calls `finish`, leaves the run, and waits until it is over, as
        `Session.pull_final` says. Evaluate or save the model after this. Raises as these two do."""
        self.finish()
        self._session.pull_final()
        self._load()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before each step: its gradients are to be unscaled before they get here."""
        self._scaled = True
        return False

    def _make_step(self, loss: float | None, batches: int) -> None:
        if self._local is not None:
            self._step_locally(self._local, loss, batches)
        elif self._overlap:
            self._step_overlapping(loss, batches)
        else:
            gradient = self._gather()
            self.answer = self._session.commit(gradient, loss=loss, batches=batches, base=self._base, decay=False)
            self._load()
        if self._batches_per_step > 1:
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad.used_at_version = parameter.grad._version  # type: ignore[attr-defined]

    def _gradients_are_new(self) -> bool:
        """Whether any has been written since the last step, and not only set to zero."""
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        written = any(gradient._version != getattr(gradient, "used_at_version", None) for gradient in gradients)
        return written and any(bool(dense(gradient).any()) for gradient in gradients)

    def _step_locally(self, local: LocalSteps, loss: float | None, batches: int) -> None:
        self._session.add_to_window(batches)
        local.step(self._rate, loss)
        lease_lost = self._session.generation != self._base.generation  # asking for a shard may have found out
        if local.made >= self._settings.local_steps or lease_lost:
            self._commit_window(local)

    def _commit_window(self, local: LocalSteps) -> None:
        self._bind()
        local.write(self._gradients)
        try:
            self.answer = self._session.commit(
                self._session.gradient,
                loss=local.loss,
                batches=0,  # those of the window's steps
                base=self._base,
                kind=self._kind,
                decay=False,
            )
        except RejectedCommit:
            local.forget()
            self._load()  # what the window began on, should the pull fail
            self._session.take_theta()
            self._load()
            raise
        self._load()

    def _step_overlapping(self, loss: float | None, batches: int) -> None:
        computed_on, refused = self._base, None
        try:
            self.answer = self._session.finish_commit() or self.answer
        except RejectedCommit as error:
            refused = error  # that the last gradient was no good does not make this one wrong
        gradient = self._gather()  # before the parameters move on from what it was computed on
        self._load()
        self._session.begin_commit(gradient, loss=loss, batches=batches, base=computed_on, decay=False)
        if refused is not None:
            raise refused

    def _gather(self) -> Any:
        """The gradients, weight decay included, in the session's buffer: float32, shape (P,)."""
        self._bind()
        with torch.no_grad():
            for parameter, gradient in zip(self._trained.values(), self._gradients, strict=True):
                _copy_gradient(parameter, gradient, self._settings.weight_decay)
        return self._session.gradient

    def _bind(self) -> None:
        """Follows the session's buffers, which change when a lease is lost."""
        if self._bound is not self._session.theta:
            self._bound = self._session.theta
            self._gradients = self._tensors(self._session.gradient)
            self._thetas = self._tensors(self._session.theta)

    def _tensors(self, packed: Vector) -> list[Tensor]:
        """One for each parameter, over its part of a packed buffer. Not views of one tensor: each is saved and copied alone."""
        ends = accumulate(parameter.numel() for parameter in self._trained.values())
        return [torch.from_numpy(packed[end - p.numel() : end]) for p, end in zip(self._trained.values(), ends, strict=True)]

    def _load(self) -> None:
        """Puts the θ received into the parameters."""
        self._bind()
        self._base = self._session.base
        self._follow_server()
        # With overlap the next answer arrives while the parameters are in use, and local steps change them.
        in_place = self._session.shares_memory and not self._overlap and self._local is None
        with torch.no_grad():
            for parameter, theta, alone in zip(self._trained.values(), self._thetas, self._in_place, strict=True):
                if not (in_place and alone and _lives_at(parameter, theta)):
                    parameter.copy_(theta.view_as(parameter))
        if self._local is not None:
            self._local.begin()

    def _require_servers_rate(self) -> None:
        if any(group["lr"] != self._rate for group in self.param_groups):
            raise InvalidRequest(f"the learning rate is the server's ({self._rate}): set it there, and use no scheduler here")

    def _follow_server(self) -> None:
        """The rate follows the version. A server that was restarted may have other settings; the session then holds another
        lease."""
        if self._base.generation != self._generation:
            self._settings, self._kind = self._session.hyperparameters, self._session.update_kind
            self._local = self._local_steps()
            self._generation = self._base.generation
        self._rate = rate(self._settings, self._base.version)
        for group in self.param_groups:
            group["lr"] = self._rate

    def _local_steps(self) -> LocalSteps | None:
        """What makes local steps; None where each gradient is committed as it is. Raises InvalidRequest."""
        local_steps = self._settings.local_steps
        self._session.batches_per_commit = local_steps * self._batches_per_step
        if local_steps == 1 and self._kind == "gradient":
            return None
        if self._overlap:
            raise InvalidRequest(
                f"this run's workers make local steps ({local_steps} for each commit, which holds a {self._kind}), and commits "
                "of those can't overlap with them: leave out overlap"
            )
        return LocalSteps(list(self._trained.values()), self._settings, self._kind)


def _bare(method: Callable[..., None]) -> Callable[..., None]:
    """A method of PyTorch without the wrapper that keeps its compiler off it, and for that imports the compiler: 75 MB and a
    second of each worker that never compiles anything."""
    bare: Callable[..., None] = getattr(method, "__wrapped__", method)
    return bare


class ShardSampler(Sampler[list[int]]):
    """Batches of indices from the run's shards: `for batch in ShardSampler(session, dataset).loader():`.

    A pass ends when the run does: when every sample of every epoch was trained on, or this worker's steps are done. It may end
    before that, while the last batches are still to be committed, or because other workers hold the last shards: go round again
    `while not sampler.complete:`.

    Each step of the session's optimizer completes the batches that it was computed on; a shard whose batches are all committed
    is complete, and the shards of a worker that dies are handed to others. A batch that gets no step is trained on again with
    its shard, by any worker, unless `Optimizer.skip` is called for it.

    `loader` makes a DataLoader that says which batch the loop has, so that this is exact even if it reads ahead. Without it,
    `DataLoader(dataset, batch_sampler=sampler)` is exact from the first step of a pass that follows its batch, with
    `num_workers=0`. With more, its steps are counted, a pass ends after 100 shards, and all of these are trained on again if a
    batch got no step or the loop was left early. It must not fork the session: give it `multiprocessing_context="spawn"`.

    `len()` is the number of batches that this worker gets if it gets all that there are: exact for a single worker or with
    `--shards replicate`, else an upper bound. In a run without an end there is none, and `len()` raises a TypeError.

    Args:
        session: The session, which has joined the run (make the optimizer first).
        dataset: The training set, the same for all workers.
        batch_size: Samples per batch; the run's batch size by default.
    """

    def __init__(self, session: Session, dataset: Sized, batch_size: int | None = None) -> None:
        self._dataset = dataset
        self._shards = session.shards(len(dataset), batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._shards)

    def __len__(self) -> int:
        most = self._shards.most_batches
        if most is None:
            raise TypeError("this run has no number of batches: it has neither epochs nor steps")
        return most

    @property
    def complete(self) -> bool:
        """Whether the run is complete, or this worker's steps are done."""
        return self._shards.complete

    def loader(self, **settings: Any) -> Loader:
        """Batches of the dataset, in passes. `settings` are those of `DataLoader`, such as `num_workers` and `collate_fn`; its
        worker processes are spawned unless told otherwise."""
        if settings.get("num_workers"):
            settings = {"multiprocessing_context": "spawn", **settings}
        dataset: Dataset[Any] = self._dataset  # type: ignore[assignment]
        return Loader(DataLoader(dataset, batch_sampler=self, **settings), self._shards)


class Loader:
    """A DataLoader that tells the session which batch the loop has; `ShardSampler.loader` makes it."""

    def __init__(self, loader: DataLoader[Any], shards: Shards) -> None:
        self._loader = loader
        self._shards = shards

    def __iter__(self) -> Iterator[Any]:
        self._shards.loader_tells()
        for batch in self._loader:
            self._shards.deliver()
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


def _trained(params: Parameters) -> dict[str, Tensor]:
    """Name to parameter, without frozen ones and each tied one once."""
    trained: dict[str, Tensor] = {}
    seen: set[int] = set()
    for position, entry in enumerate(params):
        if isinstance(entry, dict):
            raise InvalidRequest("parameter groups are not supported: the server applies one learning rate to all")
        name, parameter = entry if isinstance(entry, tuple) else (str(position), entry)
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        if name in trained:
            raise InvalidRequest(
                f"two parameters have the name {name!r}: give each module's a prefix, for example "
                "[*encoder.named_parameters('encoder'), *decoder.named_parameters('decoder')]"
            )
        if not parameter.is_floating_point():
            raise InvalidRequest(f"parameter {name!r} has dtype {parameter.dtype}: only real floating-point ones are trained")
        seen.add(id(parameter))
        trained[name] = parameter
    return trained


def _alone_in_memory(parameters: list[Tensor], given: list[Tensor]) -> list[bool]:
    """Which parameters share their memory with no other of those `given`."""
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in {id(tensor): tensor for tensor in given}.values())
    return [owners[parameter.untyped_storage().data_ptr()] == 1 for parameter in parameters]


def _lives_at(parameter: Tensor, theta: Tensor) -> bool:
    """Whether a parameter lives in its part of the server's θ; moves it there first, if it can. One that its owner has shared
    or converted stays where it is."""
    if parameter.dtype == torch.float32 and parameter.data_ptr() == theta.data_ptr():
        return True
    if not (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
        and not parameter.is_shared()
        and parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    ):
        return False
    # A storage of its own: if its owner moves that (`share_memory()`), `theta` stays in the server's memory.
    parameter.data = torch.from_numpy(theta.numpy()).view_as(parameter)
    return True


def _to_host(tensor: Tensor) -> Any:
    return tensor.to("cpu", torch.float32).numpy()


def _copy_gradient(parameter: Tensor, into: Tensor, weight_decay: float) -> None:
    if parameter.grad is None:
        into.zero_()
        return
    into.view(parameter.shape).copy_(dense(parameter.grad))
    if weight_decay:
        into.view(parameter.shape).add_(parameter.to("cpu", torch.float32), alpha=weight_decay)
