"""Choosing a rule and its options as text, users' own rules by name, and the errors for invalid ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.rules import RULES as ROWS
from gem_server.rules import RULES, make_rule, require_row
from gem_server.rules.proxies import PROXIES
from kit.core import make_core

MODULE = """
from __future__ import annotations

from dataclasses import dataclass, field

from gem_server.rules import ArrayRule


@dataclass(frozen=True)
class Good(ArrayRule):
    learning_rate: float = 0.05
    bound: float = 1.0
    rounds: int = 3
    word: str = "one"
    strict: bool = False

    def move(self, theta, update, buffers, rule_input):
        theta -= update


@dataclass(frozen=True)
class NeedsBound(Good):
    limit: float = field(kw_only=True)


@dataclass(frozen=True)
class WithList(Good):
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class NoMove(ArrayRule):
    learning_rate: float = 0.05


@dataclass(frozen=True)
class NoRate(ArrayRule):
    def move(self, theta, update, buffers, rule_input):
        theta -= update


class NotDecorated(Good):
    bound: float = 2.0


@dataclass(frozen=True)
class NotDerived:
    learning_rate: float = 0.05


three = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module with rules in it, good ones and bad ones."""
    (tmp_path / "rules_of_a_user.py").write_text(MODULE)
    (tmp_path / "broken_rules.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "ending_rules.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "rules_of_a_user"
    sys.modules.pop("rules_of_a_user", None)


# -- the rules that there are


@pytest.mark.parametrize(
    "change",
    [{"kind": "delta"}, {"each": ("moment",)}, {"shared": ("m",)}, {"temporaries": 5}, {"by_element": False},
     {"reads_once": True}, {"settings": ()}],
    ids=str,
)  # fmt: skip
def test_the_server_does_not_start_if_a_rule_is_not_its_row(change: dict[str, Any]) -> None:
    require_row(ROWS["dana"], make_rule("dana"), "dana")
    with pytest.raises(TypeError, match=r"^the class of rule dana says [^\n]+: correct one of them$"):
        require_row(replace(ROWS["dana"], **change), make_rule("dana"), "dana")


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_says_which_settings_it_has(rule: str) -> None:
    has = ", ".join(ROWS[rule].settings)
    valid = f"its settings are {has}" if has else "it has no settings"
    with pytest.raises(ValueError, match=r"^the rule has no setting 'learning_rate': that is the option --learning-rate$"):
        make_core(Hyperparameters(rule=rule, rule_options="learning_rate=1"))
    for wrong in ("nonsense", "xyz", ""):
        with pytest.raises(ValueError, match=rf"^the rule has no setting {wrong!r}( \(did you mean \w+\?\))?: {valid}$"):
            make_core(Hyperparameters(rule=rule, rule_options=f"{wrong}=1"))


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("aeasgd", "alpha", "the rule's setting 'alpha' has no value: write alpha=VALUE"),
        ("gem", "proxy=rmsprop", f"proxy is one of {', '.join(PROXIES)}, not 'rmsprop'"),
        ("gem", "proxy_rate=-1", "proxy_rate must be 0 or lie in"),
        *(("gem", f"against={value}", "against must lie in [0, 1]") for value in ("-0.1", "1.1", "nan")),
        *(("aeasgd", f"alpha={value}", "alpha must lie in (0, 1]") for value in ("0", "1.1", "-0.1", "nan")),
        *(("dcasgd", f"compensation={value}", "compensation (λ) must lie in") for value in ("-1", "1001", "nan", "inf")),
        *(("dcasgd", f"mean_square={value}", "mean_square (m) must lie in") for value in ("-0.1", "1", "nan")),
        *(("fedasync", f"mixing={value}", "mixing (α) must lie in") for value in ("0", "1.01", "nan")),
        ("fedasync", "staleness=linear", "staleness is one of constant, polynomial, hinge, not 'linear'"),
        *(("fedasync", f"{name}=-1", "a lies in [0, 1000], b in [0, 1e6]") for name in "ab"),
        ("fedasync", "a=nan", "a lies in"),
        *(("fedbuff", f"buffer_size={value}", "buffer_size (K) must lie in") for value in ("0", "-1", "1000001")),
        *(("fedbuff", f"outer_rate={value}", "outer_rate (η_g) must lie in") for value in ("0", "1001", "nan")),
        *(("ringmaster", f"threshold={value}", "threshold (R) must be at least 1") for value in ("0", "-3")),
        *(("diloco", f"outer_rate={value}", "outer_rate (ε) must lie in") for value in ("0", "1001", "nan")),
        *(("diloco", f"outer_momentum={value}", "outer_momentum (β) must lie in") for value in ("-0.1", "1", "nan")),
        *(("diloco", f"delay={value}", "delay (N) must lie in") for value in ("0", "1000001")),
        *(("diloco", f"delay=4 eager={value}", "eager (c) must lie in [0, 1/delay]") for value in ("-0.1", "0.26", "nan")),
        ("fedbuff", "buffer_size=2.5", "buffer_size is a whole number, not '2.5'"),
        ("diloco", "outer_rate=fast", "outer_rate is a number, not 'fast'"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(rule: str, options: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_core(Hyperparameters(rule=rule, rule_options=options))


def test_options_are_separated_by_blanks_and_the_last_of_a_name_counts() -> None:
    rule = make_rule("diloco", rule_options="  delay=4   outer_rate=0.5 delay=8 ")
    assert (rule.delay, rule.outer_rate, rule.outer_momentum) == (8, 0.5, 0.9)  # type: ignore[attr-defined]


# -- users' own


def test_a_users_rule_gets_the_runs_settings_and_its_own_options(module: str) -> None:
    options = "bound=0.5 rounds=7 word=two strict=true"
    rule = make_core(Hyperparameters(rule=f"{module}:Good", rule_options=options, learning_rate=0.2)).rule
    found = (rule.learning_rate, rule.bound, rule.rounds, rule.word, rule.strict)  # type: ignore[attr-defined]
    assert found == (0.2, 0.5, 7, "two", True)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no_such_module:Rule", "", "can't import 'no_such_module' for rule 'no_such_module:Rule': No module named"),
        ("broken_rules:Rule", "", "can't import 'broken_rules' for rule 'broken_rules:Rule': RuntimeError: no licence"),
        ("ending_rules:Rule", "", "can't import 'ending_rules' for rule 'ending_rules:Rule': SystemExit: 3"),
        (":Rule", "", "can't import '' for rule ':Rule'"),
        (".rules_of_a_user:Good", "", "can't import '.rules_of_a_user'"),
        ("rules_of_a_user:Missing", "", "module 'rules_of_a_user' has no class 'Missing'"),
        ("rules_of_a_user:", "", "module 'rules_of_a_user' has no class ''"),
        ("rules_of_a_user:three", "", "'rules_of_a_user:three' is not a rule: it must be a dataclass derived from"),
        ("rules_of_a_user:NotDerived", "", "'rules_of_a_user:NotDerived' is not a rule: it must be a dataclass derived from"),
        ("rules_of_a_user:NotDecorated", "", "'rules_of_a_user:NotDecorated' is not a rule: it must be a dataclass"),
        ("rules_of_a_user:NoMove", "", "'rules_of_a_user:NoMove' is not a rule: it lacks move"),
        ("rules_of_a_user:NoRate", "", "'rules_of_a_user:NoRate' is not a rule: it lacks learning_rate"),
        ("rules_of_a_user:NeedsBound", "", "the rule needs settings without a default: limit=…"),
        ("rules_of_a_user:WithList", "", "the rule's setting sizes must have one of the types int, float, str, bool"),
        ("rules_of_a_user:Good", "limit=1", "the rule has no setting 'limit': its settings are bound, rounds, word, strict"),
        ("rules_of_a_user:Good", "strict=perhaps", "the rule's setting strict is true or false, not 'perhaps'"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line_that_says_why(name: str, options: str, said: str, module: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        make_core(Hyperparameters(rule=name, rule_options=options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("momentum", "pi_max", "warned"),
    [(0.9, 5.0, False), (0.99, 5.0, True), (0.99, 50.0, False), (0.95, 5.0, True), (0.0, 1.0, False), (0.9, 1.0, True)],
)
def test_a_pi_max_that_cuts_most_of_the_momentum_is_said(momentum: float, pi_max: float, warned: bool) -> None:
    assert ("pi_max" in make_rule("gem", momentum=momentum, pi_max=pi_max).caution) == warned


def test_other_rules_and_proxies_have_nothing_to_say_about_it() -> None:
    rules = [make_rule(name) for name in RULES] + [make_rule("gem", "proxy=adam", momentum=0.99)]
    assert {rule.caution for rule in (*rules, make_rule("gem", optimizer="adamw"))} == {""}
