"""Which run a report shows, and when that run began and ended."""

from __future__ import annotations

from typing import Any

import pytest
from ctl.fake_prometheus import BEGIN, NOW, SETTINGS, FakePrometheus, found
from gem_ctl.prometheus import PrometheusError

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


def about(at: float) -> Any:
    """A time on which a run may begin or end as well: no look at a whole day is sharper than this."""
    return pytest.approx(at, rel=0, abs=10)


def test_the_newest_of_several_runs_is_chosen(fake: FakePrometheus) -> None:
    for number, run_id in enumerate(["first", "last", "middle"]):
        fake.has_run(run_id, begin=BEGIN + 600 * (0, 2, 1)[number], seconds=500)
    assert found(fake).run_id == "last"


def test_of_two_runs_that_go_on_the_one_that_began_last_is_chosen(fake: FakePrometheus) -> None:
    fake.has_run("older", "a:1", NOW - 600, 600)
    fake.has_run("newer", "b:1", NOW - 300, 300)
    assert (found(fake).run_id, found(fake).instance) == ("newer", "b:1")


def test_a_run_can_be_asked_for(fake: FakePrometheus) -> None:
    fake.has_run("old", seconds=500)
    fake.has_run("new", begin=BEGIN + 600)
    run = found(fake, "old")
    assert (run.run_id, run.begin, run.end) == ("old", about(BEGIN), about(BEGIN + 500))


def test_a_run_that_is_unknown_is_refused_with_those_that_are_known(fake: FakePrometheus) -> None:
    fake.has_run("b")
    fake.has_run("a")
    with pytest.raises(PrometheusError, match=r"no run 'c', only a, b"):
        found(fake, "c")


def test_where_no_server_was_seen_it_is_said_where_to_look(fake: FakePrometheus) -> None:
    with pytest.raises(PrometheusError, match=r"last 24:00:00\. Does it scrape gem-server\? Use --last"):
        found(fake)


def test_what_a_run_is_called_and_where_it_ran_are_no_settings(fake: FakePrometheus) -> None:
    fake.has_run("one", "host:1")
    run = found(fake)
    assert (run.run_id, run.instance, run.settings) == ("one", "host:1", SETTINGS)


def test_what_prometheuss_configuration_adds_to_a_target_is_no_setting(fake: FakePrometheus) -> None:
    target = {"run": "ml/digits", "namespace": "ml", "pod": "digits-gem-server-0", "cluster": "a"}
    fake.has_run("one", "ml/digits-gem-server-0", BEGIN, 600, **target)
    fake.vectors["up{"] = [({"__name__": "up", "job": "gem-server", "instance": "ml/digits-gem-server-0", **target}, "1")]
    run = found(fake)
    assert (run.settings, run.target) == (SETTINGS, target)


def test_a_resumed_run_is_one_run_with_the_settings_that_it_has_now(fake: FakePrometheus) -> None:
    fake.has_run("one", learning_rate="0.1", seconds=300)
    fake.has_run("one", learning_rate="0.01", begin=BEGIN + 400, seconds=300)
    run = found(fake)
    assert (run.settings["learning_rate"], run.begin, run.end) == ("0.01", about(BEGIN), about(BEGIN + 700))


def test_a_server_that_idles_after_its_run_is_not_looked_at(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=3000)
    fake.holds("gem_central_version", {"instance": "server:9464"}, [*range(100), *[99] * 400])
    assert found(fake).end == about(BEGIN + 99 * 5 + 30)


def test_a_run_that_goes_on_ends_where_it_was_last_seen(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=600)
    fake.holds("gem_central_version", {"instance": "server:9464"}, range(121))
    assert found(fake).end == about(BEGIN + 600)


def test_a_run_without_commits_is_shown_whole(fake: FakePrometheus) -> None:
    fake.has_run("one", seconds=600)
    fake.holds("gem_central_version", {"instance": "server:9464"}, [0] * 121)
    assert found(fake).end == about(BEGIN + 600)


def test_only_the_runs_own_server_is_asked_for_its_last_commit(fake: FakePrometheus) -> None:
    fake.has_run("here", "a:1")
    fake.has_run("there", "b:1")
    fake.holds('gem_central_version{instance="a:1"}', {}, [*range(10), *[9] * 111])
    fake.holds('gem_central_version{instance="b:1"}', {}, range(121))
    assert found(fake, "here").end == about(BEGIN + 45 + 30)
    assert found(fake, "there").end == about(BEGIN + 600)


def test_the_same_run_id_on_two_servers_is_two_runs(fake: FakePrometheus) -> None:
    """As where a checkpoint was copied to another machine."""
    fake.has_run("one", "a:1", seconds=300)
    fake.has_run("one", "b:1", begin=BEGIN + 400, seconds=300)
    assert (found(fake).instance, found(fake).begin) == ("b:1", about(BEGIN + 400))


@pytest.mark.parametrize("last", [36.0, 3600.0, 86400.0, 30 * 86400.0, 3650 * 86400.0])
def test_however_far_one_looks_back_prometheus_gives_that_many_points(fake: FakePrometheus, last: float) -> None:
    fake.has_run("one", begin=NOW - 30, seconds=30)
    assert found(fake, last=last).run_id == "one"
    for arguments in (arguments for what, arguments in fake.asked if what == "query_range"):
        points = (float(arguments["end"]) - float(arguments["start"])) / float(arguments["step"])
        assert points <= 10_999
        assert float(arguments["step"]) >= 1


def test_a_run_of_several_servers_is_that_of_range_0(fake: FakePrometheus) -> None:
    for number, instance in enumerate(["lead:1", "peer:1", "other:1"]):
        fake.has_run("one", instance, BEGIN + 60 * number, 600, range=str(number))
    run = found(fake)
    assert (run.run_id, run.instance, run.settings) == ("one", "lead:1", SETTINGS)
    assert run.ranges == {0: "lead:1", 1: "peer:1", 2: "other:1"}
    assert run.servers == {"lead:1", "peer:1", "other:1"}


def test_a_range_that_has_moved_is_where_it_is_now(fake: FakePrometheus) -> None:
    fake.has_run("one", "lead:1", range="0")
    fake.has_run("one", "new:1", BEGIN + 300, 300, range="1")
    fake.has_run("one", "old:1", BEGIN, 300, range="1")
    assert found(fake).ranges == {0: "lead:1", 1: "new:1"}


def test_a_run_whose_lead_is_not_scraped_is_that_of_another_range(fake: FakePrometheus) -> None:
    fake.has_run("one", "peer:1", range="1")
    assert (found(fake).instance, found(fake).ranges) == ("peer:1", {1: "peer:1"})


@pytest.mark.parametrize("odd", ["", "x", "-1", "²", "99999999"])
def test_a_range_that_is_no_number_is_none(fake: FakePrometheus, odd: str) -> None:
    fake.has_run("one", "lead:1", range=odd)
    assert found(fake).ranges == {}
