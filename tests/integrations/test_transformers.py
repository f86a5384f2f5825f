"""Hugging Face's own Trainer as a worker, against a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import accelerate
import gem_client
import numpy as np
import pytest
import torch
import transformers
from client.share_helpers import asking_for_half
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, Session
from gem_client.torch import Optimizer, ShardSampler
from gem_client.transformers import GemTrainerMixin
from integrations.trainer_helpers import (
    BATCH,
    CUT,
    PLAIN,
    RUN,
    SAMPLES,
    Sums,
    assert_follows,
    assert_trained_once_an_epoch,
    broken,
    completed,
    flat,
    interrupted,
    network,
    reported_loss,
    theta,
)
from kit.model import version, workers
from kit.process import python
from kit.server import Live, config, serving, wait_until
from safetensors.torch import load_file
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Worker(GemTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """The Trainer, as a worker of a run."""


class Model(nn.Module):
    """A small network with a norm. `before` is called before each training step, with the number of the step."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.network = network()
        self.network.insert(1, nn.LayerNorm(8))
        self.losses: list[float] = []
        self._before = before

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self._before(len(self.losses))
        outputs = self.network(inputs)
        loss = nn.functional.mse_loss(outputs.float(), labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "outputs": outputs}


@contextmanager
def worker(
    live: Live,
    folder: Path,
    model: nn.Module,
    data: Sums | None = None,
    on: Any = "worker",
    extra: Any = None,
    **arguments: Any,
) -> Iterator[tuple[Session, Worker]]:
    quiet = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    settings = {**quiet, "learning_rate": 0.01, **arguments}
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=BATCH, **settings)
    parts = {"model": model, "args": args, "train_dataset": data or Sums(True), "eval_dataset": Sums(True), **(extra or {})}
    with gem_client.connect(live.address) as session:
        yield session, Worker(session=session, on=on, **parts)


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls `look` after each step."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self._look = look

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(state)


@pytest.mark.parametrize("on", ["worker", "server"])
def test_the_run_ends_by_itself_when_every_sample_of_every_epoch_was_trained_on(tmp_path: Path, on: str) -> None:
    data, model, reported = Sums(True), Model(), []
    before = data.loss(model.network)
    with serving(config(RUN)) as live, worker(live, tmp_path, model, data, on) as (_, trainer):
        trainer.add_callback(Watch(lambda state: reported.append(reported_loss(live))))
        steps = trainer.train().global_step
        assert steps == version(live) == 2 * SAMPLES / BATCH
        assert_trained_once_an_epoch(live, data)
        assert reported == pytest.approx(model.losses)
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert logged == pytest.approx(model.losses, rel=1e-3, abs=1e-4)
        # By names, for groups reorder the parameters: decayed ones come first.
        trained = torch.cat([p.detach().flatten() for group in trainer.optimizer.param_groups for p in group["params"]])
        assert torch.equal(trained, theta(live))
        assert workers(live) == []
        assert data.loss(model.network) < before


def test_batches_follow_the_share_that_the_server_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking, data, model = asking_for_half(monkeypatch), Sums(True), Model()
    with (
        serving(config(CUT)) as live,
        worker(live, tmp_path, model, data, "server", gradient_accumulation_steps=2) as (_, trainer),
    ):
        trainer.train()
        assert_trained_once_an_epoch(live, data)
    assert_follows(asking)


def test_one_worker_does_what_the_trainer_does_without_a_server(tmp_path: Path) -> None:
    """Its AdamW with decay on weights alone, its warm-up and linear schedule, its clipping."""
    arguments: dict[str, Any] = {"weight_decay": 0.3, "warmup_steps": 4, "max_grad_norm": 0.5, "optim": "adamw_torch"}
    model, data = Model(), Sums(True)
    rule = PLAIN  # a worker's steps, added to θ as they are
    with serving(config(rule)) as live, worker(live, tmp_path, model, data, **arguments) as (_, trainer):
        trainer.train()
        groups = trainer.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        assert all(parameter.ndim > 1 for parameter in groups[0]["params"])
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    twin = Model()
    plain = transformers.Trainer(
        model=twin,
        args=transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=BATCH, use_cpu=True, save_strategy="no", report_to="none",
            disable_tqdm=True, logging_steps=1, learning_rate=0.01, max_steps=2 * SAMPLES // BATCH, **arguments,
        ),
        train_dataset=[data[index] for index in data.order[:]],
    )  # fmt: skip
    plain._get_train_sampler = lambda *_: None
    plain.train()
    assert rates == pytest.approx([entry["learning_rate"] for entry in plain.state.log_history if "loss" in entry])
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-4, atol=1e-5)


def test_the_schedule_advances_with_the_commits_of_all_workers(tmp_path: Path) -> None:
    """Another worker makes a commit after each step of this one: the rate is at its end with half the steps."""
    model = Model()
    with serving(config(RUN)) as live, worker(live, tmp_path, model) as (session, trainer):
        with gem_client.connect(live.address) as other:

            def commit(state: Any) -> None:
                if state.global_step == 1:
                    tensors = [(tensor.name, np.zeros(tensor.shape)) for tensor in session.layout.tensors]
                    other.join(tensors, groups={}, optimizer="worker")
                other.commit(np.zeros(session.layout.size), kind="delta")

            trainer.add_callback(Watch(commit))
            trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[0] == pytest.approx(0.01)
    assert rates[1] == pytest.approx(0.01 * (1 - 1 / 24))
    assert rates[8] == pytest.approx(0.01 * (1 - 15 / 24))
    assert rates[13:] == [0.0] * 11


def test_accumulated_batches_are_one_commit_that_reports_their_mean_loss(tmp_path: Path) -> None:
    """Two epochs of 12 batches in steps of 5: the last of each has 2, and is clipped too."""
    data, model, reported = Sums(True), Model(), []
    with serving(config(RUN)) as live, worker(live, tmp_path, model, data, gradient_accumulation_steps=5) as (_, trainer):
        trainer.add_callback(Watch(lambda state: reported.append(reported_loss(live))))
        trained = trainer.train()
        assert_trained_once_an_epoch(live, data)
        assert version(live) == 6
        assert reported[0] == pytest.approx(sum(model.losses[:5]) / 5)
        assert trained.global_step == 6
        steps = [model.losses[begin:end] for begin, end in pairwise((0, 5, 10, 12, 17, 22, 24))]
        assert trained.training_loss == pytest.approx(sum(sum(losses) / len(losses) for losses in steps) / 6, rel=1e-3)


def test_gradients_are_clipped_before_they_are_committed(tmp_path: Path) -> None:
    model = Model()
    before = flat(model)
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 5, "max_grad_norm": 1e-3, "optim": "sgd", "learning_rate": 0.1}
    with serving(config(PLAIN)) as live, worker(live, tmp_path, model, on="server", **arguments) as (_, trainer):
        trainer.train()
        assert version(live) == 6
        assert 0 < (flat(model) - before).norm() <= 6 * 0.1 * 1e-3 * 1.01


def test_bf16_trains(tmp_path: Path) -> None:
    data, model = Sums(True), Model()
    with serving(config(RUN)) as live, worker(live, tmp_path, model, data, bf16=True) as (_, trainer):
        trainer.train()
        assert completed(live) == 2 * SAMPLES
        assert torch.isfinite(flat(model)).all()


class Half(accelerate.Accelerator):  # type: ignore[misc]
    """What Accelerate makes for fp16 on a GPU, on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=1024.0)


def in_half_precision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.trainer.Accelerator", Half)
    patch.setattr("accelerate.state.AcceleratorState.mixed_precision", "fp16")


class Overflowing(Model):
    """Has the loss of some training steps overflow; notes in which precision it computed."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self._steps, self.dtypes = steps, set[torch.dtype]()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        step, out = len(self.losses), super().forward(inputs, labels)
        self.dtypes.add(self.network[0](inputs).dtype)
        return {**out, "loss": out["loss"] * (float("inf") if self.training and step in self._steps else 1.0)}


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize(
    ("batches", "overflowing", "commits", "skipped"),
    # Two epochs of 12 batches. In steps of 5 the last of each has 2; one in steps of 24 is never complete.
    [(1, (2, 7), 22, 2), (5, (2,), 5, 5), (5, (11,), 5, 2), (24, (), 2, 0)],
    ids=["single batches", "accumulated", "at the end of an epoch", "no whole step"],
)
def test_steps_that_a_grad_scaler_leaves_out_are_skipped_and_the_run_completes(
    batches: int,
    overflowing: tuple[int, ...],
    commits: int,
    skipped: int,
    clip: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_half_precision(monkeypatch)
    data, model = Sums(True), Overflowing(overflowing)
    settings: dict[str, Any] = {"gradient_accumulation_steps": batches, "max_grad_norm": clip}
    with serving(config(RUN)) as live, worker(live, tmp_path, model, data, **settings) as (session, trainer):
        trainer.train()
        assert_trained_once_an_epoch(live, data)
        assert (version(live), session.skipped) == (commits, skipped)
    assert model.dtypes == {torch.float16}
    assert torch.isfinite(flat(model)).all()


def test_fp16_does_about_what_fp32_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of an epoch, where an accumulation is cut short: no gradient keeps the scaler's factor."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 5, "optim": "sgd", "learning_rate": 0.1}
    trained = []
    for half in (False, True):
        with monkeypatch.context() as patch, serving(config(RUN)) as live:
            if half:
                in_half_precision(patch)
            model = Model()
            with worker(live, tmp_path, model, **settings) as (_, trainer):
                trainer.train()
            trained.append(flat(model))
    torch.testing.assert_close(trained[1], trained[0], rtol=0.02, atol=2e-3)


def test_the_last_evaluation_and_what_is_saved_are_of_the_final_theta(tmp_path: Path) -> None:
    data, model = Sums(True), Model()
    saving = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 100}
    with serving(config(RUN)) as live, worker(live, tmp_path, model, data, **saving) as (_, trainer):
        trainer.train()
        evaluated = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
        assert [step for step, _ in evaluated] == [10, 20, 24]
        assert evaluated[-1][1] == pytest.approx(data.loss(model.network), rel=1e-5)
        trainer.save_model(str(tmp_path / "model"))
        for path in (tmp_path / "model", tmp_path / "checkpoint-24"):
            state = load_file(str(path / "model.safetensors"))
            assert torch.equal(torch.cat([state[name].flatten() for name, _ in model.named_parameters()]), flat(model))


def test_a_worker_with_max_steps_leaves_early_and_another_one_completes_the_run(tmp_path: Path) -> None:
    with serving(config(RUN)) as live:
        with worker(live, tmp_path, Model(), max_steps=5) as (_, trainer):
            trainer.train()
            assert workers(live) == []
            assert version(live) == 5
            assert trainer.state.log_history[-2]["learning_rate"] == pytest.approx(0.01 / 5)
        with worker(live, tmp_path, Model()) as (_, trainer):
            trainer.train()
        assert completed(live) == 2 * SAMPLES


class TrainElsewhere(transformers.TrainerCallback):  # type: ignore[misc]
    """Another worker trains on the whole run, after this one has joined and before its first batch."""

    def __init__(self, other: Session) -> None:
        self._other = other

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        names = [by_id[id(parameter)] for group in kwargs["optimizer"].param_groups for parameter in group["params"]]
        twin = dict(Model().named_parameters())
        optimizer = Optimizer(torch.optim.SGD([(name, twin[name]) for name in names], lr=0.1), self._other)
        sampler = ShardSampler(self._other, Sums())
        while not sampler.complete:
            for inputs, _ in sampler.loader():
                for parameter in twin.values():
                    parameter.grad = torch.full_like(parameter, inputs.mean().item())
                optimizer.step()
        self._other.close()


def test_a_worker_that_got_no_batch_holds_the_final_theta_too(tmp_path: Path) -> None:
    model = Model()
    with (
        serving(config(PLAIN)) as live,
        gem_client.connect(live.address) as other,
        worker(live, tmp_path, model) as (_, trainer),
    ):
        before = flat(model)
        trainer.add_callback(TrainElsewhere(other))
        assert trainer.train().global_step == 0
        assert completed(live) == 2 * SAMPLES
        assert not torch.equal(flat(model), before)
        trained = torch.cat([p.detach().flatten() for group in trainer.optimizer.param_groups for p in group["params"]])
        assert torch.equal(trained, theta(live))


@pytest.mark.parametrize(("before", "error"), [(broken, ZeroDivisionError), (interrupted, KeyboardInterrupt)])
def test_a_worker_that_fails_leaves_the_run(tmp_path: Path, before: Callable[[int], None], error: type[BaseException]) -> None:
    with serving(config(RUN)) as live, worker(live, tmp_path, Model(before)) as (_, trainer):
        with pytest.raises(error):
            trainer.train()
        wait_until(lambda: not workers(live), "the worker to leave")
        assert 0 < version(live) < 2 * SAMPLES / BATCH


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"resume": True}, "resume_from_checkpoint is not available")],
)
def test_what_cannot_work_is_refused(live: Live, tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    resume = arguments.pop("resume", None)
    with pytest.raises(InvalidRequest, match=words), worker(live, tmp_path, Model(), **arguments) as (_, trainer):
        trainer.train(resume_from_checkpoint=resume)


def test_several_ranks_are_refused(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.distributed_type", "MULTI_GPU")
    with pytest.raises(InvalidRequest, match="without torchrun"), worker(live, tmp_path, Model()):
        pass


def test_a_trainer_that_would_take_all_gpus_is_told_how_to_take_one(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 4)
    with pytest.raises(InvalidRequest, match=r"over 4 GPUs .*CUDA_VISIBLE_DEVICES=0"), worker(live, tmp_path, Model()):
        pass


def test_a_schedule_of_the_users_is_refused_if_the_server_makes_the_steps(live: Live, tmp_path: Path) -> None:
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    extra = {"optimizers": (inner, torch.optim.lr_scheduler.ConstantLR(inner, 1.0))}
    refused = pytest.raises(InvalidRequest, match="the schedule is the server's")
    with worker(live, tmp_path, model, on="server", extra=extra) as (_, trainer), refused:
        trainer.train()


def test_a_run_without_an_end_needs_max_steps(tmp_path: Path) -> None:
    endless, refused = (
        config(Hyperparameters(epochs=0, batch_size=BATCH), until_stopped=True),
        pytest.raises(InvalidRequest, match="set max_steps"),
    )
    with serving(endless) as live, worker(live, tmp_path, Model()) as (_, trainer), refused:
        trainer.train()


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    with serving(config(RUN)) as live, worker(live, tmp_path, Model()) as (_, trainer):
        trainer.train()
        with pytest.raises(InvalidRequest, match="trains once"):
            trainer.train()


def test_without_transformers_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import gem_client.transformers"
    done = python("-c", code)
    assert 'gem_client.transformers needs transformers: pip install ".[transformers]"' in done.stderr.splitlines()[-1]
