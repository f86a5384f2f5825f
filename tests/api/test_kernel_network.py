"""The kernel's settings that limit connections: read from a folder, judged, shown by gem-ctl doctor and the server's log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner
from gem_api.process.kernel_network import ADVISED, KernelSetting, kernel_settings
from gem_ctl import doctor
from gem_ctl.cli import main
from kit.logs import captured
from kit.server import config, serving

USUAL = {
    "tcp_slow_start_after_idle": "1\n",
    "tcp_congestion_control": "cubic\n",
    "tcp_available_congestion_control": "reno cubic bbr\n",
    "tcp_rmem": "4096\t131072\t6291456\n",
    "tcp_wmem": "4096\t16384\t4194304\n",
}  # a Linux machine that nobody has tuned
SLOW = KernelSetting("net.ipv4.tcp_slow_start_after_idle", "1", "0", "it begins again")
GOOD = KernelSetting("net.ipv4.tcp_rmem", "1 2 3", "", "it is enough")


def system(folder: Path, **changes: str) -> Path:
    """A folder such as /proc/sys/net."""
    (folder / "ipv4").mkdir()
    for name, text in (USUAL | changes).items():
        (folder / "ipv4" / name).write_text(text)
    return folder


def advice(folder: Path) -> dict[str, str]:
    return {setting.name.removeprefix("net.ipv4."): setting.advice for setting in kernel_settings(folder)}


def test_a_tuned_machine_should_change_nothing(tmp_path: Path) -> None:
    tuned = {"tcp_slow_start_after_idle": "0", "tcp_congestion_control": "bbr", "tcp_wmem": "4096 16384 16777216"}
    assert set(advice(system(tmp_path, **tuned)).values()) == {""}


def test_bbr_never_begins_again_with_few_packets(tmp_path: Path) -> None:
    assert advice(system(tmp_path, tcp_congestion_control="bbr"))["tcp_slow_start_after_idle"] == ""


def test_a_congestion_control_that_is_not_loaded_is_loaded_first(tmp_path: Path) -> None:
    folder = system(tmp_path, tcp_available_congestion_control="reno cubic")
    assert "modprobe tcp_bbr" in advice(folder)["tcp_congestion_control"]


def test_a_buffer_is_judged_by_what_it_allows_a_far_connection(tmp_path: Path) -> None:
    """At 20 ms and 1 Gbit/s, 2.5 MB are under way: twice that is enough."""
    folder = system(tmp_path, tcp_rmem="4096 131072 5000000", tcp_wmem="4096 16384 4999999")
    found = {setting.name[-4:]: setting for setting in kernel_settings(folder)}
    assert (found["rmem"].advice, bool(found["wmem"].advice)) == ("", True)
    assert "1 Gbit/s at a round trip of 20 ms" in found["rmem"].why


@pytest.mark.parametrize("changes", [{"tcp_rmem": "what?"}, {"tcp_rmem": ""}, {"tcp_rmem": "1 2"}])
def test_what_the_system_does_not_have_or_writes_otherwise_is_left_out(changes: dict[str, str], tmp_path: Path) -> None:
    assert kernel_settings(tmp_path) == []
    assert doctor.report(tmp_path).startswith("nothing to check")
    assert advice(system(tmp_path, **changes)).keys() == advice(tmp_path).keys() - {"tcp_rmem"}
    (tmp_path / "ipv4" / "tcp_slow_start_after_idle").unlink()
    assert "tcp_slow_start_after_idle" not in advice(tmp_path)


# -- gem-ctl doctor


def test_the_command_shows_each_setting_its_value_the_advice_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "FOLDER", system(tmp_path))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0
    entries = [" ".join(entry.split()) for entry in done.stdout.split("\n\n")]
    assert [entry.partition(": ")[0] for entry in entries] == [
        "net.ipv4.tcp_slow_start_after_idle = 1 set it to 0",
        "net.ipv4.tcp_congestion_control = cubic set it to bbr, if round trips take more than about 1 ms",
        "net.ipv4.tcp_rmem = 4096 131072 6291456 good",  # 6 MiB: 1.26 Gbit/s at 20 ms
        f"net.ipv4.tcp_wmem = 4096 16384 4194304 set it to 4096 16384 {ADVISED}",  # 4 MiB: 0.84 Gbit/s
    ]
    assert all(setting.why in entry for setting, entry in zip(kernel_settings(tmp_path), entries, strict=True))


# -- the server's log


@pytest.mark.parametrize(
    ("listen", "lane", "found", "named"),
    [
        ("127.0.0.1:0", "0.0.0.0:0", [SLOW, GOOD], [["net.ipv4.tcp_slow_start_after_idle"]]),
        ("127.0.0.1:0", "", [SLOW, GOOD], []),
        ("0.0.0.0:0", "0.0.0.0:0", [GOOD], []),
    ],
)
def test_a_server_that_other_machines_reach_names_in_one_line_what_slows_it_down(
    listen: str, lane: str, found: list[KernelSetting], named: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gem_server.server.kernel_settings", lambda: found)
    with captured(logging.INFO) as lines, serving(config(listen=listen, lane_listen=lane)):
        assert [line["settings"] for line in lines if "gem-ctl doctor" in line["event"]] == named
