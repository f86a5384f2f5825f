"""gem-ctl doctor SCRIPT: what a dry run finds in training loops that have a fault, and in one that has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client.torch.dry_run import FAILS, LOOK, OK, run
from gem_client.transport.private_servers import FOLDER_VARIABLE, addresses, private_server, serve
from gem_ctl.dry_run import _of_servers
from kit.model import version
from kit.pages import ROOT
from kit.process import python
from kit.server import Live, config, serving

STEPS = 3
GOOD = """\
import sys, gem_client, torch
from gem_client.torch import Optimizer, ShardSampler, update_statistics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.linspace(-3, 3, 256).unsqueeze(1)
data = TensorDataset(inputs, torch.sin(inputs))
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
with gem_client.connect("127.0.0.1:1") as session:
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.05), session, names=model.named_parameters())
    sampler = ShardSampler(session, data)
    while not sampler.complete:
        for inputs, targets in sampler.loader():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step(loss=loss)
    optimizer.load_final()
"""
OWN_BATCHES = [("    sampler = ShardSampler(session, data)\n", ""), ("while not sampler.complete", "for epoch in range(9)"),
               ("sampler.loader()", "DataLoader(data, 64, shuffle=True)")]  # fmt: skip
SEEDED = ("inputs = torch", "torch.manual_seed(5)\ninputs = torch")
END, STEP, REPORT = "optimizer.load_final()", "optimizer.step(loss=loss)", "session.report_evaluation(1.0)"
BATCH_NORM = ("nn.Tanh()", "nn.BatchNorm1d(8)")
UNUSED = ("with gem", 'model.register_parameter("unused", nn.Parameter(torch.ones(2)))\nwith gem')


def of(*changes: tuple[str, str]) -> str:
    """The good loop with some of its text replaced."""
    script = GOOD
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return script


# What is wrong with a loop: its script, and the only findings that are not OK, by their beginning.
FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "nothing": (of(), []),
    "nothing, by epochs": (of(("while not sampler.complete", "for epoch in sampler.epochs()"), ("sampler.lo", "epoch.lo")), []),
    "batches that the sampler did not deal": (
        of(("while not sampler.complete", "for epoch in sampler.epochs()"), ("sampler.loader()", "DataLoader(data, 64)")),
        [(FAILS, "the loop made a ShardSampler and takes its batches elsewhere")],
    ),
    "no load_final": (of(("    optimizer.load_final()\n", "")), [(LOOK, "load_final() was never called")]),
    "steps the inner optimizer too": (
        of(("            optimizer.step(", "            optimizer.inner.step()\n            optimizer.step(")),
        [(FAILS, "the loop steps a SGD itself")],
    ),
    "steps the inner optimizer alone": (
        of(*OWN_BATCHES, (STEP, "optimizer.inner.step()")),
        [(FAILS, "the loop steps a SGD itself")],
    ),
    "one pass": (of(("while not sampler.complete", "if sampler")), [(LOOK, "one pass over the sampler may end before")]),
    "a parameter without a gradient": (
        of(UNUSED),
        [(LOOK, "1 of the run's parameters, such as unused, got no gradient")],
    ),
    "statistics of its own": (of(BATCH_NORM), [(LOOK, "BatchNorm's statistics are of this worker's own batches")]),
    "statistics of the run": (of(BATCH_NORM, (END, f"{END}; update_statistics(model, DataLoader(data, 64))")), []),
    "own batches": (of(*OWN_BATCHES), [(LOOK, "the loop takes its batches elsewhere than from a ShardSampler")]),
    "own batches, the same in all workers": (
        of(*OWN_BATCHES, SEEDED),
        [(LOOK, "the loop draws its own samples, and PyTorch's seed is 5"), (LOOK, "the loop takes its batches elsewhere")],
    ),
    "own batches, seeded apart": (
        of(*OWN_BATCHES, SEEDED, ("    for epoch", "    torch.manual_seed(6)\n    for epoch")),
        [(LOOK, "the loop takes its batches elsewhere")],
    ),
    "all report": (of((END, f"{REPORT}; {END}; {REPORT}")), [(LOOK, "every worker reports evaluations during the run")]),
    "one reports": (of((END, f"session.is_first and {REPORT}; {END}")), []),
    "a schedule that the server steps": (
        of(
            ("    optimizer = ", "    inner = torch.optim.SGD(model.parameters(), lr=0.05)\n    optimizer = "),
            ("torch.optim.SGD(model.parameters(), lr=0.05), session, n", 'inner, session, on="server", schedule=scheduler, n'),
            ("    optimizer = ", "    scheduler = torch.optim.lr_scheduler.StepLR(inner, 9)\n    optimizer = "),
            ("(loss=loss)", "(loss=loss); scheduler.step()"),
        ),
        [(FAILS, "line 19 of train.py raises InvalidRequest: delete scheduler.step()")],
    ),
    "a loop that is stopped": (
        of((STEP, "signal.raise_signal(signal.SIGINT)"), ("import sys", "import signal, sys")),
        [(FAILS, "the script did not end in time and was stopped in line 17 of train.py")],
    ),
    "an exit status": (of((END, f"{END}; sys.exit(3)")), [(FAILS, "the script ended with status 3")]),
}


@contextmanager
def dry_run_with(servers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Live]]:
    """Servers that take the place of those that a script names, in this order."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    with ExitStack() as running:
        lives = [running.enter_context(serving(config(Hyperparameters(epochs=0, steps=STEPS)))) for _ in range(servers)]
        for number, live in enumerate(lives):
            serve(folder, number, live.address)
        yield lives


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_dry_run_finds_a_fault_and_nothing_else(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, expected = FAULTS[fault]
    (tmp_path / "train.py").write_text(script)
    torch.seed()
    with dry_run_with(1, tmp_path, monkeypatch) as (live,):
        found = [each for each in run(str(tmp_path / "train.py"), STEPS, tmp_path) if each[0] != OK]
        assert version(live) <= STEPS
    assert len(found) == len(expected), found
    for (level, text), (expected_level, beginning) in zip(found, expected, strict=True):
        assert (level, text[: len(beginning)]) == (expected_level, beginning)


def test_what_a_loop_saves_goes_elsewhere_and_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.pt").write_text("of last night")
    path = repr(str(tmp_path / "model.pt"))
    saves = f"{END}; torch.save(1, {path}); assert torch.load({path}) == 1"
    (tmp_path / "train.py").write_text(of((END, saves)))
    with dry_run_with(1, tmp_path, monkeypatch):
        found = [text for level, text in run(str(tmp_path / "train.py"), STEPS, tmp_path) if level != OK]
    assert found == ["every worker calls torch.save: put it under `if session.is_first:`"]
    assert (tmp_path / "model.pt").read_text() == "of last night"


# What is wrong with a script of two models: what in the example is replaced, the generator's commits, and the finding.
ENDS, STEPS_GENERATOR = "for optimizer in (of_discriminator, of_generator):", "of_generator.step(loss=loss_of_generator)"
PAIRS: dict[str, tuple[str, str, int, list[tuple[str, str]]]] = {
    "nothing": (ENDS, ENDS, STEPS, []),
    "one has no load_final": (
        ENDS, "for optimizer in (of_discriminator,):", STEPS, [(LOOK, "load_final() was never called for 1 of the models")],
    ),
    "one steps its inner optimizer": (
        STEPS_GENERATOR, "of_generator.inner.step()", 0, [(FAILS, "the loop steps a Adam itself")],
    ),
    "one makes no step": (STEPS_GENERATOR, "pass", 0, [(LOOK, "the SDK warns: ")]),
}  # fmt: skip


@pytest.mark.parametrize("fault", PAIRS)
def test_two_models_have_a_server_each(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, steps, expected = PAIRS[fault]
    example = (ROOT / "examples/unusual/gan.py").read_text()
    assert old in example
    (tmp_path / "train.py").write_text(example.replace(old, new))
    monkeypatch.setattr("sys.argv", ["train.py"])
    with dry_run_with(2, tmp_path, monkeypatch) as lives:
        found = [each for each in run(str(tmp_path / "train.py"), STEPS, tmp_path) if each[0] != OK]
        assert [version(live) for live in lives] == [STEPS, steps]
    assert addresses(tmp_path) == ["127.0.0.1:50051", "127.0.0.1:50061"]
    assert len(found) == len(expected), found
    for (level, text), (expected_level, beginning) in zip(found, expected, strict=True):
        assert (level, text[: len(beginning)]) == (expected_level, beginning)


def test_what_the_servers_saw_is_told_by_address_if_there_are_several() -> None:
    joined, trained = pb.GetStatusResponse(parameter_count=5), pb.GetStatusResponse(parameter_count=5, version=3)
    assert [level for level, _ in _of_servers([("a:1", joined)], 3, failed=False)] == [FAILS]
    assert [text[:18] for _, text in _of_servers([("a:1", trained)], 3, failed=False)] == ["3 commits: step(lo"]
    two = list(_of_servers([("a:1", trained), ("b:2", joined)], 3, failed=False))
    assert [(level, text[:17]) for level, text in two] == [(OK, "3 commits at a:1:"), (LOOK, "no commit at b:2:")]


def test_an_address_has_one_server_however_it_is_written(tmp_path: Path) -> None:
    for number in range(2):
        serve(tmp_path, number, f"unix:{number}")
    names = ("localhost:50051", "127.0.0.1:50051", "127.0.0.1:50061", "[::1]:50051", "localhost:50061")
    assert [private_server(tmp_path, name)[-1] for name in names] == ["0", "0", "1", "0", "1"]


# What a script does: its text, the exit status of gem-ctl doctor, and what that prints.
COMMANDS = {
    "trains": (of(("model = nn", "print(sys.argv[1:])\nmodel = nn")), 0, "['--lr', '1', '--server', 'x'] ok 2 commits, loss"),
    "never joins": ("pass", 1, "will not work no worker joined"),
    "never steps": (of(*OWN_BATCHES, (STEP, "pass")), 1, "will not work a worker joined, but made no commit"),
    "crashes": (of(("loss.backward()", "loss.forward()")), 1, "will not work line 16 of train.py raises AttributeError: "),
    "never ends": (of((END, "while True: pass")), 1, "will not work the script did not end in time and was stopped"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", 1, "will not work the script's process was killed"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_tries_a_script_with_a_server_of_its_own_and_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    script, status, shown = COMMANDS[kind]
    (tmp_path / "train.py").write_text(script)
    limit = "3" if kind == "never ends" else "300"
    arguments = [
        "--seconds",
        limit,
        "--settings",
        "--until-stopped --steps 2",
        str(tmp_path / "train.py"),
        "--lr",
        "1",
        "--server",
        "x",
    ]
    done = python("-m", "gem_ctl", "doctor", *arguments, TMPDIR=str(tmp_path))
    said = " ".join(done.stdout.split())
    assert done.returncode == status, said + done.stderr
    assert shown in said
    assert not list(tmp_path.glob("gem-doctor-*"))
    assert not [command for command in commands() if str(tmp_path) in command]


def commands() -> Iterator[str]:
    """The command lines of all processes of this machine, on Linux."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield path.read_text(errors="replace")


@pytest.mark.long
def test_the_command_starts_a_server_for_each_model(tmp_path: Path) -> None:
    done = python("-m", "gem_ctl", "doctor", ROOT / "examples/unusual/gan.py", TMPDIR=str(tmp_path))
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, said + done.stderr
    assert "ok 3 commits at 127.0.0.1:50051, loss" in said
    assert "ok 3 commits at 127.0.0.1:50061, loss" in said
    assert not [command for command in commands() if str(tmp_path) in command]


@pytest.mark.long
def test_settings_that_the_server_refuses_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    done = python("-m", "gem_ctl", "doctor", "--settings", "--until-stopped --rule nonsense", tmp_path / "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gem-ctl: the dry run's server does not start: Invalid value for '--rule'")
    assert "nonsense" in done.stderr
