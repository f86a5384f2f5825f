"""Command-line options that several commands share, each also an environment variable: flag over environment over default."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, RULES, Declaration, Hyperparameters, flag
from gem_api.process.addresses import server_address
from gem_api.process.logs import FORMATS
from gem_api.process.secret_file import read_token

# What every command passes to click: variables are GEM_ and the option's name, and help shows them.
SETTINGS: dict[str, Any] = {
    "auto_envvar_prefix": "GEM",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}


def _declared_under(heading: str) -> tuple[str, ...]:
    return tuple(name for name, declared in DECLARATIONS.items() if declared.heading == heading)


# The headings of --help and the options under each, in this order.
HEADINGS = {
    "Task": ("task", "data"),
    "Run": (*_declared_under("Run"), "until_stopped", "runs", "evaluate_every", "once", "parameters", "compute_seconds"),
    "Cluster": ("workers", "workers_per_process", "processes", "name", "first_worker", "min_workers", "lease_seconds"),
    "Network": ("server", "listen", "timeout", "give_up_after", "metrics_listen", "memory_socket", "shared_memory", "overlap",
                "gradient_dtype", "theta_dtype"),
    "Durability": ("resume", "durability", "checkpoint_dir", "checkpoint_interval", "checkpoint_keep", "log_limit", "history"),
    "Rule": (*_declared_under("Rule"), "proxy"),
    "Steps of the workers": _declared_under("Steps of the workers"),
    "Schedule of the learning rate": _declared_under("Schedule of the learning rate"),
    "Security": ("tokens", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_client_ca", "max_norm_ratio",
                 "quarantine_after"),
    "Advanced": ("memory_limit", "apply_threads", "threads", "step_seconds", "log_format"),
}  # fmt: skip
_LONGEST_NAME = 30  # where click's own column for options ends


class WithHeadings(click.Command):
    """A command whose --help shows its options under HEADINGS; those without a heading come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = [name for names in HEADINGS.values() for name in names]
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        params.sort(key=lambda param: known.index(param.name) if param.name in known else len(known))
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in params:
            if record := param.get_help_record(ctx):
                sections.setdefault(heading_of(param), []).append(record)
        longest = max(len(option) for records in sections.values() for option, _ in records)
        width = min(longest, _LONGEST_NAME)  # one for all sections, so that their texts begin below each other
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in records])


def heading_of(param: click.Parameter) -> str:
    """What --help shows an option under; "Options" if it has no heading."""
    return next((heading for heading, names in HEADINGS.items() if param.name in names), "Options")


DURABILITIES = ("memory", "snapshot", "log")  # of a server: what survives it


class Number(click.FloatRange):
    """A float in a range; "nan" and "inf" are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class RuleName(click.ParamType[str]):
    """One of RULES, or a user's own rule as "module:Class", which the server looks for."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in RULES and ":" not in value:
            self.fail(
                f"no rule is named {value!r}: choose from {', '.join(RULES)}, or name your own as module:Class", param, ctx
            )
        return str(value)


class ServerAddress(click.ParamType[str]):
    """The address of a server to connect to."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return server_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DERIVED_SHARD_SIZE = "256, or the next multiple of --batch-size"


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
    number: Any = click.IntRange if isinstance(DEFAULTS[name], int) else Number
    return number(low, high, min_open=allowed.gt is not None, max_open=allowed.lt is not None)  # type: ignore[no-any-return]


def _shown_default(name: str) -> str | bool:
    """The default as help shows it; True lets click show it."""
    others = [f"{value:g} with {flag(other)} {word}" for (other, word), value in DECLARATIONS[name].other_defaults.items()]
    return "; ".join([f"{DEFAULTS[name]:g}", *others]) if others else True


until_stopped_option = click.option(
    "--until-stopped",
    is_flag=True,
    default=False,
    show_envvar=True,
    help="Train until the server is stopped, with no limit of epochs or steps: for a training loop that decides "
    "by itself when it ends.",
)


def without_end(settings: Hyperparameters, user_gave: Collection[str]) -> Hyperparameters:
    """The settings of --until-stopped. Raises click.UsageError if the user also set a limit."""
    for name in ("epochs", "steps"):
        if name in user_gave and (limit := getattr(settings, name)):
            raise click.UsageError(f"--until-stopped contradicts --{name} {limit}: leave one of them out, or give --{name} 0")
    return replace(settings, epochs=0, steps=0)


def option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """A click option that shows its environment variable and its default."""
    return click.option(*names, show_envvar=True, **settings)


def hyperparameter_options(**defaults: Any) -> Callable[[Any], Any]:
    """Options for every field of `Hyperparameters`; `defaults`, pairs of a value and its text, replace the fields' own."""

    def decorate(command: Any) -> Any:
        for name, declared in reversed(DECLARATIONS.items()):
            default, shown = defaults.get(name, (DEFAULTS[name], _shown_default(name)))
            kind = _type_of(name, declared)
            command = option(flag(name), type=kind, default=default, show_default=shown, help=declared.help)(command)
        return command

    return decorate


log_format_option = option(
    "--log-format", type=click.Choice(FORMATS), default="text", help="How logs are written to standard error."
)


_FILE = click.Path(dir_okay=False, path_type=Path)
# A token is given as a file: the arguments of a process are everyone's to read.
_CREDENTIALS = (
    ("--token-file", "File with the token that the server asks for, nothing else in it."),
    ("--tls-ca", "Authorities that the server's certificate must come from, PEM; encrypts."),
    ("--tls-cert", "This client's own certificate, PEM, for a server that asks for one."),
    ("--tls-key", "The certificate's private key, PEM."),
)


def credential_options(command: Any) -> Any:
    """Options that identify the client and name the authorities it trusts; `credentials` reads them."""
    for name, help_ in reversed(_CREDENTIALS):
        variable = "GEM_" + name.removeprefix("--").replace("-", "_").upper()
        command = option(name, envvar=variable, type=_FILE, help=help_)(command)
    return command


def credentials(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `gem_client.connect` and `Admin`. Raises click.UsageError where they make no sense."""
    try:
        token = read_token(options["token_file"]) if options["token_file"] is not None else None
    except ValueError as error:
        raise click.UsageError(f"--token-file: {error}") from None
    if (options["tls_cert"] is None) != (options["tls_key"] is None):
        raise click.UsageError("a client certificate needs both --tls-cert and --tls-key")
    return {"token": token, **{name: options[name] for name in ("tls_ca", "tls_cert", "tls_key")}}


def given(context: click.Context) -> set[str]:
    """Names of the parameters that the user gave, by flag or by environment."""
    by_user = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    return {name for name in context.params if context.get_parameter_source(name) in by_user}


def flags(settings: Hyperparameters) -> list[str]:
    """The command-line flags that state these settings."""
    return [f"{flag(name)}={value}" for name, value in vars(settings).items()]
