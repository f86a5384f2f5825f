"""The settings lane_listen and memory_socket of gem-server: the defaults, and the errors for an address that is wrong."""

from __future__ import annotations

import re
import socket

import pytest
from click.testing import CliRunner
from gem_server.cli import main
from gem_server.config import ServerConfig


@pytest.mark.parametrize(
    ("listen", "lane"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50052"),
        ("0.0.0.0:6000", "0.0.0.0:6001"),
        ("[::1]:50051", "[::1]:50052"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("localhost:65535", "localhost:0"),
        ("server.example.org:50052", "server.example.org:50053"),
        ("unix:/tmp/gem.sock", ""),
        ("unix-abstract:gem", ""),
        ("unixes:7", "unixes:8"),
    ],
)
def test_by_default_the_lane_is_at_the_port_after_that_of_grpc(listen: str, lane: str) -> None:
    config = ServerConfig(listen=listen)
    config.validate()
    assert config.lane_address == lane


@pytest.mark.parametrize(
    ("setting", "choice", "config"),
    [
        ("lane_listen", "auto", None), ("lane_listen", "off", ""), ("lane_listen", "0.0.0.0:7000", "0.0.0.0:7000"),
        ("memory_socket", "off", ""), ("memory_socket", "/run/gem", "/run/gem"),
    ],
)  # fmt: skip
def test_the_setting_is_auto_off_or_an_address(setting: str, choice: str, config: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"GEM_{setting.upper()}", choice)
        assert main.make_context("gem-server", []).params[setting] == config


@pytest.mark.parametrize(
    "wrong",
    ["here", "50052", "host:", ":50052", "host:-1", "host:65536", "host:50052x", "unix:/tmp/gem", "unix-abstract:7", "on", " "],
)
def test_a_wrong_address_gives_one_line_that_says_what_to_write(wrong: str) -> None:
    flags = ["--until-stopped", "--listen", "127.0.0.1:0"]
    result = CliRunner().invoke(main, flags, env={"GEM_LANE_LISTEN": wrong})
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"gem-server: can't serve the lane on {wrong!r}: set lane_listen to HOST:PORT, such as 127.0.0.1:50052, or off"
    )


@pytest.mark.parametrize("wrong", ["localhost:99999", "127.0.0.1:65536", "127.0.0.1:123456"])
def test_a_port_that_does_not_exist_is_named_as_the_user_wrote_it(wrong: str) -> None:
    result = CliRunner().invoke(main, ["--until-stopped", "--listen", wrong])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"gem-server: can't listen on {wrong!r}: give --listen HOST:PORT, with a port up to 65535"
    )


def test_an_address_in_use_gives_one_line_that_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        flags = ["--until-stopped", "--listen", "127.0.0.1:0", "--metrics-listen", ""]
        result = CliRunner().invoke(main, flags, env={"GEM_LANE_LISTEN": address})
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert re.match(rf"gem-server: can't listen on {address} for the lane: give another lane_listen HOST:PORT, or off \(", line)
