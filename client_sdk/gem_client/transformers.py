"""Hugging Face's Trainer as a worker of a run: a mixin for `transformers.Trainer` and its subclasses.

class Worker(GemTrainerMixin, transformers.Trainer):
    pass

with gem_client.connect("host:50051") as session:
    trainer = Worker(session=session, model=model, args=args, train_dataset=dataset)
    trainer.train()
    trainer.save_model()
"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import torch
from gem_api.errors import InvalidRequest
from gem_api.process.extras import install

from gem_client.session import Session
from gem_client.torch import Optimizer, ShardSampler
from gem_client.torch.optimizer_spec import On
from gem_client.torch.sampler import Passes

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"gem_client.transformers needs {error.name}: {install('transformers')}", name=error.name
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

__all__ = ["GemTrainerMixin"]


class GemTrainerMixin(Trainer):  # type: ignore[misc]  # Any to mypy, which does not read Transformers
    """Trains a model as a worker of a run, with the loop, the logs and the callbacks of `transformers.Trainer`.

    **The optimizer** is the one that the trainer makes of its arguments (`optim`, `learning_rate`, `weight_decay`), or that is
    passed as `optimizers=`. If the worker makes its steps, so is the schedule. If the workers share the data, it advances with
    the commits of all of them, and therefore ends when the run does; otherwise with this worker's steps. With `on="server"`,
    the schedule is the server's, and `lr_scheduler_type` has no effect.

    **The end.** The epochs are the server's, so `num_train_epochs` has no effect. When every sample of every epoch was trained
    on, the trainer waits for the other workers, loads the run's final θ, evaluates and saves it if it does so during training,
    and ends. `max_steps` and callbacks such as EarlyStoppingCallback make this worker leave earlier; it then keeps the θ of its
    last commit. A positive `max_steps` also sets the schedule, as without a server.

    **fp16.** A step that the trainer's GradScaler leaves out, because a gradient overflowed, leaves its batches out of the run.

    **The session** joins the run in `train`, and is closed when that ends, also by an exception or Ctrl-C.

    Args:
        args: The trainer's positional arguments.
        session: A session that has not joined yet.
        on: Who makes the steps of the optimizer: "worker" or "server". None: this worker if there is a schedule, as the
            trainer's default is; else as in `gem_client.torch.Optimizer`.
        kwargs: The trainer's keyword arguments.

    Raises:
        InvalidRequest: The trainer has a setting that can't work: several processes, several GPUs, DeepSpeed, FSDP, or
            `auto_find_batch_size`.
    """

    lr_scheduler: Any
    _passes: Passes

    def __init__(self, *args: Any, session: Session, on: On | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        self._on = on
        self._gem_optimizer: Optimizer | None = None
        self._stops_itself = self.args.max_steps > 0
        self._require_supported()
        self.add_callback(_RunCallback(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains until the run is complete. The arguments are those of `Trainer.train`, but for `resume_from_checkpoint`.

        Raises InvalidRequest if there is a checkpoint to resume from, or if the trainer has trained before."""
        if resume_from_checkpoint:
            raise InvalidRequest(
                "resume_from_checkpoint is not available: the server holds the state of the run. To begin a new run with a "
                "checkpoint's weights, load them into the model"
            )
        if self._gem_optimizer is not None:
            raise InvalidRequest("a trainer trains once: make another one, with another session")
        with self._session:
            return super().train(None, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the trainer's optimizer, and joins the run with it. The model is on its device by then."""
        if self._gem_optimizer is None:
            if self._on == "server" and self.lr_scheduler is not None:
                raise InvalidRequest("the schedule is the server's (gem-server --schedule): leave it out of optimizers=")
            inner = super().create_optimizer(*args, **kwargs)
            names = self.model.named_parameters()
            batches = self.args.gradient_accumulation_steps
            has_schedule = self.lr_scheduler is not None or self.args.lr_scheduler_type != "constant"
            on = self._on or ("worker" if has_schedule else None)
            self._gem_optimizer = Optimizer(inner, self._session, on=on, names=names, batches_per_step=batches)
            self.optimizer = self._gem_optimizer
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        """The batches that the server assigns to this worker, with the settings of the trainer's own loader."""
        self.create_optimizer()
        own = super().get_train_dataloader()
        if not isinstance(own.dataset, Sized):
            raise InvalidRequest("train_dataset needs a length: the server deals its samples by their index")
        sampler = ShardSampler(self._session, own.dataset, self.args.train_batch_size)
        names = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor", "persistent_workers")
        self._passes = Passes(sampler, **{name: getattr(own, name) for name in names})
        if not self._stops_itself:
            self.args.max_steps = self._steps_of(sampler)
        return self._passes

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes the trainer's schedule, or if the server makes the steps, one that leaves the learning rate to it."""
        assert self._gem_optimizer is not None
        if self._gem_optimizer.spec.steps_itself:
            super().create_scheduler(num_training_steps, optimizer)
            if self._session.version and self._schedule_is_shared:
                with warnings.catch_warnings():  # of a schedule that advances before the first step
                    warnings.simplefilter("ignore")
                    self._follow_run()
                    self.lr_scheduler.step()
        else:
            self.lr_scheduler = _ServersSchedule(optimizer or self.optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next step. If there are none, the pass ends: without a length, the trainer would ask again."""
        batches, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        if not batches:
            self.control.should_epoch_stop = True
        return batches, items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on a batch, and notes its loss, which the trainer has divided for accumulation."""
        assert self._gem_optimizer is not None
        self._passes.deliver()
        loss = super().training_step(*args, **kwargs)
        self._gem_optimizer.note(loss * self.current_gradient_accumulation_steps)
        return loss

    def _require_supported(self) -> None:
        if self.accelerator.distributed_type != "NO":
            raise InvalidRequest(
                "each worker is a process of its own, without torchrun, DeepSpeed and FSDP: start the script once for each "
                "worker; a loop of your own may use gem_client.torch.connect_ranks"
            )
        if self.args.n_gpu > 1:
            raise InvalidRequest(
                f"the trainer would split each batch over {self.args.n_gpu} GPUs (DataParallel): give each worker one, with "
                "CUDA_VISIBLE_DEVICES=0 for the first, 1 for the second, and so on"
            )
        if self.args.auto_find_batch_size:
            raise InvalidRequest("auto_find_batch_size is not available: the batches are dealt before the first step")

    def _steps_of(self, sampler: ShardSampler) -> int:
        """Steps of the whole run or, if each worker has its own number, of this worker."""
        try:
            return -(-len(sampler) // self.args.gradient_accumulation_steps) or 1
        except TypeError:
            raise InvalidRequest("this run has no end: set max_steps, after which this worker leaves") from None

    @property
    def _schedule_is_shared(self) -> bool:
        """Whether the trainer has made the schedule, and for all steps of all workers."""
        settings = self._session.hyperparameters
        all_steps = settings.epochs > 0 and not settings.steps and settings.shards == "partition" and not self._stops_itself
        made = self._created_lr_scheduler and isinstance(self.lr_scheduler, torch.optim.lr_scheduler.LambdaLR)
        return made and all_steps

    def _follow_run(self) -> None:
        """Moves a shared schedule to where the run is. The trainer then advances it by one step."""
        if self._schedule_is_shared:
            settings = self._session.hyperparameters
            position = max(self.lr_scheduler.last_epoch, self._session.version * settings.local_steps - 1)
            self.lr_scheduler.last_epoch = min(position, self.args.max_steps - 1)

    def _skip_if_overflowed(self) -> None:
        """Leaves out the batches for which the trainer's GradScaler has just made no step."""
        assert self._gem_optimizer is not None
        if self.accelerator.optimizer_step_was_skipped and (left := self._session.batches_in_hand):
            self._gem_optimizer.skip(left)

    def _end_pass(self, stopping: bool) -> bool:
        """Commits the batches of an incomplete accumulation, clipped as the trainer clips. If the run is complete, loads its
        final θ and returns True. A trainer that is `stopping` does not wait for that."""
        assert self._gem_optimizer is not None
        accumulated = self._session.batches_in_hand
        if accumulated and self.args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if accumulated and self.accelerator.scaler is not None:  # `finish` leaves scaled gradients out
            self.accelerator.gradient_state._set_sync_gradients(True)
            self.optimizer.step()
            self._skip_if_overflowed()
        self._gem_optimizer.finish()
        self.state.global_step += self._session.batches_in_hand < accumulated  # by which the trainer divides the sum of losses
        self.model.zero_grad()
        # The trainer also stops if the first pass is empty, because other workers trained on everything.
        if (stopping and not self._passes.complete) or self._passes.more():
            return False
        self._gem_optimizer.load_final()
        return True


class _RunCallback(TrainerCallback):  # type: ignore[misc]
    """Ends the trainer when the run is complete, and not before."""

    def __init__(self, trainer: GemTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`max_steps` is an estimate: batches of a worker that was lost are trained on again."""
        if not self._trainer._stops_itself:
            state.max_steps = max(state.max_steps, state.global_step + 2)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._skip_if_overflowed()
        self._trainer._follow_run()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer._end_pass(control.should_training_stop):
            control.should_training_stop = True
            state.max_steps = state.global_step
            control.should_evaluate |= args.eval_strategy != "no"
            control.should_save |= args.save_strategy != "no"


class _ServersSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Shows the learning rates that the server has set, and changes nothing."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        for group in optimizer.param_groups:  # else the optimizer would take this for a schedule of the loop's
            del group["initial_lr"]

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]
