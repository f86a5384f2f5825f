"""Every other rule, option and proxy, run in the core, against oracles written from the papers' equations alone; and figures
of all rules that were worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.named_settings import parse
from gem_api.rules import RULES
from gem_server.rules.base import Shared
from gem_server.rules.yellowfin import NUMBERS, _from_noise, tuned_momentum
from kit.core import apply as apply_commit
from kit.core import bits, commit, header, make_core, send, start
from rules import oracle_rules as by_hand
from rules.oracle_rules import Oracle
from rules.oracle_yellowfin import YellowFinMatched, momentum_against_noise

WORKERS = ["ann", "bob", "cy"]
LAYOUT = Layout.of({"w": (2, 3), "b": (3,)})
ETA = 0.05
CLOSE = 1e-5  # of θ's scale
COMMITS = 160


def rule(name: str, options: str = "", **settings: Any) -> Hyperparameters:
    return Hyperparameters(rule=name, rule_options=options, learning_rate=ETA, **settings)


def gem(proxy: str, options: str = "", **settings: Any) -> Hyperparameters:
    return rule("gem", f"proxy={proxy} {options}", kappa=1.5, **settings)


def around(optimizer: str, **settings: Any) -> Hyperparameters:
    return rule("gem", optimizer=optimizer, kappa=1.5, pi_max=1.0, **settings)


def oracle(kind: type[Oracle], **settings: Any) -> type[Oracle]:
    return type(kind.__name__, (kind,), settings)


CASES: dict[str, tuple[Hyperparameters, type[Oracle]]] = {
    "agn": (rule("agn"), by_hand.Descent),
    "ringmaster, 1": (rule("ringmaster", "threshold=1"), oracle(by_hand.Threshold, threshold=1)),
    "ringmaster, 3": (rule("ringmaster", "threshold=3"), oracle(by_hand.Threshold, threshold=3)),
    "aeasgd": (rule("aeasgd"), by_hand.Elastic),
    "aeasgd, 0.3": (rule("aeasgd", "alpha=0.3"), oracle(by_hand.Elastic, alpha=0.3)),
    "dcasgd-c": (rule("dcasgd"), by_hand.Compensated),
    "dcasgd-c, 2": (rule("dcasgd", "compensation=2"), oracle(by_hand.Compensated, compensation=2.0)),
    "dcasgd-a": (
        rule("dcasgd", "compensation=2 mean_square=0.95"), oracle(by_hand.Compensated, compensation=2.0, decay=0.95),
    ),
    "dcasgd-a, present gradient": (
        rule("dcasgd", "compensation=2 mean_square=1e-9"), oracle(by_hand.Compensated, compensation=2.0, decay=1e-9),
    ),
    "fedasync": (rule("fedasync"), oracle(by_hand.Mixed, function=by_hand.polynomial(0.5))),
    "fedasync, polynomial": (
        rule("fedasync", "mixing=0.9 staleness=polynomial a=2"),
        oracle(by_hand.Mixed, mixing=0.9, function=by_hand.polynomial(2)),
    ),
    "fedasync, constant": (rule("fedasync", "staleness=constant mixing=0.3"), oracle(by_hand.Mixed, mixing=0.3)),
    "fedasync, hinge": (
        rule("fedasync", "staleness=hinge a=10 b=1"), oracle(by_hand.Mixed, function=by_hand.hinge(10, 1)),
    ),
    "fedbuff, 1": (rule("fedbuff", "buffer_size=1"), oracle(by_hand.Buffered, size=1)),
    "fedbuff, 4": (rule("fedbuff", "buffer_size=4 outer_rate=0.5"), oracle(by_hand.Buffered, outer_rate=0.5)),
    "fedbuff, 10": (rule("fedbuff"), oracle(by_hand.Buffered, size=10)),
    "diloco": (rule("diloco"), by_hand.DelayedNesterov),
    "diloco, sgd": (
        rule("diloco", "outer_momentum=0 outer_rate=1"), oracle(by_hand.DelayedNesterov, beta=0.0, step_size=1.0),
    ),
    "diloco, delayed": (
        rule("diloco", "delay=3 outer_rate=0.3 outer_momentum=0.5"),
        oracle(by_hand.DelayedNesterov, every=3, step_size=0.3, beta=0.5),
    ),
    "diloco, eager": (rule("diloco", "delay=4 eager=0.1"), oracle(by_hand.DelayedNesterov, every=4, eager=0.1)),
    "diloco, most eager": (rule("diloco", "delay=4 eager=0.25"), oracle(by_hand.DelayedNesterov, every=4, eager=0.25)),
    "rescaled": (rule("rescaled"), by_hand.EqualSay),
    "dana": (rule("dana"), by_hand.AlongAllMomenta),
    "dana, 0.5": (rule("dana", momentum=0.5), oracle(by_hand.AlongAllMomenta, mu=0.5)),
    "momentum": (gem("momentum"), by_hand.MomentumMatched),
    "momentum, paper": (gem("momentum", snapshot="paper"), oracle(by_hand.MomentumMatched, convention="paper")),
    "nesterov": (gem("nesterov"), by_hand.NesterovMatched),
    "nesterov, paper": (gem("nesterov", snapshot="paper"), oracle(by_hand.NesterovMatched, convention="paper")),
    "adam": (gem("adam", pi_max=1e6), oracle(by_hand.AdamMatched, pi_max=1e6)),
    "adam, fixed": (gem("adam", "proxy_rate=0.01", pi_max=100.0), oracle(by_hand.AdamMatched, size=0.01, pi_max=100.0)),
    "adam, paper": (gem("adam", momentum=0.5, snapshot="paper"), oracle(by_hand.AdamMatched, mu=0.5, convention="paper")),
    "global": (gem("global"), by_hand.GloballyMatched),
    "global, paper": (gem("global", snapshot="paper"), oracle(by_hand.GloballyMatched, convention="paper")),
    "yellowfin": (gem("yellowfin"), YellowFinMatched),
    "yellowfin, from 0": (gem("yellowfin", momentum=0.0), oracle(YellowFinMatched, mu=0.0)),
    "around adamw": (around("adamw", weight_decay=0.1), by_hand.AdamWLookingAhead),
    "around lion": (around("lion", weight_decay=0.1), by_hand.LionLookingAhead),
    "around workers' own": (around("worker"), by_hand.LookingAhead),
}  # fmt: skip
EXACT = {"agn", "ringmaster, 1", "ringmaster, 3"}


def test_every_rule_has_an_oracle() -> None:
    elsewhere = {"gem", "downpour", "adaptive"}  # in `rules/oracle.py`
    assert {settings.rule for settings, _ in CASES.values()} | elsewhere == RULES.keys()


def halved(version: int) -> float:
    """η_t of the schedule that the test below sets: half after every 50 commits."""
    return ETA * 0.5 ** (version // 50)


@pytest.mark.parametrize("case", CASES)
def test_a_rule_equals_its_oracle_over_many_interleaved_commits(case: str) -> None:
    """Also what it answers, with which version; and a commit that it leaves out moves nothing but gives a fresh θ."""
    settings, kind = CASES[case]
    settings = replace(settings, schedule="step", decay_versions=50, decay_factor=0.5)
    random = np.random.default_rng(7)
    theta = random.normal(size=LAYOUT.size).astype(np.float32)
    core = make_core(settings)
    leases = dict(zip(WORKERS, start(core, WORKERS, LAYOUT, theta), strict=True))
    expected = kind(theta, WORKERS, halved)
    sequences, left_out, staleness = dict.fromkeys(WORKERS, 0), 0, set()
    size = ETA if core.rule.kind == "delta" else 1.0
    for number in range(COMMITS):
        name = str(random.choice(WORKERS, p=[0.5, 0.3, 0.2]))
        lease = core.leases.get(leases[name])
        if number % 17 == 16:  # a worker may pull anew at any time
            core.pull(lease)
            expected.pull(name)
        update = size * random.normal(0.2, 1, LAYOUT.size) * (random.random(LAYOUT.size) > 0.1)
        sequences[name] += 1
        applied = commit(core, leases[name], sequences[name], update.astype(np.float32))
        taken = expected.commit(name, update.astype(np.float32))
        worker, scale = expected.workers[name], float(np.abs(expected.theta).max())
        assert applied.discarded is not taken
        assert (core.central.version, applied.base_version) == (expected.version, worker.base_version)
        if case in EXACT:
            assert bits(core.central.theta) == bits(expected.theta.astype(np.float32))
        np.testing.assert_allclose(core.central.theta, expected.theta, rtol=0, atol=CLOSE * scale)
        np.testing.assert_allclose(core.reply(lease), worker.answer, rtol=0, atol=CLOSE * scale)
        left_out += applied.discarded
        staleness.add(applied.staleness)
    assert max(staleness) > 3
    assert (left_out > 10) == ("ringmaster" in case)


# -- worked by hand: all figures are exact in binary

ONE = Layout.of({"w": (1,)})
ANN, BOB = "ann", "bob"
BY_HAND: dict[str, tuple[list[tuple[str, float]], list[float]]] = {
    # Alone: Δ = −½, then m = −½, −¾, −⅞ (Eq. 24), and π·Δ = m (Eqs. 16, 19).
    "gem:momentum=0.5,kappa=1,pi_max=5": ([(ANN, 1), (ANN, 1), (ANN, 1)], [-0.5, -1.25, -2.125]),
    # Ann moves θ by −½. Bob's |m| = 1 less the drift ½ leaves ½, and |Δ| = 1: π = ½, so θ moves by −½ again.
    "gem:momentum=0.5,kappa=1": ([(ANN, 1), (BOB, 2)], [-0.5, -1.0]),
    # Ann moves θ by −2; Bob's |m| = ½ is less than that drift, so his π is 0 (and never negative).
    "gem:momentum=0.5": ([(ANN, 4), (BOB, 1)], [-2.0, -2.0]),
    # The snapshot is from before the own commit: m = −¾, drift ½: π = (¾ − ½) / ½ = ½, so θ moves by −¼ only.
    "gem:momentum=0.5,snapshot=paper": ([(ANN, 1), (ANN, 1)], [-0.5, -0.75]),
    # The first snapshot is the pulled θ, as the authors' worker pulls once before it trains; s is the same at the second.
    "gem:momentum=0.5,snapshot=reference,epsilon=1e-12": ([(ANN, 1), (ANN, 1)], [-0.5, -0.75]),
    # Bob's gradient is one commit late: half of it.
    "adaptive": ([(ANN, 1), (BOB, 1)], [-0.5, -0.75]),
    # x = 1: e = ¼, so θ = ¼ and x = ¾; then x = 1¾: e = ¼·1½, so θ = ⅝.
    "aeasgd:alpha=0.25": ([(ANN, 1), (ANN, 1)], [0.25, 0.625]),
    # Ann: θ = −1. Bob's g = 2 at s = 0 gives g + ½·4·(−1 − 0) = 0; fresh, it counts in full.
    "dcasgd:compensation=0.5": ([(ANN, 2), (BOB, 2), (BOB, 2)], [-1.0, -1.0, -2.0]),
    # α = ½, a = 1: Ann's x = 4 gives 2; Bob's, one commit late, ¾·2 + ¼·4 = 2½.
    "fedasync:mixing=0.5,a=1": ([(ANN, 4), (BOB, 4)], [2.0, 2.5]),
    # K = 2: Bob moves θ three times, always fresh; Cy pulled before them, so that 1/√(1 + 3) of its delta counts.
    "fedbuff:buffer_size=2": (
        [(ANN, 0), (BOB, 4), (ANN, 0), (BOB, 2), (ANN, 0), (BOB, 2), ("cy", 8), (BOB, 0)],
        [0.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0],
    ),
    # N = 2, ε = 1, β = ½: first −g/2 alone; then m = (2 + 4)/2 = 3 and θ moves by ½·3 + 4/2 more.
    "diloco:delay=2,outer_rate=1,outer_momentum=0.5": ([(ANN, 2), (ANN, 4)], [1.0, 4.5]),
    # c = ½: after m = 1, θ moves by c·β·m = ¼ between, and by (1 − 1 + ½)·½·½ = ⅛ with the next m.
    "diloco:delay=2,outer_rate=1,outer_momentum=0.5,eager=0.5": (
        [(ANN, 1), (ANN, 1), (ANN, 0), (ANN, 0)], [0.5, 1.25, 1.5, 1.625],
    ),
    # Each has its own momentum, ½: Ann moves θ by −½·(1 + ½·1); Bob by as much; then Ann's m is 1½ and moves it by −½·1¾.
    "dana:momentum=0.5": ([(ANN, 1), (BOB, 1), (ANN, 1)], [-0.75, -1.5, -2.375]),
    # Two workers: fresh gradients count half; Bob's, one commit late, in full.
    "rescaled": ([(ANN, 1), (BOB, 1), (BOB, 1)], [-0.25, -0.75, -1.0]),
    # τ = 2 is too stale: θ stands still.
    "ringmaster:threshold=2": ([(ANN, 1), (ANN, 1), (BOB, 1), (BOB, 1)], [-0.5, -1.0, -1.0, -1.5]),
}  # fmt: skip


@pytest.mark.parametrize("rule_and_options", BY_HAND)
def test_figures_worked_by_hand(rule_and_options: str) -> None:
    """θ after each commit, from 0, all workers having pulled at first; η = ½."""
    updates, thetas = BY_HAND[rule_and_options]
    core = make_core(Hyperparameters(learning_rate=0.5, **parse("rule", rule_and_options)))
    names = sorted({name for name, _ in updates})
    leases = dict(zip(names, start(core, names, ONE, 0.0), strict=True))
    for (name, update), theta in zip(updates, thetas, strict=True):
        commit(core, leases[name], core.leases.get(leases[name]).sequence + 1, update)
        assert core.central.theta.tolist() == [theta]


def test_a_commit_that_is_too_stale_is_answered_the_same_when_it_is_sent_again() -> None:
    core = make_core(Hyperparameters(rule="ringmaster", rule_options="threshold=1"))
    ann, bob = start(core, ["ann", "bob"], ONE, 0.0)
    commit(core, ann, 1, 1.0)
    late = apply_commit(core, send(core, header(core, bob, 1), 1.0))
    _, lease = core.admit(header(core, bob, 1), 0.0)
    assert lease.last_applied == late
    assert core.outcomes == {"applied": 1, "discarded": 1, "repeated": 1, "rejected": 0}


# -- YellowFin's cubic


@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1e-2, 0.3, 1.0, 3.0, 1e2, 1e4, 1e8])
def test_the_momentum_against_noise_is_where_the_expected_distance_is_least(magnitude: float) -> None:
    """μ·D² + (1 − √μ)⁴/h_min²·C, minimised by brute force, for signal-to-noise ratios D²·h_min²/C of sixteen decades."""
    for distance, least in ((1.0, 1.0), (1e-3, 50.0), (20.0, 1e-4)):
        variance = (distance * least) ** 2 / magnitude
        found = _from_noise(distance, least, variance)
        assert found == pytest.approx(momentum_against_noise(distance, least, variance), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("distance", "variance", "mu"), [(1e-200, 1.0, 1.0), (1e20, 1e-20, 0.0)])
def test_the_momentum_against_noise_holds_at_the_ends(distance: float, variance: float, mu: float) -> None:
    assert _from_noise(distance, 1.0, variance) == pytest.approx(mu, abs=1e-6)


def test_the_tuned_momentum_stays_below_one_whatever_the_gradients() -> None:
    """Zeros, the largest that are taken in, constant ones: what there is nothing to tell from leaves it where it starts."""
    for gradients in (np.zeros((40, 3)), np.full((40, 3), 1e12), np.full((40, 3), 1e-30), np.eye(3)[np.arange(40) % 3] * 1e12):
        shared = Shared({name: np.zeros(3, np.float32) for name in ("mean", "mean_square")}, dict(NUMBERS))
        for gradient in gradients.astype(np.float32):
            mu = tuned_momentum(gradient, shared, 0.9)
            assert 0 <= mu <= 0.999
            assert math.isfinite(sum(shared.numbers.values()))
