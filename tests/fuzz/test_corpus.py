"""Replays the fuzzer's corpus, and bytes damaged by a seed: the readers accept or reject any bytes, and do nothing else.

`make fuzz` looks for more.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from fuzz.mutations import mutated, with_another_value
from fuzz.targets import NEXT_RECORD, PAYLOAD, TARGETS

CORPUS = Path(__file__).parent / "corpus"
MUTATIONS = {"frame": 5000, "segment": 2000, "log": 2000, "state": 2000, "model": 1000, "workers": 1000}
GROUPS = 8  # of the mutations of a target: one is tried by default, all with `make test-slow`


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzer_once_reached_is_still_read_or_refused(name: str) -> None:
    paths = sorted((CORPUS / name).iterdir())
    assert paths, "no corpus: see `make fuzz`"
    for path in paths:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_read(name: str) -> None:
    """Or all that is refused below might be refused for nothing."""
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("group", [0, *(pytest.param(group, marks=pytest.mark.slow) for group in range(1, GROUPS))])
@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_read_or_refused(name: str, group: int) -> None:
    target = TARGETS[name]
    seeds, outcomes = target.seeds(), Counter[str]()
    for number in range(group, MUTATIONS[name], GROUPS):
        data = damaged(random.Random(f"{name}-{number}"), name, seeds)
        try:
            target.run(data)
            outcomes["read"] += 1
        except target.refusals:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of {name}: {data!r}") from error
    assert min(outcomes["read"], outcomes["refused"]) > 0, outcomes


def damaged(dice: random.Random, name: str, seeds: list[bytes]) -> bytes:
    """One of the seeds, damaged; where it holds JSON, often so that it is still JSON."""
    seed = dice.choice(seeds)
    if name == "state" and dice.random() < 0.7:
        return with_another_value(dice, seed)
    if name == "log" and dice.random() < 0.7:
        records = seed.split(NEXT_RECORD)
        at = dice.randrange(len(records))
        text, mark, payload = records[at].partition(PAYLOAD)
        records[at] = with_another_value(dice, text) + mark + payload
        return NEXT_RECORD.join(records)
    return mutated(dice, seed)
