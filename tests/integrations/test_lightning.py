"""Lightning's own Trainer as a worker, against a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gem_client
import pytest
import pytorch_lightning as pl
import torch
from client.share_helpers import asking_for_half
from gem_client import InvalidRequest, Session
from gem_client.lightning import GemCallback, _callback
from gem_client.torch import Optimizer, ShardSampler
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
from kit.accelerator import TO_DEVICE, TO_HOST, WAITS, Accelerator
from kit.model import version, workers
from kit.server import Live, config, serving, wait_until
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
Configure = Callable[["Module"], Any]


class Module(pl.LightningModule):  # type: ignore[misc]
    """A small network. `before` is called before each training step, with the number of the step."""

    def __init__(self, configure: Configure, before: Callable[[int], Any] = lambda step: None) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[float] = []
        self._configure, self._before = configure, before

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        factor = self._before(len(self.losses))
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss * (factor or 1.0)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validation_loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self._configure(self)


class Watch(pl.Callback):  # type: ignore[misc]
    """Calls `look` after each batch, before the worker may leave."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look

    def on_train_batch_end(self, *args: Any) -> None:
        self._look()


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def with_schedule(module: nn.Module) -> Any:
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def halved_each_epoch(module: nn.Module) -> Any:
    """As most modules return it: Lightning then steps the schedule once an epoch."""
    optimizer = adamw(module)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


@contextmanager
def worker(live: Live, **settings: Any) -> Iterator[tuple[Session, GemCallback]]:
    with gem_client.connect(live.address) as session:
        yield session, GemCallback(session, **settings)


def trainer(gem: GemCallback, *callbacks: Any, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(callbacks=[*callbacks, gem], accelerator="cpu", **{**quiet, **settings})


@pytest.mark.parametrize("brought", ["parameters", "worker", "server"])
def test_the_run_ends_by_itself_when_every_sample_of_every_epoch_was_trained_on(brought: str) -> None:
    data = Sums()
    reported: list[float] = []
    with serving(config(RUN)) as live, worker(live, on="server" if brought == "server" else "worker") as (session, gem):
        kinds: dict[str, Configure] = {
            "parameters": lambda module: Optimizer(module.named_parameters(), session),
            "worker": with_schedule,
            "server": adamw,
        }
        module = Module(kinds[brought])
        before = data.loss(module.network)
        watch = Watch(lambda: reported.append(reported_loss(live)))
        # The server's epochs count, not these.
        fitted = trainer(gem, watch, max_epochs=1)
        fitted.fit(module, gem.loader(data))
        assert_trained_once_an_epoch(live, data)
        assert version(live) == 2 * SAMPLES / BATCH
        assert reported == pytest.approx(module.losses)
        assert torch.equal(flat(module), theta(live))
        assert workers(live) == []
        assert data.loss(module.network) < before
        if brought == "worker":
            assert fitted.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001), "the schedule was not followed"


def test_batches_follow_the_share_that_the_server_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, data = asking_for_half(monkeypatch), Sums()
    with serving(config(CUT)) as live, worker(live) as (session, gem):
        module = Module(lambda module: Optimizer(module.named_parameters(), session, batches_per_step=2))
        trainer(gem, accumulate_grad_batches=2).fit(module, gem.loader(data))
        assert_trained_once_an_epoch(live, data)
    assert_follows(asking)


def test_accumulated_batches_are_one_commit_that_reports_their_mean_loss() -> None:
    data, reported = Sums(), []
    with serving(config(RUN)) as live, worker(live) as (_, gem):
        module = Module(adamw)
        watch = Watch(lambda: reported.extend([reported_loss(live)] if version(live) else []))
        trainer(gem, watch, accumulate_grad_batches=3).fit(module, gem.loader(data))
        assert_trained_once_an_epoch(live, data)
        assert version(live) == 8
        assert reported[0] == pytest.approx(sum(module.losses[:3]) / 3)


def test_accumulation_that_the_optimizer_does_not_know_of_is_refused() -> None:
    with serving(config(RUN)) as live, worker(live) as (session, gem):
        module = Module(lambda module: Optimizer(module.named_parameters(), session, batches_per_step=2))
        with pytest.raises(InvalidRequest, match=r"accumulate_grad_batches is 3, .* batches_per_step=2"):
            trainer(gem, accumulate_grad_batches=3).fit(module, gem.loader(Sums()))
        assert workers(live) == []


def test_gradients_are_clipped_before_they_are_committed() -> None:
    with serving(config(PLAIN)) as live, worker(live) as (session, gem):
        module = Module(lambda module: Optimizer(module.named_parameters(), session))
        before = flat(module)
        trainer(gem, gradient_clip_val=1e-3).fit(module, gem.loader(Sums()))
        assert 0 < (flat(module) - before).norm() <= version(live) * PLAIN.learning_rate * 1e-3 * 1.01


def test_steps_that_a_grad_scaler_leaves_out_are_skipped_and_the_run_completes() -> None:
    data = Sums()
    with serving(config(RUN)) as live, worker(live) as (session, gem):
        module = Module(adamw, lambda step: float("inf") if step in (2, 7) else None)
        scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        trainer(gem, plugins=[scaled]).fit(module, gem.loader(data))
        assert session.skipped == 2
        assert completed(live) == 2 * SAMPLES
        assert version(live) == 2 * SAMPLES / BATCH - 2
        assert set(data.read.values()) == {2}


def test_the_scale_of_a_grad_scaler_is_not_waited_for(accelerator: Accelerator) -> None:
    """On a GPU that would be before each backward pass, for the whole forward pass."""
    noted: list[Tensor] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale(torch.tensor(2.5).to(accelerator.device))
    scaled = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), accumulate_grad_batches=2)
    callback: Any = SimpleNamespace(_optimizer=SimpleNamespace(note=noted.append))
    accelerator.counts.clear()
    GemCallback.on_before_backward(callback, scaled, None, loss)
    assert accelerator.counts[WAITS] == 0
    assert [value.item() for value in noted] == [5.0]


def test_a_step_copies_once_each_way_and_waits_once(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the gradient and the loss, from the end of the backward pass on; and the θ that comes back."""
    counted: list[dict[str, int]] = []
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *_: None)  # it refuses the device

    class Counting(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            accelerator.counts.clear()

    with serving(config(RUN)) as live, worker(live) as (_, gem):
        watch = Watch(lambda: counted.append(dict(accelerator.counts)))
        device = SingleDeviceStrategy(accelerator.device)
        trainer(gem, watch, strategy=device).fit(Counting(adamw), gem.loader(Sums()))
    assert counted[-1] == {TO_HOST: 1 + 1, TO_DEVICE: 1, WAITS: 1}
    assert len(counted) == 2 * SAMPLES / BATCH


def test_the_last_validation_and_the_last_checkpoint_are_of_the_final_theta(tmp_path: Path) -> None:
    data = Sums()
    with serving(config(RUN)) as live, worker(live) as (_, gem):
        module, saved = Module(adamw), ModelCheckpoint(tmp_path, monitor="validation_loss")
        fitted = trainer(gem, saved, enable_checkpointing=True)
        fitted.fit(module, gem.loader(data), DataLoader(Sums(), batch_size=SAMPLES))
        state = torch.load(saved.best_model_path, weights_only=True)["state_dict"]
        assert torch.equal(torch.cat([tensor.flatten() for tensor in state.values()]), theta(live))
        assert fitted.callback_metrics["validation_loss"].item() == pytest.approx(data.loss(module.network), rel=1e-5)


def test_each_validation_is_reported_to_the_server() -> None:
    data = Sums()
    with serving(config(RUN)) as live, worker(live, loss="validation_loss") as (_, gem):
        module = Module(adamw)
        trainer(gem).fit(module, gem.loader(data), DataLoader(Sums(), batch_size=SAMPLES))
        evaluation = live.on_loop(lambda: live.server.wiring.progress.evaluation)
        assert evaluation is not None
        assert evaluation.version == version(live)
        assert evaluation.loss == pytest.approx(data.loss(module.network), rel=1e-5)


def test_a_metric_that_the_module_does_not_log_is_named() -> None:
    with (
        serving(config(RUN)) as live, worker(live, loss="val") as (_, gem),
        pytest.raises(InvalidRequest, match="logs no 'val' in its validation: it logs validation_loss"),
    ):  # fmt: skip
        trainer(gem).fit(Module(adamw), gem.loader(Sums()), DataLoader(Sums(), batch_size=SAMPLES))


def test_a_worker_that_stops_early_gives_its_shards_back() -> None:
    with serving(config(RUN)) as live, worker(live) as (_, gem):
        trainer(gem, max_steps=5).fit(Module(adamw), gem.loader(Sums()))
        assert workers(live) == []
        assert version(live) == 5
        data = Sums()
        with worker(live) as (_, other):
            trainer(other).fit(Module(adamw), other.loader(data))
        assert completed(live) == 2 * SAMPLES


@pytest.mark.parametrize("least", [{"min_steps": 100}, {"min_epochs": 3}])
def test_the_trainer_ends_with_the_run_also_before_its_own_minimum(least: dict[str, int]) -> None:
    with serving(config(RUN)) as live, worker(live) as (_, gem):
        fitted = trainer(gem, EndlessEpochs(), **least)
        fitted.fit(Module(adamw), gem.loader(Sums()))
        assert fitted.global_step == 2 * SAMPLES / BATCH
        assert fitted.current_epoch == 2


class Epochs(pl.Callback):  # type: ignore[misc]
    """Notes the epoch of each batch, and the rate."""

    def __init__(self) -> None:
        self.rates: list[tuple[int, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append((trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]))


def test_a_worker_that_comes_late_begins_in_the_runs_epoch_with_the_schedule_there() -> None:
    early, late = Epochs(), Epochs()
    with serving(config(replace(RUN, epochs=4))) as live:
        for epochs, steps in ((early, 2 * SAMPLES // BATCH), (late, -1)):
            with worker(live) as (_, gem):
                trainer(gem, epochs, max_steps=steps).fit(Module(halved_each_epoch), gem.loader(Sums()))
    assert set(early.rates) == {(0, 0.01), (1, 0.005)}
    assert set(late.rates) == {(2, 0.0025), (3, 0.00125)}


def test_what_another_worker_leaves_of_the_first_epoch_comes_in_another_pass_at_the_same_rate() -> None:
    """Lightning itself makes new iterators in later epochs alone, and would step the schedule in each pass."""
    data, epochs = Sums(), Epochs()
    with serving(config(replace(RUN, epochs=1))) as live, worker(live) as (_, gem), gem_client.connect(live.address) as other:
        same = Module(halved_each_epoch)
        Optimizer(adamw(same), other, names=same.named_parameters(), on="worker")
        next(iter(ShardSampler(other, data)))

        class Leaves(pl.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
                if trainer.is_last_batch:
                    other.close()

        trainer(gem, EndlessEpochs(), epochs, Leaves()).fit(Module(halved_each_epoch), gem.loader(data))
        assert completed(live) == SAMPLES
        assert epochs.rates == [(0, 0.01)] * (SAMPLES // BATCH)


class EndlessEpochs(pl.Callback):  # type: ignore[misc]
    """Fails instead of going on for ever."""

    def __init__(self) -> None:
        self._passes = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._passes += 1
        assert self._passes < 5, "the trainer goes on without end"


@pytest.mark.parametrize(("before", "error"), [(broken, ZeroDivisionError), (interrupted, SystemExit)])
def test_a_worker_that_fails_leaves_the_run(before: Callable[[int], None], error: type[BaseException]) -> None:
    with serving(config(RUN)) as live:
        session = gem_client.connect(live.address)  # without `with`: the callback itself leaves
        gem = GemCallback(session)
        with pytest.raises(error):
            trainer(gem).fit(Module(adamw, before), gem.loader(Sums()))
        wait_until(lambda: not workers(live), "the worker to leave")
        assert 0 < version(live) < 2 * SAMPLES / BATCH


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 2}, "one of 2 ranks"),
        ({"ckpt_path": "last.ckpt"}, "ckpt_path is not available"),
        ({"limit_train_batches": 10}, "limit_train_batches"),
        ({"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging is not available"),
        ({"callbacks": [pl.callbacks.EMAWeightAveraging()]}, "WeightAveraging is not available"),
    ],
)
def test_what_cannot_work_is_refused_before_the_worker_joins(live: Live, settings: dict[str, Any], words: str) -> None:
    fine: dict[str, Any] = {"world_size": 1, "ckpt_path": None, "callbacks": []}
    fine |= {"limit_train_batches": 1.0, "overfit_batches": 0.0}
    with worker(live) as (_, gem):
        gem.loader(Sums())
        gem.setup(SimpleNamespace(**fine), None, "fit")
        with pytest.raises(InvalidRequest, match=words):
            gem.setup(SimpleNamespace(**{**fine, **settings}), None, "fit")


def on_plateau(module: nn.Module) -> Any:
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation_loss"}}


def two(module: Any) -> Any:
    module.automatic_optimization = False
    return [adamw(module), adamw(module)]


@pytest.mark.parametrize(
    ("configure", "settings", "words"),
    [
        (with_schedule, {"on": "server"}, "the schedule is the server's"),
        (on_plateau, {}, "ReduceLROnPlateau is not available"),
        (two, {}, "one optimizer, and automatic optimization"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(
    live: Live, configure: Configure, settings: dict[str, Any], words: str
) -> None:
    with worker(live, **settings) as (_, gem), pytest.raises(InvalidRequest, match=words):
        trainer(gem).fit(Module(configure), gem.loader(Sums()))


class LateData(pl.LightningDataModule):  # type: ignore[misc]
    """A datamodule that makes its data set in `setup`, as most do."""

    def setup(self, stage: str) -> None:
        self.training_set = Sums()

    def train_dataloader(self) -> Any:
        return DataLoader(self.training_set, batch_size=BATCH)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_datamodule_returns_the_callbacks_loader_once_it_has_its_data(replaced: bool) -> None:
    data, module = LateData(), Module(adamw)
    with serving(config(RUN)) as live, worker(live) as (_, gem):
        if replaced:
            data.train_dataloader = lambda: gem.loader(data.training_set)  # type: ignore[method-assign]
            trainer(gem).fit(module, datamodule=data)
            assert_trained_once_an_epoch(live, data.training_set)
        else:
            with pytest.raises(InvalidRequest, match=r"train_dataloader\(\) of the datamodule return gem\.loader"):
                trainer(gem).fit(module, datamodule=data)


@pytest.mark.parametrize("made", [False, True])
def test_another_loader_is_refused_for_all_workers_would_train_on_the_same_samples(live: Live, made: bool) -> None:
    """Also beside the callback's own."""
    with worker(live) as (_, gem):
        if made:
            gem.loader(Sums())
        with pytest.raises(InvalidRequest, match="the callback's own loader"):
            trainer(gem, EndlessEpochs()).fit(Module(adamw), DataLoader(Sums(), batch_size=BATCH))


def test_the_callback_is_of_the_package_that_the_user_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _callback.__wrapped__
    assert issubclass(make(GemCallback), pl.Callback)
    other = ModuleType("lightning.pytorch")
    other.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", other)
    assert issubclass(make(GemCallback), other.Callback)
    assert not issubclass(make(GemCallback), pl.Callback)


def test_without_lightning_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_client.lightning.PACKAGES", ("no_such_lightning.pytorch",))
    with pytest.raises(ModuleNotFoundError, match=r"needs Lightning: pip install \"\.\[lightning\]\""):
        _callback.__wrapped__(GemCallback)
