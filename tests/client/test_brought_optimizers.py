"""An optimizer of PyTorch given to `Optimizer`: stepped by the worker or kept on the server, agreed on by all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from client.brought_helpers import INPUTS, PLAIN, adamw, assert_close, groups, make_model, simple, train
from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_client import OptimizerChoice, connect
from gem_client.torch import Optimizer
from gem_client.torch.local_steps import LocalSteps
from kit.model import version
from kit.server import config, serving
from torch import Tensor, nn

Make = Callable[[nn.Module], torch.optim.Optimizer]


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


MAKES: dict[str, Make] = {
    "adamw with groups": adamw,
    "sgd with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize(
    ("make", "rule", "local_steps"),
    [
        *[(make, "gem", local_steps) for make in MAKES.values() for local_steps in (1, 3)],
        (adamw, "downpour", 3),
        (adamw, "adaptive", 1),
    ],
)
def test_one_worker_with_its_own_optimizer_trains_as_without_a_server(make: Make, rule: str, local_steps: int) -> None:
    """With parameter groups, clipping and a scheduler. The server takes its optimizer without a flag."""
    ours, theirs = make_model(), make_model()
    rival = make(theirs)
    train(theirs, rival, 30, cosine(rival))
    with serving(config(replace(PLAIN, rule=rule, local_steps=local_steps))) as live, connect(live.address) as session:
        optimizer = Optimizer(make(ours), session, on="worker")
        assert optimizer.inner is not None
        train(ours, optimizer, 30, cosine(optimizer.inner))
        optimizer.finish()
        assert version(live) == 30 // local_steps
        assert live.server.core.settings.optimizer == "worker"
    assert_close(ours, theirs)


ON_SERVER: dict[str, Make] = {
    "adamw with groups": adamw,
    "adam with decay": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.05),
    "adam with decoupled decay": lambda model: torch.optim.Adam(
        model.parameters(), lr=0.01, weight_decay=0.5, decoupled_weight_decay=True
    ),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.05),
}


@pytest.mark.parametrize("rule", ["gem", "downpour"])
@pytest.mark.parametrize("make", ON_SERVER.values(), ids=ON_SERVER.keys())
def test_one_worker_whose_optimizer_is_on_the_server_trains_as_without(make: Make, rule: str) -> None:
    ours, theirs = make_model(), make_model()
    train(theirs, make(theirs), 30)
    # The paper's GEM scales SGD's steps up to momentum's energy: without momentum they stay as they are.
    settings = replace(PLAIN, rule=rule, momentum=0.0)
    with serving(config(settings)) as live, connect(live.address) as session:
        train(ours, Optimizer(make(ours), session, on="server"), 30)
        assert version(live) == 30
    assert_close(ours, theirs)


def test_the_first_workers_settings_are_the_runs() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        Optimizer(adamw(make_model()), session, on="server")
        settings = live.server.core.settings
        assert (settings.optimizer, settings.learning_rate, settings.weight_decay) == ("adamw", 0.01, 0.1)
        assert settings.optimizer_options == "beta1=0.8 beta2=0.95 epsilon=1e-08"
        assert (settings.kappa, settings.pi_max) == (1.5, 1.0)  # the defaults for this optimizer
        layout = live.server.core.central.layout
        assert layout is not None
        assert layout.groups == {
            "0.weight": (0.5, True), "0.bias": (1.0, False), "2.bias": (1.0, False),
        }  # fmt: skip


def test_what_the_user_gave_to_the_server_is_not_changed_by_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    given = frozenset({"learning_rate", "kappa"})
    settings = replace(PLAIN, learning_rate=0.01, kappa=3.0)
    with serving(config(settings, given=given)) as live, connect(live.address) as session:
        Optimizer(adamw(make_model()), session, on="server")
        assert (live.server.core.settings.kappa, live.server.core.settings.pi_max) == (3.0, 1.0)
    with serving(config(replace(settings, learning_rate=0.2), given=given)) as live, connect(live.address) as session:
        optimizer = Optimizer(adamw(make_model()), session, on="server")
        assert live.server.core.settings.learning_rate == 0.2
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.2]
    assert "the server was started with --learning-rate 0.2, which is used instead of 0.01" in caplog.text


def faster(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] *= 2
    return optimizer


def plain(model: nn.Module) -> Any:
    return model.named_parameters()


OTHERS: list[tuple[Callable[[nn.Module], Any], str, Callable[[nn.Module], Any], str, str]] = [
    (adamw, "server", lambda m: torch.optim.AdamW(groups(m), lr=0.01), "server", "give all workers the same settings"),
    (
        adamw,
        "server",
        adamw,
        "worker",
        r'this run has adamw on the server, for all workers: use adamw with Optimizer\(\.\.\., on="server"\)',
    ),
    (adamw, "worker", adamw, "server", 'each worker makes the steps of its own optimizer: use .* without on="server"'),
    (adamw, "server", lambda m: faster(adamw(m)), "server", r"the first worker brought --learning-rate 0\.01.* brings 0\.02"),
    (plain, "worker", simple, "worker", "this run applies SGD on the server"),
    (plain, "worker", simple, "server", "this run applies SGD on the server, and the worker brings 'adamw'"),
    (simple, "worker", plain, "worker", "in this run each worker brings its optimizer"),
]


@pytest.mark.parametrize(("first", "on_first", "second", "on_second", "words"), OTHERS)
def test_a_worker_that_brings_something_else_is_told_what_to_do(
    first: Any, on_first: Any, second: Any, on_second: Any, words: str
) -> None:
    with serving(config(PLAIN)) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        Optimizer(first(make_model()), ann, on=on_first)
        before = live.server.core.settings
        with pytest.raises(InvalidRequest, match=words):
            Optimizer(second(make_model()), bob, on=on_second)
        assert live.server.core.settings == before


def test_a_server_that_names_the_optimizer_alone_takes_the_workers_rates() -> None:
    started = config(replace(PLAIN, optimizer="adamw"), given=frozenset({"optimizer"}))
    with serving(started) as live, connect(live.address) as session:
        Optimizer(simple(make_model()), session, on="server")
        assert live.server.core.settings.learning_rate == 0.01


def test_overlap_with_steps_of_the_worker_is_refused_before_it_joins() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="overlap is not available if the worker makes its own steps"):
            Optimizer(simple(make_model()), session, overlap=True, on="worker")
        assert not live.server.core.leases.live
        Optimizer(simple(make_model()), session, overlap=True)


def test_loading_a_state_leaves_the_servers_rate_in_place() -> None:
    settings = replace(PLAIN, schedule="step", decay_versions=2, decay_factor=0.5)
    with serving(config(settings)) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(adamw(model), session, on="server")
        saved = optimizer.state_dict()
        train(model, optimizer, 5)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 1)
        assert version(live) == 6


def test_a_rule_says_which_optimizers_it_can_not_apply() -> None:
    first, *others = make_model().parameters()
    slow: list[dict[str, Any]] = [{"params": [first], "lr": 0.0}, {"params": others}]
    with serving(config(replace(PLAIN, rule="dcasgd"))) as live, connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="rule dcasgd has one learning rate for all tensors"):
            Optimizer(torch.optim.SGD(slow, lr=0.05), session, on="server")
        with pytest.raises(InvalidRequest, match="rule dcasgd can't apply --optimizer worker: use gem, downpour or adaptive"):
            Optimizer(adamw(make_model()), session, on="worker")


def test_a_plain_loop_commits_gradients_to_the_servers_adamw() -> None:
    """The server was started with --optimizer adamw: the workers' loops need not know, and the server alone decays."""
    settings = replace(PLAIN, optimizer="adamw", learning_rate=0.01, weight_decay=0.1, pi_max=1.0)
    ours, theirs = make_model(), make_model()
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1), 20)
    with serving(config(settings, given=frozenset({"optimizer"}))) as live, connect(live.address) as session:
        train(ours, Optimizer(ours.named_parameters(), session), 20)
        assert live.server.core.settings == settings
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), r"the server has no RMSprop: use Adam, AdamW, Lion, or SGD"),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
            r"the server has no momentum=0\.9 for all workers, because .* diverges: give the parameters .*--rule gem:momentum",
        ),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "the server has no amsgrad=True"),
        (
            lambda m: torch.optim.AdamW([{"params": m[0].parameters(), "betas": (0.5, 0.9)}, {"params": m[2].parameters()}]),
            "may differ in their learning rate and weight decay alone",
        ),
        (
            lambda m: torch.optim.AdamW(
                [{"params": m[0].parameters(), "weight_decay": 0.2}, {"params": m[2].parameters(), "weight_decay": 0.1}]
            ),
            r"has the weight decay 0\.2 or 0, not 0\.1",
        ),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.0), "nothing would be trained"),
    ],
)
def test_what_the_server_can_not_keep_is_refused_before_the_worker_joins(make: Make, words: str) -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=words):
            Optimizer(make(make_model()), session, on="server")
        assert not live.server.core.leases.live


def test_diloco_takes_the_windows_of_an_inner_adamw() -> None:
    """As its paper has it: AdamW inside, Nesterov outside. With an outer rate of 1 and no momentum it is AdamW alone."""
    settings = replace(PLAIN, rule="diloco", rule_options="outer_rate=1 outer_momentum=0", local_steps=5)
    ours, theirs = make_model(), make_model()
    train(theirs, adamw(theirs), 20)
    with serving(config(settings)) as live, connect(live.address) as session:
        train(ours, Optimizer(adamw(ours), session), 20)
        assert version(live) == 4
    assert_close(ours, theirs)


def test_the_state_is_that_of_the_inner_optimizer() -> None:
    """A loop that saves and loads the optimizer's state gets the inner one's, with its moments."""
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(adamw(model), session, on="worker")
        train(model, optimizer, 3)
        assert optimizer.inner is not None
        saved = optimizer.state_dict()
        assert set(saved["state"]) == {0, 1, 2, 3}
        optimizer.inner.load_state_dict(saved)
        assert optimizer.param_groups is optimizer.inner.param_groups
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups is optimizer.inner.param_groups
        assert optimizer.state is optimizer.inner.state
        train(model, optimizer, 3)
        assert version(live) == 6


@pytest.mark.parametrize("bring", [lambda model: model.parameters(), lambda model: torch.optim.AdamW(model.parameters())])
def test_names_can_be_given_beside_parameters_and_optimizers_and_must_be_theirs(bring: Callable[[nn.Module], Any]) -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        with pytest.raises(InvalidRequest, match="names= has none of the parameters to train"):
            Optimizer(bring(model), session, names=make_model().named_parameters())
        Optimizer(bring(model), session, names=model.named_parameters())
        assert list(session.layout.split(session.read())) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("first", [nn.Module.named_parameters, nn.Module.parameters], ids=["named", "nameless"])
def test_a_worker_with_names_and_one_without_learn_how_to_give_them(
    first: Callable[[nn.Module], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever comes first. Who has none is told at once, before the model is saved as tensors 0, 1, and so on."""
    second = nn.Module.parameters if first is nn.Module.named_parameters else nn.Module.named_parameters
    with serving(config(PLAIN)) as live, connect(live.address) as one, connect(live.address) as other:
        Optimizer(torch.optim.AdamW(first(make_model())), one)
        told = [record.getMessage() for record in caplog.records if "names=model.named_parameters()" in record.getMessage()]
        assert len(told) == (first is nn.Module.parameters)
        with pytest.raises(LayoutMismatch, match=r"a position, not a name.*names=model\.named_parameters\(\)"):
            Optimizer(torch.optim.AdamW(second(make_model())), other)


def test_closures_are_called_by_the_inner_optimizer() -> None:
    """LBFGS calls its closure several times a step."""
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(torch.optim.LBFGS(model.parameters(), max_iter=5), session)
        losses: list[float] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = ((model(INPUTS) - INPUTS.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            losses.append(float(loss.detach()))
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert len(losses) > 3
        assert losses[-1] < losses[0]
        assert version(live) == 3


@pytest.mark.parametrize("stepped", [False, True])
def test_finish_skips_accumulated_batches_of_an_optimizer_that_needs_a_closure(
    stepped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Three batches and two to a step: one is left. It is skipped, with a line in the log, unless the loop steps before."""
    with serving(config(replace(PLAIN, epochs=1, steps=0))) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(torch.optim.LBFGS(model.named_parameters()), session, batches_per_step=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(INPUTS) ** 2).mean()
            loss.backward()
            return loss

        shards = session.shards(12)
        for number, _ in enumerate(shards):
            closure()
            if number == 1 or (number == 2 and stepped):
                optimizer.step(closure)
        optimizer.finish()
        assert list(shards) == []
        assert shards.complete, "the last shard went back: its batches would be trained on again"
        assert (version(live), session.skipped) == ((2, 0) if stepped else (1, 1))
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "several workers diverge" in warnings.pop(0)
        assert [("last 1 batches" in line, "step(closure)" in line) for line in warnings] == [(True, True)] * (not stepped)


@pytest.mark.parametrize("make", [*MAKES.values(), lambda model: torch.optim.LBFGS(model.parameters())])
def test_only_optimizers_that_need_a_closure_are_taken_for_such(make: Make) -> None:
    steps = LocalSteps([], make(make_model()))
    assert steps.needs_closure == isinstance(steps._inner, torch.optim.LBFGS)


@pytest.mark.parametrize(("make", "warned"), [(adamw, 1), (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0)])
def test_a_parameter_without_a_gradient_is_named_once_if_the_server_moves_it(
    make: Make, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(make(model), session, on="server", names=model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for _ in range(2):
            optimizer.zero_grad()
            model[0](INPUTS).sum().backward()  # type: ignore[index]
            optimizer.step()
        moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert moved == {"0.weight", "0.bias"} | ({"2.weight"} if warned else set())
    assert [record.message[:60] for record in caplog.records if "no gradient" in record.message] == [
        "2 parameters have no gradient, such as 2.weight: the server's"[:60]
    ] * warned


def test_an_optimizer_or_a_setting_that_there_is_not_is_refused_by_the_server() -> None:
    choices: list[Any] = [("rmsprop",), ("",), ("adamw", "beta1=2"), ("adamw", "", float("nan")), ("adamw", "", 0.1, 2.0)]
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        for choice in choices:
            with pytest.raises(InvalidRequest):
                session.join({"w": [1.0]}, optimizer=OptimizerChoice(*choice))
        session.join({"w": [1.0]})
