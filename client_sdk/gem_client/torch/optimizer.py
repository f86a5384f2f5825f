"""The optimizer whose step is one round trip with the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from gem_api.errors import InvalidRequest, LayoutMismatch, RejectedCommit
from gem_api.hyperparameters import decay_of_workers
from gem_api.layout import NAME_TENSORS
from gem_api.schedule import rate
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gem_client.answer import Answer
from gem_client.session import Session
from gem_client.torch.arguments import require_parameters, require_projection, require_step
from gem_client.torch.local_steps import LocalSgd, LocalSteps, bare
from gem_client.torch.optimizer_spec import STATE_IS_SERVERS, On, OptimizerSpec, log_differences, ways_to_train
from gem_client.torch.parameters import Parameters, dense, evaluate, fingerprint, first_values, gather
from gem_client.torch.rank_session import RankSession, names_of, ranks_of, tensors_of
from gem_client.torch.watch import Watch

log = logging.getLogger("gem_client")


class Optimizer(torch.optim.Optimizer):
    """Commits what a worker has computed and loads the new θ into the parameters. A commit takes one round trip.

    **Which optimizer.** Given parameters alone, each `step()` commits their gradients, and the server moves θ by SGD or by the
    optimizer that it was started with. Given an optimizer of PyTorch, `on` says who makes its steps:

        "worker"    This worker. Each λ-th step commits what the last λ steps have changed. Parameter groups, weight decay,
                    schedulers (on `inner`), closures and clipping work as without a server. λ is the run's `--local-steps`.
        "server"    The server, one state for all workers. Adam, AdamW, Lion, and SGD without momentum; with parameter groups
                    that differ in their learning rate, or have no weight decay. The schedule is the server's, too:
                    `schedule` hands it a scheduler of PyTorch.
        None        The server, if it makes the same steps as PyTorch: for a new Adam or AdamW with such groups, and no
                    scheduler but `schedule`. Otherwise, or if the run's workers make their own steps, this worker. The log
                    (INFO) says who, and why.

    A server that was started without `--optimizer` takes what the first worker brings; later workers must bring the same.

    **Local steps.** If parameters alone are given and the run has local steps (λ > 1), or its rule takes deltas, `step()` makes
    a step of SGD on the worker's own parameters. Every λ-th step commits the window (`LocalSgd` has the equations). If the
    lease ends within a window, or the server rejects it, the window is lost; the next one begins on fresh θ with a velocity
    of zero.

    **The end.** Call `finish` after the last step: it commits a window or an accumulation that the end of the data cut short.
    The parameters then hold the θ of this worker's last commit (with an optimizer a point ahead of it), while
    other workers still train. Call `load_final` instead to wait for them and load the run's final θ. Call `skip` for a batch
    that gets no step.

    **The learning rate and the weight decay** are the server's. `param_groups` shows η_t at the version that the parameters
    hold. A step raises InvalidRequest if something else, such as a scheduler, has changed the rate. Weight decay is added to
    each gradient here, with the parameters that the gradient was computed on.

    **A schedule on the server.** Its steps are the commits of the whole run, of all workers together: give it as many as these
    are. The server makes them, so the loop has no `scheduler.step()`:

        adamw = torch.optim.AdamW(model.named_parameters(), lr=3e-4)
        scheduler = CosineAnnealingLR(adamw, T_max=9_400)
        optimizer = Optimizer(adamw, session, on="server", schedule=scheduler)

    **The model** may be moved or converted (`.cuda()`, `.bfloat16()`), shared with other processes, and viewed, as with any
    optimizer of PyTorch. If a conversion replaces the Parameter objects
    (`torch.__future__.set_overwrite_module_params_on_conversion`), make the optimizer after it.

    Args:
        params: `model.named_parameters()`, or an optimizer of PyTorch. Tensors without names are named by their position.
        session: A session that has not joined yet, of `gem_client.connect` or `connect_ranks`. The optimizer joins the run with
            it and loads θ into the parameters.
        names: `model.named_parameters()`, if `params` has no names. The tensors' names are those in checkpoints, in
            `gem-ctl pull` and for evaluators. The name `_orig_mod`, which `torch.compile` inserts, is left out of them.
        on: Who makes the steps of an optimizer of PyTorch: "worker", "server" or None.
        schedule: A scheduler of PyTorch on that optimizer for the server, not stepped yet: CosineAnnealingLR, StepLR,
            LinearLR as a warm-up, SequentialLR of such a LinearLR and one of the other two, or OneCycleLR with
            `cycle_momentum=False`. The first worker's counts; later workers must bring the same, or none. A schedule that the
            server was started with counts instead.
        batches_per_step: Number of batches that go into one step; more than 1 if the loop accumulates gradients. A commit of λ
            local steps then covers λ times as many batches.
        overlap: Whether to compute the next gradient while a commit is under way, on the θ that the previous commit returned.
            A step then waits for the network only if the network takes longer than computing. With n workers the staleness
            is 2n − 1 on average instead of n − 1, and the server keeps one more snapshot of the worker. A step raises
            the errors of the commit before it; `finish` waits for the last commit. Not available in runs with local steps or
            deltas.
        project: A function without arguments that changes the parameters in place to keep them in a set, for example a clamp.
            It is called, without recording gradients, before the worker joins, after each local step and whenever θ was
            loaded. The run thus begins in the set, and gradients are computed there. From then on the server's θ stays as it
            is (lazy projection, Zinkevich 2003): project what `gem-ctl pull` writes, too.

    Raises:
        InvalidRequest: A parameter is not a real floating-point tensor, two parameters have the same name, the run has
            another optimizer or schedule, the server can't keep this one, or `overlap` is set in a run with local steps or
            deltas.
        LayoutMismatch: The run has a model with other names or shapes.

    Attributes:
        answer: The result of the last finished commit; None before the first.
        inner: The optimizer of PyTorch that was given; None: parameters alone.
        session: The session.
        trained: The parameters, by their names in the run.
        batches_per_step: See the argument.
        spec: Who trains the parameters, and how.
        joined: Whether it has joined the run.
    """

    def __init__(
        self,
        params: Parameters | torch.optim.Optimizer,
        session: Session | RankSession,
        *,
        on: On | None = None,
        schedule: LRScheduler | None = None,
        names: Iterable[tuple[str, Tensor]] = (),
        batches_per_step: int = 1,
        overlap: bool = False,
        project: Callable[[], Any] | None = None,
    ) -> None:
        if isinstance(params, Optimizer):
            raise InvalidRequest("this Optimizer has joined a run already: give the optimizer of PyTorch, or the parameters")
        require_parameters(params, session)
        require_projection(project)
        ways = ways_to_train(params, on, names_of(session) if names == () else names, schedule, overlap)
        self.spec = spec = ways[0]
        self.inner, self._schedule = spec.inner, schedule
        self.trained = spec.trained
        trained = list(self.trained.values())
        self.session, self._ranks = session, ranks_of(session)
        self.batches_per_step = batches_per_step
        self._overlap = overlap
        self._project = project
        self._watch = Watch(self.trained, spec.frozen, self.inner)
        self.answer: Answer | None = None
        self.joined = False
        self._scaled = False
        self._noted: list[Any] = []
        self._under_way = False
        self._keep_projected()  # else a weight that begins far outside would stay at the edge until θ is back there
        first = first_values(self.trained)
        super().__init__(trained, {"lr": 0.0})
        self._share_groups()
        self._tensors = tensors_of(session, self.trained, self.inner)
        self._generation = 0
        self.spec = self._join(ways, first)
        if len(ways) > 1:  # else the arguments have decided, or the log has said why
            own, servers = "this worker makes the steps of its", "the server makes all workers' steps, with one"
            log.info("%s %s", own if self.spec.steps_itself else servers, type(self.inner).__name__)
        if all(tensor.nameless for tensor in session.layout.tensors):
            log.warning("the tensors have no names: checkpoints and gem-ctl pull call them 0, 1, and so on; %s", NAME_TENSORS)
        with suppress(AttributeError):  # a wrapper may have no hooks: its groups are read at each step
            self.inner.register_load_state_dict_post_hook(self._inner_has_loaded)  # type: ignore[union-attr]
        self.joined = True
        self._load()

    def _join(self, ways: Sequence[OptimizerSpec], first: Any) -> OptimizerSpec:
        """Joins the run, in the first of these ways that it takes, and returns that way."""
        best, *others = ways
        try:
            self.session.join(
                first,
                groups=best.groups,
                optimizer=best.choice,
                overlap=self._overlap,
                batches_per_step=self.batches_per_step,
                pull_only_reads=True,
                frozen=fingerprint(best.frozen),
            )
        except (InvalidRequest, LayoutMismatch) as error:
            if isinstance(error, LayoutMismatch):  # other names and shapes stay so, the server's log would blame the way
                others = [other for other in others if other.groups != best.groups]
            for other in others:
                with suppress(InvalidRequest):
                    return self._join([other], first)
            if best.not_offered and isinstance(error, InvalidRequest):
                raise InvalidRequest(f"{error}. This worker did not offer that: {best.not_offered}") from None
            raise
        return best

    def _share_groups(self) -> None:
        """Has the groups and the state of the optimizer that was given, so that what changes them there changes them here."""
        for name in ("param_groups", "state", "defaults"):
            setattr(self, name, getattr(self.inner, name, getattr(self, name)))

    def _inner_has_loaded(self, inner: torch.optim.Optimizer) -> None:
        """Follows the optimizer that was given, which has replaced its groups and its state."""
        self._share_groups()
        self._show_rates()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("this optimizer can't be copied or pickled, as its worker is in the run once: use state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer that was given. What the server keeps is not in it."""
        return super().state_dict() if self.inner is None else self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the optimizer that was given."""
        if self.inner is None:
            super().load_state_dict(state_dict)
            self._show_rates()
        else:
            self.inner.load_state_dict(state_dict)
            self._share_groups()
            if not self.spec.steps_itself and state_dict.get("state"):
                log.warning(STATE_IS_SERVERS)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InvalidRequest: the run's tensors are fixed once the optimizer has joined it."""
        if self.joined:
            raise InvalidRequest("parameters can't be added: the run's tensors are fixed once the optimizer has joined it")
        bare(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the parameters' gradients."""
        if getattr(type(self.inner), "zero_grad", None) not in (None, torch.optim.Optimizer.zero_grad):
            self.inner.zero_grad()  # type: ignore[union-attr]  # a wrapper may clear more
        bare(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None, share: float | None = None) -> Any:
        """Commits the gradients and loads the new θ into the parameters. With local steps, makes one, and commits every λ-th.

        A parameter without a gradient stays where it is if SGD or this worker makes the steps. Adam, AdamW and Lion on the
        server take its gradient as zero, so that its weight decay and the moments of past gradients still move it. The log
        says so once.

        Args:
            closure: Re-evaluates the model and returns the loss, as in every PyTorch optimizer.
            loss: The batch's loss, a number or a one-element tensor, which the server records. With local steps, the server
                records the window's mean.
            share: The share of a whole batch that the gradients were computed on, for loops that cut their own batches (see
                `Session.batch_share`). Those of a ShardSampler need none. Has no effect with local steps.

        Returns:
            The loss that `closure` returned, or `loss` if there is no closure.

        Raises:
            InvalidRequest: `closure`, `loss` or `share` is something else, the learning rate in `param_groups` is not the
                server's, the loop steps a scheduler that the server steps, the parameters were changed since the last step, or
                one that was frozen when this optimizer was made has a gradient.
            NonFiniteGradient: A gradient holds a NaN or an infinity. θ is unchanged.
            NormOutOfBounds: The norm of the gradients exceeds the server's bound. θ is unchanged, and the loop may continue.
            Quarantined: The server has rejected too many gradients in a row.
            TransportError: The server was unreachable for as long as the session's `retry` allows.
        """
        require_step(closure, loss)
        self._require_servers_rate()
        return self._make_step(closure, loss, self.batches_per_step, share)

    def note(self, loss: Any) -> None:
        """Notes the loss of a batch, for trainers that call `step` without it. The next step reports the mean of those
        noted since the last one, instead of the loss that it is given.

        Args:
            loss: A number or a one-element tensor.
        """
        try:
            self._noted.append(loss.detach().reshape(()) if isinstance(loss, Tensor) else float(loss))
        except (TypeError, ValueError, RuntimeError):
            raise InvalidRequest(f"a loss is a number or a one-element tensor, not {loss!r}") from None

    def skip(self, batches: int = 1) -> None:
        """Leaves the last batch out of the run. Call it instead of `step`, for example if the loss is not finite, or if a
        GradScaler made no step. Without this call, the batch comes again.

        Args:
            batches: Number of batches to leave out, the last ones; more than 1 if the loop accumulates gradients.

        Raises:
            InvalidRequest: The loop has fewer batches than that without a step.
        """
        self.session.skip(batches)
        self._noted.clear()

    def finish(self) -> None:
        """Commits what the end of the data has cut short, and loads θ. Call it after the last step. Raises as `step` does.

        It makes a step if gradients of fewer than `batches_per_step` batches are accumulated, commits an incomplete window of
        local steps, and with `overlap` waits for the commit under way. A loop that accumulates and clips its gradients must
        clip them before `finish` too, as before each `step`. With a GradScaler, accumulated gradients are still
        scaled, so `finish` ignores them: call the scaler's `step` first, or their batches are trained on again. An optimizer
        that can't do without a closure (LBFGS) makes no step here: `finish` skips the accumulated batches, and the log says
        so. Call `step(closure)` first to train on them. Without a sampler, `finish` can't know that gradients are accumulated,
        and leaves them out: call `step` for them first.

        Raises InvalidRequest, and leaves the parameters as they are, if something else has changed them, such as steps of the
        optimizer that was given: no commit has the change, and loading θ would undo it."""
        self._require_unchanged(at_end=True)
        rest = self.session.batches_in_hand
        if 0 < rest < self.batches_per_step and not self._scaled and self._gradients_are_new():
            if self._local is not None and self._local.needs_closure:
                log.warning(
                    "the last %d batches are skipped: %s makes no step without a closure. To train on them, call "
                    "step(closure) before finish()",
                    rest, type(self.inner).__name__,
                )  # fmt: skip
                self.skip(rest)
            else:
                self._make_step(None, None, rest)
        if self._local is not None and self._local.made:
            self._commit_window(self._local)
        self.answer = self.session.finish_commit() or self.answer
        self._under_way = False
        self._load()
        self._tensors.wait_for_loads()  # before something else is received where θ is copied from

    def load_final(self, average: bool = False) -> None:
        """Loads the run's final θ into the parameters. Evaluate or save the model after this.

        It calls `finish`, leaves the run and waits until the run is over (see `Session.pull_final`). Raises as these two do.

        Args:
            average: Whether to load the final average of θ that the run keeps (`gem-server --average`) instead.
        """
        self.finish()
        self.session.pull_final(average)
        self._load()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """A GradScaler reads this before each step. False makes it unscale the gradients itself."""
        self._scaled = True
        return False

    def _make_step(self, closure: Callable[[], Any] | None, loss: Any, batches: int, share: float | None = None) -> Any:
        self._share_groups()
        self._watch.require_same_parameters()
        self._require_unchanged(at_end=False)
        evaluated = evaluate(closure) if self._local is None else self._local.step(self._rate, closure)
        loss = loss if closure is None else evaluated
        returned = loss
        if self._noted:
            loss, self._noted = sum(self._noted) / len(self._noted), []
        if self._local is not None:
            self._count_step(self._local, loss, batches)
        elif self._overlap:
            self._step_overlapping(loss, batches, share)
        else:
            self._gather(loss)
            gradient, reported = self._tensors.sent()
            try:
                self.answer = self.session.commit(
                    gradient, loss=reported, batches=batches, base=self._base, decay=False, share=share
                )
            except RejectedCommit:
                if self.session.base != self._base:  # of several servers, only some rejected it
                    self._load()
                raise
            self._load()
        if self.batches_per_step > 1:
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad.used_at_version = parameter.grad._version  # type: ignore[attr-defined]
        return returned

    def _require_unchanged(self, at_end: bool) -> None:
        """Raises InvalidRequest if the parameters hold a change that no commit has. Between local steps they are the worker's
        own, and the window's commit has them. A projection may round values anew each time."""
        if self._local is None or not self._local.made:
            exact = at_end and self._project is None
            self._watch.require_unchanged(self._known_values(), all_values=at_end, exact=exact)

    def _known_values(self) -> Sequence[Tensor] | None:
        """The values that the parameters should hold; None if that is not known any more."""
        if self._local is not None and self._local.began_on:
            return self._local.began_on
        if self._under_way or self._project or not self._tensors.current or self._base != self.session.base:
            return None
        return self._tensors.thetas

    def _gradients_are_new(self) -> bool:
        """Whether any gradient was written since the last step, and is not just zero. Averages those of several ranks then."""
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        written = any(gradient._version != getattr(gradient, "used_at_version", None) for gradient in gradients)
        new = written and any(bool(dense(gradient).any()) for gradient in gradients)
        return new if self._ranks is None else self._ranks.average(list(self.trained.values()), new)

    def _count_step(self, local: LocalSteps, loss: Any, batches: int) -> None:
        self._keep_projected()
        self.session.add_to_window(batches)
        local.count(loss)
        lease_lost = self.session.generation != self._base.generation  # asking for a shard may have found out
        if local.made >= self._settings.local_steps or lease_lost:
            self._commit_window(local)

    def _commit_window(self, local: LocalSteps) -> None:
        self._tensors.bind()
        if self._tensors.sends:
            local.write(self._tensors.gradients)
        self._tensors.send(local.loss)
        update, loss = self._tensors.sent()
        try:
            self.answer = self.session.commit(
                update,
                loss=loss,
                batches=0,  # those of the window's steps
                base=self._base,
                kind=self._kind,
                decay=False,
            )
        except RejectedCommit:
            local.forget()
            self._load()  # what the window began on, should the pull fail
            self.session.take_theta()
            self._load()
            raise
        self._load()

    def _step_overlapping(self, loss: Any, batches: int, share: float | None) -> None:
        computed_on, rejected = self._base, None
        try:
            self.answer = self.session.finish_commit() or self.answer
        except RejectedCommit as error:
            rejected = error  # the last gradient was rejected; this one may be fine
        self._gather(loss)  # before the parameters move on from what it was computed on
        self._load()
        gradient, reported = self._tensors.sent()
        self.session.begin_commit(gradient, loss=reported, batches=batches, base=computed_on, decay=False, share=share)
        self._under_way = True
        if rejected is not None:
            raise rejected

    def _gather(self, loss: Any) -> None:
        """Begins to bring the gradients, weight decay included, and the loss to where a commit sends them from."""
        self._tensors.bind()
        self._watch.warn_of_missing(self._settings.optimizer)
        if self._tensors.sends:
            with torch.no_grad():
                gather(self.trained.values(), self._tensors.gradients, self._decays)
        self._tensors.send(loss)

    def _load(self) -> None:
        """Copies the received θ into the parameters."""
        self._base = self.session.base
        self._follow_server()
        self._tensors.load()
        self._keep_projected()
        if self._local is not None:
            self._local.begin()
        self._watch.loaded()

    def _keep_projected(self) -> None:
        if self._project is not None:
            with torch.no_grad():
                self._project()

    def _require_servers_rate(self) -> None:
        if self._schedule is not None and self._schedule.last_epoch:
            raise InvalidRequest("delete scheduler.step(): the server steps this schedule, with the commits of all workers")
        for group, factor in zip(self.param_groups, self.spec.factors, strict=False):
            made_here = self._schedule is None and "initial_lr" in group
            if made_here or group["lr"] != factor * self._rate:
                what = "a scheduler was made" if made_here else f"it was set to {group['lr']}"
                raise InvalidRequest(
                    f"the learning rate is the server's ({factor * self._rate}), but {what} here: delete scheduler.step(), and "
                    "hand the scheduler over, as Optimizer(..., schedule=scheduler); or keep it, and make this worker's own "
                    'steps, with Optimizer(..., on="worker"); or set --schedule on the server'
                )

    def _follow_server(self) -> None:
        """Takes the rate of that θ. A new lease may come with other hyperparameters, from a server that was restarted."""
        if self._base.generation != self._generation:
            self._settings, self._kind = self.session.hyperparameters, self.session.update_kind
            if self.spec.choice is not None:
                log_differences(self.spec.choice, self._settings)
            tensors = self.session.layout.tensors
            self._decays = [decay_of_workers(self._settings) * tensor.group.decays for tensor in tensors]
            self._local = self._local_steps()
            self._generation = self._base.generation
        self._rate = rate(self._settings, self.session.progress)
        self._show_rates()

    def _show_rates(self) -> None:
        """Writes the server's rate into the parameter groups, if it is the server's."""
        for group, factor in zip(self.param_groups, self.spec.factors, strict=False):
            group["lr"] = factor * self._rate

    def _local_steps(self) -> LocalSteps | None:
        """Makes local steps; None if each gradient is committed as it is.

        Raises InvalidRequest if `overlap` is set too, or if the run's workers bring an optimizer and this one does not."""
        local_steps = self._settings.local_steps
        if local_steps == 1 and self._kind == "gradient":
            return None
        if self._overlap:
            raise InvalidRequest(
                f"overlap is not available in this run: its workers make local steps ({local_steps} per commit, which holds a "
                f"{self._kind})"
            )
        if self.inner is not None and self.spec.steps_itself:
            return LocalSteps(list(self.trained.values()), self.inner)
        if self._settings.optimizer == "worker":
            raise InvalidRequest("in this run each worker brings its optimizer: use Optimizer(torch.optim...., session)")
        factors = [tensor.group.rate_factor for tensor in self.session.layout.tensors]
        return LocalSgd(list(self.trained.values()), factors, self._decays, self._settings.local_momentum, self._kind)
