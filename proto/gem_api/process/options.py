"""Command-line options that several commands share. Each is an environment variable too: a flag wins over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, RULES, Declaration, Hyperparameters, flag
from gem_api.process.addresses import server_address
from gem_api.process.logs import FORMATS, LEVELS
from gem_api.process.secret_file import read_token

# Every command passes these to click. An option's environment variable is GEM_ and its name; help shows it.
SETTINGS: dict[str, Any] = {
    "auto_envvar_prefix": "GEM",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}


def _declared_under(heading: str) -> tuple[str, ...]:
    return tuple(name for name, declared in DECLARATIONS.items() if declared.heading == heading)


# The headings of --help and the options under each, in the order of their first mention.
HEADINGS = {
    "Task": ("task", "data"),
    "Run": ("parameters", "compute_seconds", "epochs", "steps", "until_stopped", *_declared_under("Run"), "runs",
            "evaluate_every", "once"),
    "Cluster": ("servers", "server_spread", "workers", "spread", "slow", "workers_per_process", "processes", "device", "name",
                "first_worker", "min_workers", "lease_seconds", "stopped_status", "on", "ray_address", "resources",
                "working_dir"),
    "Network": ("server", "range", "peers", "listen", "lane_listen", "timeout", "give_up_after", "metrics_listen",
                "memory_socket", "shared_memory", "overlap", "latency", "bandwidth", "gradient_dtype", "theta_dtype"),
    "Durability": ("resume", "durability", "checkpoint_dir", "checkpoint_interval", "checkpoint_keep", "log_limit", "history"),
    "Rule": ("rule", "rule_options", "proxy", *_declared_under("Rule")),
    "Steps of the workers": _declared_under("Steps of the workers"),
    "Schedule of the learning rate": _declared_under("Schedule of the learning rate"),
    "Security": ("tokens", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_client_ca", "max_norm_ratio",
                 "quarantine_after"),
    "Costs": ("commit_seconds", "parameter_seconds", "byte_seconds"),
    "Bounds": ("server_memory", "server_load"),
    "Advanced": ("memory_limit", "apply_threads", "threads", "step_seconds", "turns", "log_format", "log_level"),
}  # fmt: skip
DURABILITIES = ("memory", "snapshot", "log")  # what survives a crash of the server
_MAX_NAME_WIDTH = 30  # where click's own column for options ends


class WithHeadings(click.Command):
    """A command whose --help groups options under HEADINGS; options without a heading come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = [name for names in HEADINGS.values() for name in names]
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        params.sort(key=lambda param: known.index(param.name) if param.name in known else len(known))
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in params:
            if record := param.get_help_record(ctx):
                sections.setdefault(heading_of(param), []).append(record)
        longest = max(len(option) for records in sections.values() for option, _ in records)
        width = min(longest, _MAX_NAME_WIDTH)  # one width for all sections, so that their texts line up
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in records])


def heading_of(param: click.Parameter) -> str:
    """The heading of an option in --help; "Options" if HEADINGS does not list it."""
    return next((heading for heading, names in HEADINGS.items() if param.name in names), "Options")


class Number(click.FloatRange):
    """A finite float in a range; "nan" and "inf" are rejected."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number in a range, called that in help and errors."""

    name = "whole number"


class RuleName(click.ParamType[str]):
    """One of RULES, or a user's own rule as "module:Class", which the server imports."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in RULES and ":" not in value:
            self.fail(f"unknown rule {value!r}: choose one of {', '.join(RULES)}, or name your own as module:Class", param, ctx)
        return str(value)


class ServerAddress(click.ParamType[str]):
    """The address of a server to connect to."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return server_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DERIVED_SHARD_SIZE = "256, or the next multiple of --batch-size; with --batch-variation at least 4 commits"


def _type_of(name: str, declared: Declaration) -> click.ParamType[Any] | None:
    """The click type that accepts what a hyper-parameter declares."""
    allowed = declared.values
    if name == "rule":
        return RuleName()
    if allowed is None:
        return None
    if isinstance(allowed, tuple):
        return click.Choice(allowed)
    low, high = (allowed.ge if allowed.gt is None else allowed.gt), (allowed.le if allowed.lt is None else allowed.lt)
    number: Any = Whole if isinstance(DEFAULTS[name], int) else Number
    return number(low, high, min_open=allowed.gt is not None, max_open=allowed.lt is not None)  # type: ignore[no-any-return]


def _shown_default(name: str) -> str | bool:
    """The default as help shows it; True lets click show it."""
    others = [f"{value:g} with {flag(other)} {word}" for (other, word), value in DECLARATIONS[name].other_defaults.items()]
    return "; ".join([f"{DEFAULTS[name]:g}", *others]) if others else True


def _variable(name: str) -> str:
    return "GEM_" + name.upper().replace("-", "_")


until_stopped_option = click.option(
    "--until-stopped",
    is_flag=True,
    default=False,
    show_envvar=True,
    help="Train without a limit of epochs or steps, until the server is stopped or your own training loop ends.",
)


def without_end(hyperparameters: Hyperparameters, user_gave: Collection[str]) -> Hyperparameters:
    """Removes the limits, as --until-stopped asks. Raises click.UsageError if the user also set one."""
    for name in ("epochs", "steps"):
        if name in user_gave and (limit := getattr(hyperparameters, name)):
            raise click.UsageError(f"--until-stopped contradicts --{name} {limit}: leave one of them out, or give --{name} 0")
    return replace(hyperparameters, epochs=0, steps=0)


def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """A click option that shows its environment variable and its default."""
    return click.option(*names, show_envvar=True, **attributes)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that adds several options."""

    def decorate(command: Any) -> Any:
        for add in reversed(options):  # click lists the option that was added last first
            command = add(command)
        return command

    return decorate


def hyperparameter_options(**defaults: Any) -> Callable[[Any], Any]:
    """Adds an option for every hyper-parameter. `defaults` replaces a default by a pair: the value, and its text for --help."""
    shown = {name: defaults.get(name, (DEFAULTS[name], _shown_default(name))) for name in DECLARATIONS}
    return together(*(_hyperparameter_option(name, *default) for name, default in shown.items()))


def _hyperparameter_option(name: str, default: Any, shown_default: str | bool) -> Callable[[Any], Any]:
    declared = DECLARATIONS[name]
    return option(flag(name), type=_type_of(name, declared), default=default, show_default=shown_default, help=declared.help)


log_level_option = option("--log-level", type=click.Choice(LEVELS), default="info", help="Least important log lines to write.")
# Every process that logs has these.
log_options = together(
    option("--log-format", type=click.Choice(FORMATS), default="text", help="Format of the logs on standard error."),
    log_level_option,
)


_FILE = click.Path(dir_okay=False, path_type=Path)


def _credential_option(name: str, help_: str) -> Callable[[Any], Any]:
    return option(name, envvar=_variable(name.removeprefix("--")), type=_FILE, help=help_)


# Identify the client, and name the authorities that it trusts; `credentials` reads them.
credential_options = together(
    # A file, because every user of the machine can read a process's arguments.
    _credential_option("--token-file", "File that holds only the bearer token for the server."),
    _credential_option("--tls-ca", "PEM file of the certificate authorities to trust for the server. Turns on TLS."),
    _credential_option("--tls-cert", "PEM file of this client's certificate, for servers that require one (mutual TLS)."),
    _credential_option("--tls-key", "PEM file of the private key of --tls-cert."),
)


def credentials(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `gem_client.connect` and `Admin`. Raises click.UsageError if they are unusable."""
    try:
        token = read_token(options["token_file"]) if options["token_file"] is not None else None
    except ValueError as error:
        raise click.UsageError(f"--token-file: {error}") from None
    if (options["tls_cert"] is None) != (options["tls_key"] is None):
        raise click.UsageError("a client certificate needs both --tls-cert and --tls-key")
    return {"token": token, **{name: options[name] for name in ("tls_ca", "tls_cert", "tls_key")}}


def given(context: click.Context) -> set[str]:
    """The names of the options that the user gave, as flags or environment variables."""
    by_user = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    return {name for name in context.params if context.get_parameter_source(name) in by_user}


def flags(hyperparameters: Hyperparameters) -> list[str]:
    """The command-line flags for these hyper-parameters."""
    return [f"{flag(name)}={value}" for name, value in vars(hyperparameters).items()]
