"""A session that several ranks have together, and what `Optimizer` and `ShardSampler` need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from gem_api import errors
from gem_api.errors import GemError, InvalidRequest, LeaseEnded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.schedule import rate
from gem_api.v1 import tensors_pb2, training_pb2
from torch import Tensor

from gem_client.answer import Answer, Base
from gem_client.connecting import connect
from gem_client.run.shards import Shards
from gem_client.session import Session
from gem_client.torch.ranks import Ranks, lost_rank, part_of
from gem_client.torch.session_tensors import SessionTensors


def connect_ranks(address: str, model: Any, **settings: Any) -> RankSession:
    """Opens a session that the ranks of a DistributedDataParallel model have together: they are one worker of the run.

    Call it on all ranks, after `torch.distributed.init_process_group`, in place of `gem_client.connect`. Make the `Optimizer`
    and the `ShardSampler` with the session, and run the same loop on all ranks. DistributedDataParallel averages the gradients,
    rank 0 commits them, and all ranks get θ.

    **Batches.** Each batch is divided among the ranks, in equal parts. If it can't be divided, some of its samples come twice.

    **Errors** that rank 0 meets are raised on all ranks. If a rank ends, the others raise TransportError: at their next call,
    or if `backward` notices it, at the end of `with connect_ranks(...) as session:`. Let the error end the script: the server
    then deals the worker's batches again.

    **Alone**, without the others, a rank may ask `is_first` (False but on rank 0), `read` and `report_evaluation`, what the run
    is and how far. On ranks other than 0, `theta` and `gradient` are empty. Evaluate and save `model.module`.

    Args:
        address: The server's address.
        model: The model as DistributedDataParallel wraps it. FSDP is not available.
        settings: Further arguments of `gem_client.connect`. Those of rank 0 count.

    Raises:
        InvalidRequest: The model is something else, or `gem_client.connect` raises it.
        TransportError: A rank has ended.
    """
    return RankSession(Ranks(model), connect(address, **settings))


def of_rank_0(name: str) -> Any:
    """A property of `Session`, as rank 0 has told it last."""
    return property(lambda session: session.told(name), doc=getattr(Session, name).__doc__)


class RankSession:
    """A session that the ranks of a DistributedDataParallel model have together, as `connect_ranks` says.

    Rank 0 makes the calls that need all ranks. Its result, or its error, goes to the others, with the state that they need.

    Attributes:
        ranks: The ranks.
        own: This rank's own session. Only that of rank 0 joins.
    """

    def __init__(self, ranks: Ranks, session: Session) -> None:
        self.ranks = ranks
        self.own = session
        self._shards: Shards | None = None
        self._raised: Exception | None = None
        self._known_generation = 0
        self._told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """The rest is as this rank's own session says."""
        return getattr(self.own, name)

    def __enter__(self) -> RankSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.own.__exit__(kind, error, trace)
        if (lost := lost_rank(error)) is not None:  # `backward` was the first to notice
            raise lost from error

    # -- what rank 0 has told

    hyperparameters = of_rank_0("hyperparameters")
    layout = of_rank_0("layout")
    update_kind = of_rank_0("update_kind")
    run_id = of_rank_0("run_id")
    batches_per_commit = of_rank_0("batches_per_commit")
    batch_share = of_rank_0("batch_share")
    base = of_rank_0("base")
    progress = of_rank_0("progress")
    version = of_rank_0("version")
    generation = of_rank_0("generation")
    steps_done = of_rank_0("steps_done")
    skipped = of_rank_0("skipped")
    joined = of_rank_0("joined")

    def told(self, name: str) -> Any:
        """What rank 0 has told last; before it has, what this rank's own session says."""
        return self._told[name] if name in self._told else getattr(self.own, name)

    @property
    def learning_rate(self) -> float:
        """See `Session.learning_rate`."""
        return rate(self.hyperparameters, self.progress)

    @property
    def is_first(self) -> bool:
        """See `Session.is_first`; False on ranks other than 0, so that one process in the whole run is first."""
        return self.ranks.leads and self.own.is_first

    # -- what all ranks do together

    @property
    def batches_in_hand(self) -> int:
        """See `Session.batches_in_hand`."""
        return int(self.first(lambda: self.own.batches_in_hand))

    def join(self, *args: Any, **kwargs: Any) -> Vector:
        """See `Session.join`."""
        self.first(lambda: self.own.join(*args, **kwargs))
        return self.own.theta

    def take_theta(self) -> Vector:
        """See `Session.take_theta`."""
        self.first(self.own.take_theta)
        return self.own.theta

    def pull_final(self, *args: Any, **kwargs: Any) -> Vector:
        """See `Session.pull_final`."""
        self.first(lambda: self.own.pull_final(*args, **kwargs))
        return self.own.theta

    def commit(self, *args: Any, loss: float | None = None, **kwargs: Any) -> Answer:
        """See `Session.commit`. The loss is the mean of the ranks'."""
        loss = self.ranks.mean(loss)
        answer = self._answer(lambda: self.own.commit(*args, loss=loss, **kwargs))
        assert answer is not None
        return answer

    def begin_commit(self, *args: Any, loss: float | None = None, **kwargs: Any) -> None:
        """See `Session.begin_commit`. The loss is the mean of the ranks'."""
        loss = self.ranks.mean(loss)
        self.first(lambda: self.own.begin_commit(*args, loss=loss, **kwargs))

    def finish_commit(self) -> Answer | None:
        """See `Session.finish_commit`."""
        return self._answer(self.own.finish_commit)

    def skip(self, batches: int = 1) -> None:
        """See `Session.skip`: leaves out the last `batches` batches, of all ranks."""
        self.first(lambda: self.own.skip(batches))

    def add_to_window(self, batches: int) -> None:
        """See `Session.add_to_window`."""
        self.first(lambda: self.own.add_to_window(batches))

    def shards(self, samples: int, batch_size: int | None = None, fingerprint: bytes = b"") -> RankShards:
        """This rank's part of the batches of `Session.shards`.

        Args:
            samples: Number of samples in the training set.
            batch_size: Number of indices per batch of all ranks together. The default is the run's batch size.
            fingerprint: See `Session.shards`; that of rank 0 counts.
        """

        def open_shards() -> None:
            self._shards = self.own.shards(samples, batch_size, fingerprint)

        self.first(open_shards)
        return RankShards(self, self._shards, min(batch_size or self.hyperparameters.batch_size, samples))

    def first(self, work: Callable[[], Any]) -> Any:
        """Has rank 0 call `work`. All ranks return its result, as JSON holds it, or raise its error; an array stays there."""
        message = self.ranks.first(partial(self._outcome, work))
        result, error, run = (message.pop(name, None) for name in ("result", "error", "run"))
        if run is not None:
            self._told |= run
            self._told["hyperparameters"] = Hyperparameters.from_message(
                training_pb2.Hyperparameters.FromString(bytes.fromhex(run["hyperparameters"]))
            )
            self._told["layout"] = Layout.from_message(tensors_pb2.TensorLayout.FromString(bytes.fromhex(run["layout"])))
        version, generation, peers = message["base"]
        self._told |= message | {"base": Base(version, generation, tuple(peers))}
        if error is not None:
            raised, self._raised = self._raised, None
            raise raised or _error(*error)
        return result

    def _answer(self, work: Callable[[], Answer | None]) -> Answer | None:
        told = self.first(lambda: _facts(work()))
        return None if told is None else Answer(self.own.theta, **told)

    def _outcome(self, work: Callable[[], Any]) -> dict[str, Any]:
        """The message that tells all ranks how rank 0's work ended."""
        told: dict[str, Any]
        try:
            result = work()
            told = {"result": None if isinstance(result, np.ndarray) else result}
        except Exception as error:
            self._raised = error
            told = {"error": [type(error).__name__, str(error), getattr(error, "reason", "")]}
        session = self.own
        told |= {
            name: getattr(session, name)
            for name in ("base", "progress", "version", "generation", "steps_done", "skipped", "joined")
        }
        if session.joined:
            told |= self._of_member(session)
        if self._shards is not None:
            told |= {"complete": self._shards.complete, "samples_in_hand": self._shards.samples_in_hand}
        return told

    def _of_member(self, session: Session) -> dict[str, Any]:
        told: dict[str, Any] = {"batch_share": session.batch_share}
        if self._shards is not None:
            told["most_batches"] = self._shards.most_batches
        if session.generation != self._known_generation:
            self._known_generation = session.generation
            told["run"] = {
                "hyperparameters": session.hyperparameters.to_message().SerializeToString().hex(),
                "layout": session.layout.to_message().SerializeToString().hex(),
                "update_kind": session.update_kind,
                "run_id": session.run_id,
                "batches_per_commit": session.batches_per_commit,
            }
        return told


class RankShards:
    """One rank's part of the batches that rank 0's session is dealt: what `ShardSampler` needs of `Shards`.

    Args:
        session: The ranks' session.
        dealt: Rank 0's own shards; None on the others.
        whole: Samples in a whole batch of all ranks together.
    """

    def __init__(self, session: RankSession, dealt: Shards | None, whole: int) -> None:
        self._session, self._dealt, self._whole = session, dealt, whole

    def __iter__(self) -> Iterator[list[int]]:
        ranks, batches = self._session.ranks, iter(self._dealt or ())
        while (batch := self._session.first(lambda: next(batches, None))) is not None:
            yield part_of(batch, ranks.number, ranks.count, self._whole)

    def items(self) -> Iterator[int]:
        """Raises InvalidRequest: see `ShardSampler.items`."""
        raise InvalidRequest("items() is not available with several ranks: each would read the same file. Use one rank")

    @property
    def complete(self) -> bool:
        return bool(self._session.told("complete"))

    @property
    def most_batches(self) -> int | None:
        most: int | None = self._session.told("most_batches")
        return most

    @property
    def samples_in_hand(self) -> int:
        return int(self._session.told("samples_in_hand"))

    @property
    def goes_on(self) -> bool:
        return bool(self._session.first(lambda: self._dealt is not None and self._dealt.goes_on))

    @property
    def is_over(self) -> bool:
        return bool(self._session.first(lambda: self._dealt is not None and self._dealt.is_over))

    def next_epoch(self) -> int | None:
        epoch: int | None = self._session.first(lambda: self._dealt.next_epoch() if self._dealt else None)
        return epoch

    def end_epochs(self) -> None:
        if self._dealt is not None:
            self._dealt.end_epochs()

    def loader_tells(self) -> None:
        if self._dealt is not None:
            self._dealt.loader_tells()

    def deliver(self) -> None:
        if self._dealt is not None:
            self._dealt.deliver()


class RankTensors(SessionTensors):
    """The tensors of rank 0's session; the other ranks have none, and get their parameters from rank 0."""

    def __init__(self, session: RankSession, trained: Mapping[str, Tensor]) -> None:
        super().__init__(session.own, trained)
        self._ranks = session.ranks
        self.sends = session.ranks.leads

    def bind(self) -> None:
        if self.sends:
            super().bind()

    def load(self) -> None:
        if self.sends:
            super().load()
        self._ranks.share(self._parameters)


def ranks_of(session: Session | RankSession) -> Ranks | None:
    """The ranks that have the session together; None if one process has it."""
    return session.ranks if isinstance(session, RankSession) else None


def names_of(session: Session | RankSession) -> Iterable[tuple[str, Tensor]]:
    """The names that the parameters have without DistributedDataParallel, if ranks have the session together."""
    return session.ranks.names if isinstance(session, RankSession) else ()


def tensors_of(
    session: Session | RankSession, trained: Mapping[str, Tensor], inner: torch.optim.Optimizer | None
) -> SessionTensors:
    """The session's buffers as tensors. Raises InvalidRequest if its ranks can't train these parameters together."""
    if not isinstance(session, RankSession):
        return SessionTensors(session, trained)
    averaged = {id(parameter) for _, parameter in session.ranks.names}
    if others := [name for name, parameter in trained.items() if id(parameter) not in averaged]:
        raise InvalidRequest(
            f"parameter {others[0]!r} is not in the model that connect_ranks got, so nobody averages its gradient: wrap "
            "everything that is trained in one DistributedDataParallel"
        )
    if isinstance(inner, torch.optim.LBFGS):
        raise InvalidRequest(
            "LBFGS is not available with several ranks: each would search by its own loss. Use another optimizer"
        )
    return RankTensors(session, trained)


def _facts(answer: Answer | None) -> dict[str, Any] | None:
    """An answer without its θ."""
    return (
        None if answer is None else {each.name: getattr(answer, each.name) for each in fields(answer) if each.name != "theta"}
    )


def _error(kind: str, text: str, reason: str) -> GemError:
    """The error that rank 0 has met; a GemError if it is none of ours."""
    known = getattr(errors, kind, None)
    if known is None:
        return GemError(f"rank 0 of this worker failed: {kind}: {text}")
    error: GemError = LeaseEnded(text, reason) if known is LeaseEnded else known(text)
    return error
