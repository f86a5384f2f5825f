"""--device: which device each worker gets, that batches and models get there, and what a wrong one is told."""

from __future__ import annotations

from collections import Counter, namedtuple
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_client import Retry, Session, connect
from gem_worker import device as device_module
from gem_worker.compute_gate import ComputeGate
from gem_worker.device import CPU, devices, moved
from gem_worker.evaluation import evaluator
from gem_worker.evaluation.evaluate import Evaluator
from gem_worker.launcher import cli as launcher
from gem_worker.launcher import launch
from gem_worker.launcher.cluster import Process
from gem_worker.launcher.members import Place, ThisMachine, make_cluster
from gem_worker.launcher.options import hyperparameters_of, run_options
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.process import cli as worker
from gem_worker.process import trainer, work
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.step_limits import StepLimits
from gem_worker.process.stopping import Stopping
from gem_worker.process.trainer import run_hyperparameters, train
from gem_worker.process.worker_thread import WorkerThread
from gem_worker.tasks.digits import Digits
from kit.accelerator import TO_DEVICE, TO_HOST, WAITS, Accelerator
from kit.server import Live, config, serving
from kit.settings import configured
from kit.task import SAMPLES, Line
from prometheus_client.registry import CollectorRegistry
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NOBODY = "127.0.0.1:1"
META = torch.device("meta")  # PyTorch's device without memory: tensors can be moved there, but hold nothing
Pair = namedtuple("Pair", "inputs targets")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many devices PyTorch's accelerator has, and its type."""
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(variable, raising=False)

    def see(count: int, kind: str = "cuda") -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if count else None)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", "12.6" if count else None)

    return see


# -- which device


@pytest.mark.parametrize(
    ("choice", "count", "workers", "expected"),
    [
        ("cpu", 2, range(3), ["cpu", "cpu", "cpu"]),
        ("auto", 3, range(4), ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        ("auto", 3, range(4, 6), ["cuda:1", "cuda:2"]),  # a second process goes on where the first one ended
        ("auto", 0, range(2), ["cpu", "cpu"]),
        ("cuda", 2, range(1), ["cuda:0"]),
        ("cuda:1", 2, range(1), ["cuda:1"]),
    ],
)
def test_which_device_each_worker_gets(gpus: Any, choice: str, count: int, workers: range, expected: list[str]) -> None:
    gpus(count)
    assert [str(device) for device in devices(choice, workers)] == expected
    (option,) = [option for option in worker.main.params if option.name == "device"]
    assert option.default == "cpu"


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_gpus_of_other_makers_are_accelerators_as_well(gpus: Any, kind: str) -> None:
    gpus(1, kind)
    assert [str(device) for choice in (kind, f"{kind}:0", "auto") for device in devices(choice)] == [f"{kind}:0"] * 3


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
@pytest.mark.parametrize(
    ("choice", "workers", "expected"),
    [("auto", range(3), ["cuda:2", "cuda:0", "cuda:1"]), ("cuda", range(1), ["cuda:2"]), ("cuda:1", range(1), ["cuda:1"])],
)
def test_processes_that_torchrun_or_slurm_has_numbered_begin_at_their_own_gpu(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, variable: str, choice: str, workers: range, expected: list[str]
) -> None:
    gpus(3)
    monkeypatch.setenv(variable, "5")  # of 8 on a machine whose scheduler shows each process three GPUs
    assert [str(device) for device in devices(choice, workers)] == expected


@pytest.mark.parametrize(
    ("choice", "count", "has"),
    [
        ("cuda:2", 2, "this machine has cpu, cuda:0 and cuda:1; give one of these"),
        ("gpu", 1, "this machine has cpu and cuda:0; give one of these"),
        ("cuda", 0, "is built without CUDA); give one of these"),
        ("mps", 0, "this machine has cpu (PyTorch"),
    ],
)
def test_a_wrong_device_is_told_which_ones_there_are(gpus: Any, choice: str, count: int, has: str) -> None:
    gpus(count)
    with pytest.raises(InvalidRequest) as told:
        devices(choice)
    assert str(told.value).startswith(f"--device {choice}: ")
    assert has in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("command", [worker.main, evaluator.main])
def test_a_wrong_device_ends_a_process_before_it_asks_the_server(command: Any) -> None:
    """Nobody listens at that address: a worker that asked first would wait for it, and end with status 1."""
    result = CliRunner().invoke(command, ["--server", NOBODY, "--device", "cuda:99", configured(give_up_after=600)])
    assert result.exit_code == 2
    assert "--device cuda:99: this machine has cpu" in result.output


def test_gem_train_refuses_a_wrong_device_before_it_makes_a_folder(tmp_path: Any) -> None:
    result = CliRunner().invoke(launcher.main, ["--runs", str(tmp_path / "runs"), "--device", "cuda:99"])
    assert result.exit_code == 2
    assert result.output.startswith("gem-train: --device cuda:99: this machine has cpu")
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


# -- the workers of a process, and those of gem-train


def workers_of(live: Any, *arguments: str) -> tuple[list[WorkerThread], list[Any]]:
    """The workers that these arguments of gem-worker make, none started, and what it logs."""
    logged: list[Any] = []

    class Log:
        def info(self, event: str, **values: Any) -> None:
            logged.append((event, values))

    options = worker.main.make_context("gem-worker", ["--server", live.address, *arguments]).params
    made = work._workers(
        work._names("worker", options), options, {}, WorkerMetrics(CollectorRegistry()), Stopping(), Log(),  # type: ignore[arg-type]
    )  # fmt: skip
    assert logged[0][0] == "training"
    return made, [logged[0][1]["device"], [thread.name for thread in made]]


def worker_devices(live: Any, *arguments: str) -> tuple[list[str], list[Any]]:
    """The devices of the workers that these arguments of gem-worker make, and what it logs."""
    made, logged = workers_of(live, *arguments)
    return [str(thread.train.args[1]) for thread in made], logged  # type: ignore[attr-defined]


def test_workers_take_several_simulated_times_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its number in the run, whatever process it is in."""
    monkeypatch.setenv("GEM_STEP_SECONDS", "0.1,0.1,0.4")
    with serving() as live:
        made, _ = workers_of(live, "--workers", "3", "--first-worker", "4")
    assert [thread.train.args[2].step_seconds for thread in made] == [0.1, 0.4, 0.1]  # type: ignore[attr-defined]


def test_the_workers_of_a_process_share_the_gpus_and_the_log_says_so(gpus: Any) -> None:
    gpus(2)
    with serving() as live:
        seen, (logged, made) = worker_devices(live, "--device", "auto", "--workers", "3", "--first-worker", "5")
        alone = worker_devices(live, "--device", "auto", "--first-worker", "3")
    assert (seen, logged) == (["cuda:1", "cuda:0", "cuda:1"], "cuda:1, cuda:0")
    assert made == ["worker-5", "worker-6", "worker-7"]
    assert alone == (["cuda:1"], ["cuda:1", ["worker"]])


@pytest.mark.parametrize("processes", [1, 3])
def test_gem_train_gives_each_process_the_number_of_its_first_worker(gpus: Any, tmp_path: Any, processes: int) -> None:
    gpus(2)
    arguments = ["--workers", "3", "--processes", str(processes), "--device", "auto"]
    options, _ = run_options(launcher.main.make_context("gem-train", arguments))
    places = [Place(NOBODY, NOBODY)]
    cluster = make_cluster(RunFolder(tmp_path), options, hyperparameters_of(options), places, ThisMachine(), resume=False)
    members = [member for member in cluster.workers if isinstance(member, Process)]
    given = [worker.main.make_context("gem-worker", list(member.command[3:])).params for member in members]
    assert [each["device"] for each in given] == ["auto"] * processes
    assert [number for each in given for number in work._numbers(each)] == [0, 1, 2]
    assert launch._on_devices(options) == " on cuda:0, cuda:1"
    assert launch._on_devices({"device": "cpu", "workers": 4}) == ""


# -- moving


def test_a_batch_of_any_shape_is_moved() -> None:
    one = torch.ones(2)
    batch = {"inputs": [one, (one, "name")], "pair": Pair(one, 3), "empty": None}
    there = moved(batch, META)
    assert there["inputs"][0].device == META
    assert there["inputs"][1][0].device == META
    assert isinstance(there["inputs"][1], tuple)
    assert there["inputs"][1][1] == "name"
    assert isinstance(there["pair"], Pair)
    assert (there["pair"].inputs.device, there["pair"].targets, there["empty"]) == (META, 3, None)
    assert one.device == CPU
    assert moved(batch, CPU) is batch
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])  # it has a method `to`
    assert moved(packed, META).data.device == META


class Watched(nn.Linear):
    """Notes where it was moved, and stays on the CPU."""

    moved_to: Any = None

    def to(self, device: Any) -> Watched:  # type: ignore[override]
        self.moved_to = device
        return self


class Looking(Line):
    """Notes the devices of the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Watched] = []
        self.seen: set[torch.device] = set()

    def model(self) -> nn.Module:
        self.made.append(Watched(1, 1))
        return self.made[-1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen |= {tensor.device for tensor in batch}
        weight: Tensor = next(model.parameters())
        return (weight**2).sum()


def test_a_worker_moves_its_model_and_its_batches() -> None:
    task = Looking()
    with serving(config(Hyperparameters(epochs=1, batch_size=16, shard_size=32))) as live, connect(live.address) as session:
        settings = run_hyperparameters(live.address, Retry())
        commits = train(task, session, settings, WorkerMetrics(CollectorRegistry()), device=META)
    assert commits == 4
    assert [model.moved_to for model in task.made] == [META]
    assert task.seen == {META}


class Counting(Line):
    """What is nearer than 1 counts as right. Notes the devices of models and batches. Its loss has this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.inputs = torch.linspace(-1, 1, 1100)[:, None]  # three batches
        self.seen: set[torch.device] = set()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen |= {tensor.device for tensor in (*batch, *model.parameters())}
        return super().loss(model, batch).to(self.dtype)

    def correct(self, model: nn.Module, batch: Any) -> Tensor:
        near: Tensor = (model(batch[0]) - batch[1]).abs() < 1
        return near.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the latter does not hold each whole number up to 500
def test_an_evaluator_moves_theta_at_once_and_waits_once_for_each_batch(accelerator: Accelerator, dtype: torch.dtype) -> None:
    task, layout = Counting(dtype), Layout.of([("weight", (1, 1)), ("bias", (1,))])
    theta = torch.tensor([2.5, -1.5]).numpy()
    evaluator = Evaluator(task, accelerator.device)
    accelerator.counts.clear()
    score = evaluator.score(1, layout, theta)
    assert score.loss == pytest.approx(float(((task.inputs - 1) ** 2 / 4).mean()), rel=1e-2)
    assert score.accuracy == 1099 / 1100
    assert task.seen == {accelerator.device}
    # Each batch has two tensors. Their copies wait, as the memory is not page-locked.
    assert accelerator.counts == {TO_DEVICE: 1 + 3 * 2, TO_HOST: 3, WAITS: 1 + 3 * (2 + 1)}


@pytest.mark.parametrize(("device", "pins"), [("cuda:1", True), ("xpu:0", True), ("mps:0", False), ("meta", False)])
def test_batches_are_page_locked_where_the_device_copies_from_there(
    device: str, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asks the loader, which is not iterated over; a worker on cuda:1 makes that its thread's device."""
    on = torch.device(device)
    asked: list[Any] = []

    class Sampler:
        complete = True

        def __init__(self, *arguments: Any) -> None: ...

        def loader(self, **settings: Any) -> list[Any]:
            asked.append(settings)
            return []

    monkeypatch.setattr(trainer, "ShardSampler", Sampler)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.xpu, "set_device", asked.append)
    with serving() as live, connect(live.address) as session:
        train(Looking(), session, Hyperparameters(), WorkerMetrics(CollectorRegistry()), device=on)
    assert asked == [*([on] if pins else []), {"pin_memory": pins}]


def test_the_thread_of_a_worker_on_the_cpu_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"set {device}"))
    device_module.use(CPU)
    device_module.use(META)


# -- waiting for the device


class Looked(ComputeGate):
    """Notes whether the device is busy when a worker gives its turn to the next."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(1)
        self.accelerator, self.busy = accelerator, Counter[bool]()

    def _release(self) -> None:
        self.busy[self.accelerator.busy] += 1
        super()._release()


@pytest.mark.parametrize("local_steps", [1, 4])
def test_a_worker_keeps_its_turn_until_the_device_has_computed_the_gradient(accelerator: Accelerator, local_steps: int) -> None:
    gate, settings = Looked(accelerator), Hyperparameters(rule="agn", local_steps=local_steps, epochs=1, batch_size=8)
    with serving(config(settings)) as live, connect(live.address) as session:
        train(
            Line(),
            session,
            settings,
            WorkerMetrics(CollectorRegistry()),
            limits=StepLimits(gate=gate),
            device=accelerator.device,
        )
    assert gate.busy == {False: SAMPLES / 8}


class Read(TensorDataset):
    """The line, with noise. Notes for each batch how many commits its worker had made when it read it, and its samples."""

    def __init__(self) -> None:
        super().__init__(*Line().training_data().tensors)
        self.session: Session
        self.commits: list[int] = []
        self.samples: Counter[int] = Counter()

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.commits.append(self.session.steps_done)
        self.samples.update(indices)
        return [(inputs + 0.1 * torch.randn(1), targets) for inputs, targets in map(self.__getitem__, indices)]


class Reading(Line):
    """Learns the line with dropout. Fails in the step `fails`, from 0, if that is given."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.read, self.steps, self._fails = Read(), 0, fails
        self.in_hand: set[int] = set()

    def training_data(self) -> Read:
        return self.read

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.steps == self._fails:
            raise ZeroDivisionError
        self.steps += 1
        self.in_hand.add(self.read.session.batches_in_hand)
        return super().loss(model, batch)


def trained(live: Live, task: Reading, device: torch.device, name: str = "worker", **more: Any) -> Tensor:
    """θ after a worker of that name has trained until the run is complete, or its task has failed."""
    with suppress(ZeroDivisionError), connect(live.address, name=name) as task.read.session:
        train(task, task.read.session, live.core.settings, WorkerMetrics(CollectorRegistry()), device=device, **more)
    return torch.from_numpy(live.on_loop(lambda: live.core.central.theta.copy()))


@pytest.mark.parametrize(("local_steps", "overlap"), [(1, False), (3, False), (1, True)])
def test_a_worker_alone_on_its_device_reads_while_that_computes_and_learns_the_same(
    accelerator: Accelerator, local_steps: int, overlap: bool
) -> None:
    """To the bit, though the data and the model draw random numbers from one generator."""
    rule = "downpour" if local_steps == 1 else "agn"
    settings = Hyperparameters(rule=rule, epochs=2, batch_size=8, shard_size=16, local_steps=local_steps)
    thetas, steps = [], 2 * SAMPLES // 8
    for device in (CPU, accelerator.device):
        task = Reading()
        with serving(config(settings)) as live:
            thetas.append(trained(live, task, device, overlap=overlap))
            assert live.on_loop(lambda: live.core.samples_committed) == 2 * SAMPLES
        assert set(task.read.samples.values()) == {2}
        assert task.in_hand == {1}  # what is only read does not count
        if local_steps == 1 and not overlap:
            assert task.read.commits == (list(range(steps)) if device == CPU else [0, *range(steps - 1)])
    assert torch.equal(*thetas)


def test_a_batch_that_a_lost_worker_had_read_ahead_goes_to_another(accelerator: Accelerator) -> None:
    lost, other = Reading(fails=3), Reading()
    with serving(config(Hyperparameters(rule="downpour", epochs=1, batch_size=8, shard_size=32))) as live:
        trained(live, lost, accelerator.device, "lost")
        assert (lost.steps, len(lost.read.commits)) == (3, 4)
        trained(live, other, accelerator.device, "other")
        assert live.on_loop(lambda: live.core.complete)
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == SAMPLES


def test_a_worker_alone_on_its_device_waits_for_commits_alone(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fourth step commits: it waits for the gradient, and for the θ that comes back. At first the Optimizer compares all
    values, for three windows."""
    monkeypatch.setattr(device_module, "pins", lambda device: True)  # so that batches are only queued
    waits: list[int] = []

    class Counting(Line):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            waits.append(accelerator.counts[WAITS])
            return super().loss(model, batch)

    settings, registry = Hyperparameters(rule="agn", local_steps=4, epochs=3, batch_size=8), CollectorRegistry()
    with serving(config(settings)) as live, connect(live.address) as session:
        train(Counting(), session, settings, WorkerMetrics(registry), device=accelerator.device)
    each = [after - before for before, after in pairwise(waits)]
    assert each[12:] == [0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0]
    assert registry.get_sample_value("gem_worker_loss") is not None


def test_a_worker_alone_on_a_gpu_needs_no_turn(gpus: Any) -> None:
    options = worker.main.make_context("gem-worker", []).params
    assert work._gate(torch.device("cuda:0"), 1, options) is None
    assert work._gate(torch.device("cuda:0"), 2, options) is not None
    assert work._gate(CPU, 1, options) is not None


@needs_gpu
def test_the_digits_are_learned_on_a_gpu() -> None:
    task, (gpu,) = Digits(None), devices("cuda")
    with serving(config(Hyperparameters(epochs=5, learning_rate=0.01))) as live, connect(live.address) as session:
        train(task, session, run_hyperparameters(live.address, Retry()), WorkerMetrics(CollectorRegistry()), device=gpu)
        theta = session.read()
        on_gpu = Evaluator(task, gpu).score(1, session.layout, theta)
        on_cpu = Evaluator(task).score(1, session.layout, theta)
    assert on_gpu.accuracy is not None
    assert on_gpu.accuracy > 0.5
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-3)
