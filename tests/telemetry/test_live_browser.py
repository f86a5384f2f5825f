"""The live page in a real browser: what it shows, on a wide screen and on a phone, without errors."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.range_helpers import large_model, ranges
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import connect
from gem_server.telemetry.live_page import MAX_WORKERS
from kit.ports import free_address
from kit.process import server_process
from kit.raw_client import SMALL, Wire, wired
from kit.server import Live, config, serving, wait_until
from kit.settings import configured
from telemetry.browser import BROWSER, NAMES, Browser

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"needs a Chromium: none of {', '.join(NAMES)} is installed"),
    pytest.mark.timeout(600),
]
HOSTILE = '<img src=x onerror="document.title=1">'
LONG = "a-very-long-name-" + "x" * 100
WIDE, PHONE = 1440, 360
VISITS = itertools.count()
CONNECTED = "!['connecting', undefined].includes(document.getElementById('state')?.textContent)"
NOTICE = "document.getElementById('notice')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def idle() -> Iterator[Live]:
    """A server that nobody has joined."""
    with serving(config(metrics_listen="127.0.0.1:0")) as live:
        yield live


def url(live: Live) -> str:
    """An address of the page that the browser has not opened before."""
    return f"http://{live.server.wiring.endpoint.http_address}/?{next(VISITS)}"


def open_page(browser: Browser, address: str, width: int) -> None:
    browser.errors.clear()
    browser.open(address, width)
    browser.until(f"location.href === '{address}' && {CONNECTED}")


def train(wire: Wire, names: list[str], commits: int = 6, loss: float = 0.4375) -> None:
    """Workers that commit in turns, and an evaluation."""
    workers = [wire.started(names[0]), *(wire.join(name) for name in names[1:])]
    for worker in workers[1:]:
        worker.pull()
    for number in range(commits):
        worker = workers[number % len(workers)]
        worker.took(wire.whole("Commit", worker.header(loss=loss), *worker.body()).answer(SMALL.size))
    wire.call("ReportEvaluation", pb.ReportEvaluationRequest(version=commits, loss=0.25, accuracy=0.8125))


def scrolls_sideways(browser: Browser) -> bool:
    return bool(browser.look("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_page_shows_the_run_and_fits_the_screen(width: int, browser: Browser) -> None:
    settings = Hyperparameters(learning_rate=0.03, epochs=7)
    with serving(config(settings, metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        train(wire, ["ann", "bob", LONG, HOSTILE])
        open_page(browser, url(live), width)
        browser.until("document.body.innerText.includes('81.25 %')")
        text = browser.text()
        assert browser.look("limits(CHARTS[1], [[0.8125]]).slice(0, 2)") == [0, 1], "of a single evaluation"
        for shown in (
            "training", f"run {live.core.run_id}", "rule gem", "optimizer sgd", "η 0.03", "epoch 1 of 7", "0.4375", "81.25 %",
            "Workers: 4", "ann", "bob", "Median π", "Staleness τ", "Commits per second", "training time, min:s",
        ):  # fmt: skip
            assert shown in text, f"{shown!r} is missing in:\n{text}"
        assert browser.look("[...document.querySelectorAll('#facts dd')][0].textContent") == "6"
        assert browser.look("[...document.querySelectorAll('thead th')].at(-2).textContent") == "via"
        assert browser.look("[...document.querySelectorAll('#workers td')].at(-2).textContent") == "grpc"
        assert HOSTILE in browser.look("document.getElementById('workers').textContent")
        assert browser.look("document.images.length") == 0, "a name from the network became a part of the page"
        assert browser.look("document.title") == f"training · run {live.core.run_id} · 81.25 % · GEM"
        heads = browser.look("[...document.querySelectorAll('thead th')].map(cell => cell.textContent)")
        assert heads[3:5] == ["median π, smoothed", "training loss"]
        assert browser.look(f"[...document.querySelectorAll('td')].some(cell => cell.title === '{LONG}')")
        assert not scrolls_sideways(browser)
        assert browser.look("document.querySelectorAll('#charts polyline').length") >= 5
        assert browser.look("document.querySelectorAll('#charts svg').length") == 6, "a server has no curves of energies"
        assert browser.errors == []


def test_the_strip_of_facts_stays_one_row_at_1280_pixels_whatever_it_shows(browser: Browser, idle: Live) -> None:
    """Long values widen their column. Sizes have the units of `gem-ctl status`."""
    long = {
        "version": 123_456_789, "memory_bytes": 1023.4 * 2**20, "memory_limit_bytes": 1001 * 2**30, "learning_rate": None,
        "commits": {"rejected": 123_456, "discarded": 12_345}, "nonfinite_losses": 123_456,
        "checkpoint_version": 1, "checkpoint_age_seconds": 4000,
    }  # fmt: skip
    open_page(browser, url(idle), 1280)
    box = "row.getBoundingClientRect()"
    rows = f"[...document.querySelectorAll('#facts div')].map(row => [row.lastChild.textContent, {box}.top, {box}.height])"
    values, tops, heights = zip(*browser.look(f"facts({{ ...data, ...{json.dumps(long)} }}), {rows}"), strict=True)
    assert values[3:6] == ("! 123,456, 12,345 discarded", "67 min ago", "1023 MiB of 1001 GiB")
    assert len(set(tops)) == 1
    assert max(heights) < 45, "a value wraps"
    assert not scrolls_sideways(browser)
    sizes = browser.look("[0, 1023, 1024, 8.126 * 1024 ** 2, 5 * 1024 ** 4, 2 ** 53].map(bytes)")
    assert sizes == ["0 B", "1023 B", "1 KiB", "8.13 MiB", "5 TiB", "8192 TiB"]


def test_the_tab_shows_the_run_and_its_state_by_its_title_and_its_icon(browser: Browser, idle: Live) -> None:
    open_page(browser, url(idle), WIDE)
    run = idle.core.run_id
    assert browser.look("document.title") == f"waiting · run {run} · GEM"
    icon = "document.getElementById('icon').href"
    icons = [browser.look(f"tab('{state}'), {icon}") for state in ("waiting", "training", "complete", "no answer")]
    assert len(set(icons)) == 4
    assert all(icon.startswith("data:image/svg+xml,") for icon in icons)
    assert browser.look(f"data.run_id = 'ffffff', tab('waiting'), {icon}") not in icons, "another run has another colour"
    assert browser.errors == []


def test_the_entries_of_a_legend_stand_apart(browser: Browser, idle: Live) -> None:
    open_page(browser, url(idle), PHONE)
    notes = "[...document.querySelectorAll('figcaption .quiet')].map(note => [...note.children])"
    pair = "([one, other]) => other.getBoundingClientRect().left - one.getBoundingClientRect().right"
    gaps = browser.look(f"{notes}.filter(entries => entries.length > 1).map({pair})")
    assert gaps
    assert min(gaps) >= 12
    assert browser.look("[...document.querySelectorAll('figcaption *')].every(one => one.scrollWidth <= one.clientWidth)")


def test_a_server_of_several_says_which_range_it_holds_and_where_the_others_are(browser: Browser, tmp_path: Path) -> None:
    with ranges(tmp_path, 2, metrics_listen="127.0.0.1:0") as run, connect(run.address, name="ann") as session:
        session.join(large_model())
        leader, peer = run.lives
        open_page(browser, url(leader), WIDE)
        text = browser.look("document.getElementById('ranges').textContent")
        assert text.startswith("Range 0 of 2: 4,096 parameters. This server leads; the others: " + peer.address)
        open_page(browser, url(peer), PHONE)
        assert "server of range 0 shows the run" in browser.look("document.getElementById('ranges').textContent")
        assert not scrolls_sideways(browser)
    assert browser.errors == []


def test_an_empty_run_says_what_it_waits_for(browser: Browser, idle: Live) -> None:
    open_page(browser, url(idle), PHONE)
    text = browser.text()
    for shown in ("waiting", "No workers: waiting for them to join", "no commits yet"):
        assert shown in text
    assert "NaN" not in text.replace("Training loss NaN", "")
    assert "undefined" not in text
    assert (browser.errors, scrolls_sideways(browser)) == ([], False)


def test_the_page_says_how_long_the_run_still_takes(browser: Browser, idle: Live) -> None:
    open_page(browser, url(idle), WIDE)
    shards = {"epoch": 1, "epochs": 4, "completed": 5, "leased": 1, "pending": 2}
    curves = "{ ...data.curves, commits_per_second: [null, 9, 11] }"

    def epoch(**more: object) -> object:
        run = json.dumps({"state": "RUN_STATE_TRAINING", "version": 500, "shards": shards, **more})
        return browser.look(
            f"progress({{ ...data, ...{run}, curves: {curves} }}), document.getElementById('epoch').textContent"
        )

    assert epoch() == "epoch 2 of 4 · 31 % · about 2 min left"  # 1,100 commits at 10 a second
    assert epoch(state="RUN_STATE_COMPLETE") == "epoch 2 of 4 · 31 %"
    assert epoch(shards=shards | {"completed": 0, "pending": 7}) == "epoch 2 of 4 · 0 %"
    assert epoch(shards=shards | {"epochs": 0}) == "epoch 2, no limit"
    assert browser.errors == []


def test_the_axis_of_a_loss_that_falls_far_is_logarithmic(browser: Browser, idle: Live) -> None:
    open_page(browser, url(idle), WIDE)
    loss = "[...CHARTS[0].svg.querySelectorAll('text')].map(text => text.textContent)"

    def drawn(*values: float) -> list[str]:
        return list(browser.look(f"data.curves = {{ seconds: [1, 2], loss: {list(values)} }}, draw(CHARTS[0]), {loss}"))

    assert drawn(2.5, 0.02)[:6] == ["0.01", "0.03", "0.1", "0.3", "1", "3"]
    assert "logarithmic scale" in drawn(2.5, 0.02)
    assert drawn(5e5, 0.002)[:5] == ["0.001", "0.1", "10", "1000", "1e+5"]
    assert drawn(2.5, 0.5)[:4] == ["0", "1", "2", "3"]
    assert "logarithmic scale" not in drawn(2.5, 0) + drawn(2.5, -0.01) + drawn(2.5, 0.5)
    assert browser.errors == []


def test_a_complete_run_keeps_the_last_rows_of_its_workers(browser: Browser) -> None:
    with serving(config(metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        ann = wire.started("ann")
        shard = wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=ann.lease_id, sample_count=64)).shard
        wire.call("CompleteShard", pb.CompleteShardRequest(lease_id=ann.lease_id, shard_id=shard.shard_id))
        open_page(browser, url(live), WIDE)
        browser.until("document.body.innerText.includes('Workers: 1')")
        ann.leave()
        browser.until("document.body.innerText.includes('Workers: all have left')")
        assert browser.look("document.getElementById('workers').textContent").startswith("ann")
        assert "complete" in browser.text()
        assert browser.errors == []


def test_nan_losses_are_counted_and_marked(browser: Browser) -> None:
    with serving(config(metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        train(wire, ["ann"], commits=3, loss=math.nan)
        open_page(browser, url(live), WIDE)
        browser.until("document.querySelector('#facts .bad')?.textContent === '! 3'")
        assert "none reported yet" in browser.text() or "no commits yet" in browser.text()
        assert browser.errors == []


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_page_follows_the_run_by_itself_and_nothing_jumps(width: int, browser: Browser) -> None:
    tops = "['epoch', 'charts', 'joined'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    with serving(config(metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        server_url, endpoint = url(live), live.server.wiring.endpoint
        shown, endpoint._page._read = endpoint._page._read, None  # as while the server starts
        browser.errors.clear()
        browser.open(server_url, width)
        browser.until(f"location.href === '{server_url}' && {NOTICE}?.textContent.includes('starting')")
        before = browser.look(tops)
        endpoint._page._read = shown
        browser.until(CONNECTED)
        assert browser.look(tops) == before, "the layout jumped at the first status"
        train(wire, ["ann"])
        browser.until("document.body.innerText.includes('81.25 %')")
        assert browser.look(tops) == before, "the layout jumped at the first commits"


def test_many_workers_are_cut_short_and_the_page_says_how_many_more(browser: Browser) -> None:
    with serving(config(metrics_listen="127.0.0.1:0")) as live, wired(live) as wire:
        for number in range(MAX_WORKERS + 15):
            wire.join(f"worker-{number}")
        open_page(browser, url(live), PHONE)
        browser.until(f"document.getElementById('joined').textContent === 'Workers: {MAX_WORKERS + 15}'")
        assert browser.look("document.getElementById('workers').children.length") == MAX_WORKERS
        assert "and 15 more" in browser.text()
        names = browser.look("[...document.querySelectorAll('#workers td:first-child')].map(cell => cell.textContent)")
        assert names[:3] == ["worker-0", "worker-1", "worker-2"]


@pytest.mark.long
def test_after_a_kill_the_page_goes_on_with_its_curve(browser: Browser, tmp_path: Path) -> None:
    address, http, history = free_address(), free_address(), tmp_path / "history.csv"
    flags = (
        "--listen", address, "--metrics-listen", http, configured(lane_listen="127.0.0.1:0"), "--durability", "log",
        "--checkpoint-dir", str(tmp_path / "checkpoints"), "--history", str(history), "--resume",
    )  # fmt: skip
    with server_process(tmp_path / "first", *flags) as server:
        wire = Wire(server.address)
        open_page(browser, f"http://{http}/", WIDE)
        train(wire, ["ann"])
        wire.close()
        browser.until("document.body.innerText.includes('81.25 %')")
        wait_until(lambda: len(history.read_text().splitlines()) == 7, "the history, which is written every second")
    browser.until(f"!{NOTICE}.hidden && {NOTICE}.textContent === 'Server not reachable, retrying …'")
    assert "81.25 %" in browser.text(), "the last state must stay on the page"
    assert browser.look("document.title").startswith("no answer · run ")
    with server_process(tmp_path / "second", *flags) as server:
        assert server.address
        browser.until(f"{NOTICE}.hidden && data.start_version === 6")
        assert browser.look("data.curves.loss.filter(known).length") >= 1
        assert "0.4375" in browser.text(), "the loss from before the kill must still be on the curve"
        assert "The server resumed the run at version 6" in browser.text()
