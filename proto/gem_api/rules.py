"""The built-in rules, each in one row: what may be known of them without their code, which is the server's alone.

The server compares its classes with the rows when it imports them. `gem-ctl plan`, --help, the Helm chart's schema,
docs/rules.md and tests read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gem_api.update_kind import UpdateKind


@dataclass(frozen=True)
class RuleRow:
    """A rule with its default settings and plain SGD. An array has a float32 for each of a server's parameters.

    Attributes:
        kind: The update that it takes.
        each: Names of the arrays that the server keeps for each worker.
        shared: Names of those that it keeps for all workers together.
        temporaries: Most arrays that it makes while it applies a commit.
        by_element: Whether several servers may hold a range of the parameters each.
        reads_once: Whether it reads a gradient where a worker can still write to it; otherwise it gets a copy.
        optimizers: Whether it applies the steps of another optimizer than SGD. It then keeps the optimizer's arrays, and a
            snapshot for each worker.
        settings: Names of its own settings, as in NAME:KEY=VALUE.
    """

    kind: UpdateKind = "gradient"
    each: tuple[str, ...] = ("snapshot",)
    shared: tuple[str, ...] = ()
    temporaries: int = 0
    by_element: bool = True
    reads_once: bool = False
    optimizers: bool = False
    settings: tuple[str, ...] = ()


RULES = {
    "gem": RuleRow(
        each=("moment", "snapshot"), reads_once=True, optimizers=True,
        settings=("momentum", "kappa", "epsilon", "pi_max", "snapshot", "proxy", "proxy_rate", "against"),
    ),
    "downpour": RuleRow(reads_once=True, optimizers=True),
    "adaptive": RuleRow(reads_once=True, optimizers=True),
    "agn": RuleRow(reads_once=True),
    "aeasgd": RuleRow("delta", temporaries=2, settings=("alpha",)),
    "dcasgd": RuleRow(temporaries=4, settings=("compensation", "mean_square")),
    "fedasync": RuleRow("delta", temporaries=1, settings=("mixing", "staleness", "a", "b")),
    "fedbuff": RuleRow(
        "delta", shared=("gathered",), temporaries=1, by_element=False, settings=("buffer_size", "outer_rate")
    ),
    "ringmaster": RuleRow(by_element=False, reads_once=True, settings=("threshold",)),
    "diloco": RuleRow(
        "delta", shared=("momentum", "gathered"), temporaries=2, settings=("outer_rate", "outer_momentum", "delay", "eager")
    ),
    "dana": RuleRow(each=("moment", "snapshot"), temporaries=1, settings=("momentum",)),
    "rescaled": RuleRow(reads_once=True),
}  # fmt: skip

# The rule gem with each of its proxies.
PROXIES = {
    "momentum": RULES["gem"],
    "nesterov": replace(RULES["gem"], temporaries=1, reads_once=False),
    "adam": replace(RULES["gem"], each=("moment", "square", "snapshot"), temporaries=3, reads_once=False),
    "global": replace(
        RULES["gem"], each=("snapshot",), shared=tuple(f"moment_{number}" for number in range(8)), temporaries=1,
        reads_once=False,
    ),
    "yellowfin": replace(
        RULES["gem"], shared=("mean", "mean_square"), temporaries=3, by_element=False, reads_once=False
    ),
}  # fmt: skip

# The optimizers, and the arrays that the server keeps for each.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": (), "adam": ("first_moment", "second_moment"), "adamw": ("first_moment", "second_moment"),
    "lion": ("first_moment",), "worker": (),
}  # fmt: skip


def row_of(rule: str, proxy: str, optimizer: str) -> RuleRow:
    """The row of a built-in rule with this optimizer; gem with this proxy."""
    if optimizer != "sgd" and RULES[rule].optimizers:
        return RuleRow(shared=OPTIMIZERS[optimizer], reads_once=True)
    return PROXIES[proxy] if rule == "gem" else RULES[rule]
