"""Lightning's Trainer as a worker of a run: a callback, and the loader that belongs to it.

    with gem_client.connect("host:50051") as session:
        gem = GemCallback(session)
        trainer = Trainer(callbacks=[gem], max_epochs=-1)
        trainer.fit(module, gem.loader(dataset))

It works with `pytorch_lightning` and with `lightning.pytorch`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from gem_api.errors import InvalidRequest
from gem_api.process.extras import install

from gem_client.session import Session
from gem_client.torch import Optimizer, ShardSampler
from gem_client.torch.optimizer_spec import On
from gem_client.torch.sampler import Passes, step_to

__all__ = ["GemCallback"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same library under two names; a user imports one of them
# Callbacks that end with their own average in the module. A worker that leaves early would commit it.
AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")


class GemCallback:
    """Trains a LightningModule as a worker of a run, with Lightning's own Trainer and no Strategy.

    **The optimizer.** `configure_optimizers` stays as it is: the callback makes an `Optimizer` of what it returns. A schedule
    by steps counts this worker's own; one by epochs counts the run's. To train by the server's rule alone, return
    `gem_client.torch.Optimizer(self.named_parameters(), session)` there.

    **The end.** The epochs are the server's, so `Trainer(max_epochs=...)` has no effect. When every sample of every epoch was
    trained on, the callback waits for the other workers, loads the run's final θ, and stops the trainer. The last validation
    and the last checkpoint are of this θ. `max_steps`, `max_time` and callbacks such as EarlyStopping make this worker leave
    earlier; it then keeps the θ of its last commit, or with an optimizer a point ahead of it.

    **The session** joins the run in `fit`, and is closed when that ends, also by an exception or Ctrl-C.

    Args:
        session: A session that has not joined yet.
        on: Who makes the steps of the optimizer: "worker", "server" or None (see `Optimizer`).
        loss: The name of a metric that the module logs in its validation. After each validation the callback reports it to
            the server, for the live page and the report; give it to one worker. None: nothing is reported.
        accuracy: The name of another metric, from 0 to 1, to report with it.

    Raises:
        InvalidRequest: In `fit`, if the trainer has a setting that can't work: several processes, several optimizers, a
            `ckpt_path`, a limit of training batches, a callback that averages weights, or a schedule that is the server's.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> GemCallback:
        return super().__new__(_callback(cls))  # type: ignore[arg-type]

    def __init__(self, session: Session, *, on: On | None = None, loss: str | None = None, accuracy: str | None = None) -> None:
        self._session = session
        self._loss, self._accuracy = loss, accuracy
        self._on = on
        self._loader: _Loader | None = None
        self._optimizer: Optimizer
        self._by_epochs: list[tuple[Any, int]] = []  # the schedules that count epochs, and how many make one of their steps
        self._stepping = self._finished = False

    def loader(self, dataset: Sized, batch_size: int | None = None, **settings: Any) -> Any:
        """Returns the training batches, for `trainer.fit(module, ...)`, or for the `train_dataloader` of a datamodule or module
        to return. It has no length: other workers take some of them.

        Args:
            dataset: The training set, which must be the same for all workers.
            batch_size: Number of samples per batch. The default is the run's batch size.
            settings: Further arguments of `DataLoader`, such as `num_workers` and `collate_fn`. Loading processes import the
                script: put its code under `if __name__ == "__main__":`.
        """
        self._loader = _Loader(self._session, dataset, batch_size, settings)
        return self._loader

    # -- what Lightning calls, in this order

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what can't work."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise InvalidRequest(
                f"each worker is a process of its own, not one of {trainer.world_size} ranks: use Trainer(devices=1), and "
                "start the script once for each worker; a loop of your own may use gem_client.torch.connect_ranks"
            )
        if trainer.ckpt_path:
            raise InvalidRequest(
                "ckpt_path is not available: the server holds the state of the run. To begin a new run with a checkpoint's "
                "weights, load them into the module"
            )
        if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
            raise InvalidRequest(
                "limit_train_batches, overfit_batches and fast_dev_run are not available: a pass that is cut short is "
                "continued by the next one. Use max_steps"
            )
        kinds = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
        if averaging := sorted(kinds & set(AVERAGING)):
            raise InvalidRequest(
                f"{averaging[0]} is not available: it would replace the run's final θ. To average θ, do it in another process, "
                "with session.read()"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes the optimizer, which exists now, and joins the run. The first batch is read after this."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise InvalidRequest(
                "a worker has one optimizer, and automatic optimization: one run trains one model. Several models need a loop "
                "of your own, and a gem-server each; several optimizers of one model go into one class"
            )
        given, batches = trainer.optimizers[0], trainer.accumulate_grad_batches
        schedules = trainer.lr_scheduler_configs
        if schedules and (self._on == "server" or (isinstance(given, Optimizer) and given.inner is None)):
            raise InvalidRequest("the schedule is the server's (gem-server --schedule): configure_optimizers can't bring one")
        if any(config.interval != "step" and config.reduce_on_plateau for config in schedules):
            raise InvalidRequest("ReduceLROnPlateau is not available: each worker would lower its own rate at another time")
        if not isinstance(given, Optimizer):
            names = pl_module.named_parameters()
            given = Optimizer(given, self._session, on=self._on, names=names, batches_per_step=batches)
            trainer.optimizers = [given]
        elif given.batches_per_step != batches:
            raise InvalidRequest(
                f"accumulate_grad_batches is {batches}, but the optimizer has batches_per_step={given.batches_per_step}: make "
                "them equal"
            )
        elif given.session is not self._session:
            raise InvalidRequest("the callback and the optimizer have two sessions: give both the same")
        self._optimizer = given
        by_epochs = [config for config in schedules if config.interval == "epoch"]
        self._by_epochs = [(config.scheduler, config.frequency) for config in by_epochs]
        for config in by_epochs:
            config.frequency = sys.maxsize  # Lightning would step it in each pass, and an epoch may take several
        trainer.fit_loop.max_epochs = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses batches that the server does not deal."""
        if trainer.train_dataloader is not self._loader:
            raise InvalidRequest(
                "train on the callback's own loader alone: trainer.fit(module, gem.loader(dataset)); or have the "
                "train_dataloader() of the datamodule return gem.loader(self.dataset)"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Has the trainer's epoch be the run's, also in a worker that came later, and schedules by epochs follow it."""
        assert self._loader is not None
        epoch, progress = self._loader.passes.epoch, trainer.fit_loop.epoch_progress.current
        progress.started = progress.processed = progress.completed = epoch
        progress.ready = epoch + 1
        for scheduler, epochs in self._by_epochs:
            step_to(epoch // epochs, scheduler)
        batches = trainer.fit_loop._data_fetcher
        if epoch == 0 and batches.done:  # the rest of epoch 0: Lightning begins a new iterator in later epochs alone
            iter(batches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Tells the session about the batch. Lightning has already read the next one, to know whether this is the last."""
        assert self._loader is not None
        self._loader.passes.deliver()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Notes the loss, which Lightning has divided for accumulation, and scaled for 16-bit precision."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # As a tensor: get_scale() would wait for the forward pass.
        scale = scaler.scale(torch.ones_like(loss, dtype=torch.float32)) if scaler else 1
        self._optimizer.note(loss.detach() * trainer.accumulate_grad_batches / scale)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """From here on, the batches in hand get a step or, if their gradients overflowed, none."""
        self._stepping = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leaves out batches for which the GradScaler made no step. After the last batch of a pass, looks for more."""
        if self._stepping and (left := self._session.batches_in_hand):
            self._optimizer.skip(left)
        self._stepping = False
        if trainer.is_last_batch:
            self._end_pass(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports the validation to the server."""
        if self._loss is None or trainer.sanity_checking:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if missing := [name for name in (self._loss, self._accuracy) if name is not None and name not in metrics]:
            raise InvalidRequest(
                f"the module logs no {missing[0]!r} in its validation: it logs {', '.join(metrics) or 'nothing'}"
            )
        self._session.report_evaluation(metrics[self._loss], None if self._accuracy is None else metrics[self._accuracy])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Looks for more batches, also if the epoch had none, or ended without its last one."""
        self._end_pass(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves the run, also if the trainer ends before it."""
        if not self._finished:
            self._optimizer.finish()
        self._session.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves the run at once."""
        self._session.__exit__(type(exception), exception, exception.__traceback__)

    def _end_pass(self, trainer: Any) -> None:
        """Stops the trainer, with the run's final θ, if the run is complete. Does nothing if it stops anyway."""
        stops = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if self._finished or stops or self._loader is None:
            return
        self._optimizer.finish()
        if not self._loader.passes.more():
            self._optimizer.load_final()
            self._finished = trainer.should_stop = True
            # Lightning would otherwise wait for steps that never come.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


class _Loader:
    """The training batches. Lightning reads them once the session has joined, and not before."""

    def __init__(self, session: Session, dataset: Sized, batch_size: int | None, settings: dict[str, Any]) -> None:
        self._session, self._dataset, self._batch_size, self._settings = session, dataset, batch_size, settings

    @cached_property
    def passes(self) -> Passes:
        return Passes(ShardSampler(self._session, self._dataset, self._batch_size), **self._settings)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.passes)


@cache
def _callback(kind: type) -> type:
    """The class with the base class that Trainer wants, from the package that the user has imported. Called late, because
    sorted imports name this module before Lightning."""
    package = next((name for name in PACKAGES if name in sys.modules), None)
    package = package or next((name for name in PACKAGES if find_spec(name.partition(".")[0])), None)
    if package is None:
        raise ModuleNotFoundError(f"gem_client.lightning needs Lightning: {install('lightning')}", name="pytorch_lightning")
    return type(
        kind.__name__, (kind, import_module(package).Callback), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
