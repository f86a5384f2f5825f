"""Command-line options that several commands share. Each is an environment variable and a key of the settings file too."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, Declaration, Hyperparameters, flag
from gem_api.named_settings import NAMES, parse, written
from gem_api.process.addresses import server_address
from gem_api.process.secret_file import read_token
from gem_api.process.settings_file import Setting, as_text, instead, key, misplaced, setting, warn_of_unknown_variables

# Every command passes these to click. An option's environment variable is GEM_ and its name.
SETTINGS: dict[str, Any] = {
    "auto_envvar_prefix": "GEM",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}


def _declared_under(heading: str) -> tuple[str, ...]:
    return tuple(name for name, declared in DECLARATIONS.items() if declared.heading == heading and not declared.option)


# The headings of --help and the options under each. An option is under the first heading that lists it.
HEADINGS = {
    "Most used": ("parameters", "compute_seconds", "server", "task", "data", "workers", "epochs", "steps", "batch_size",
                  "learning_rate", "optimizer", "device", "listen", "checkpoint_dir", "resume", "config"),
    "Run": ("until_stopped", *_declared_under("Run"), "runs", "evaluate_every", "once"),
    "Cluster": ("servers", "server_spread", "spread", "slow", "workers_per_process", "processes", "name", "first_worker",
                "min_workers", "lease_seconds", "stopped_status", "on", "ray_address", "ray_labels", "ray_spread",
                "resources", "working_dir"),
    "Network": ("range", "peers", "lane_listen", "timeout", "give_up_after", "metrics_listen", "memory_socket",
                "shared_memory", "overlap", "latency", "bandwidth", "gradient_dtype", "theta_dtype"),
    "Durability": ("durability", "checkpoint_interval", "checkpoint_keep", "log_limit", "history"),
    "Rule": ("rule", *_declared_under("Rule")),
    "Steps of the workers": _declared_under("Steps of the workers"),
    "Security": ("tokens", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_client_ca", "max_norm_ratio",
                 "quarantine_after"),
    "Costs": ("commit_seconds", "parameter_seconds", "byte_seconds"),
    "Bounds": ("server_memory", "server_load"),
    "Advanced": ("memory_limit", "apply_threads", "threads", "step_seconds", "turns", "log_format", "log_level"),
}  # fmt: skip
DURABILITIES = ("memory", "snapshot", "log")  # what survives a crash of the server
_MAX_NAME_WIDTH = 30  # where click's own column for options ends


@contextmanager
def no_false_abort() -> Iterator[None]:
    """Around what a command does. click takes an EOFError for the end of the user's input, and prints "Aborted!". But no
    command asks for input, and a file that was cut raises it too."""
    try:
        yield
    except EOFError as error:
        raise RuntimeError(f"something that was read ended too early: {error}") from error


class WithHeadings(click.Command):
    """A command with --config, whose --help groups options under HEADINGS; options without a heading come last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Says what to write instead of an option, or of a variable of the environment, that is a setting now. Warns of
        variables that set nothing."""
        warn_of_unknown_variables()
        if hint := misplaced(self):
            raise click.UsageError(hint, ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if hint := instead(self, error.option_name):
                raise click.UsageError(hint, ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with no_false_abort():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = [name for names in HEADINGS.values() for name in names]
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        params.sort(key=lambda param: known.index(param.name) if param.name in known else len(known))
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in params:
            if record := param.get_help_record(ctx):
                sections.setdefault(heading_of(param), []).append((record[0], _help(param, ctx)))
        longest = max(len(option) for records in sections.values() for option, _ in records)
        width = min(longest, _MAX_NAME_WIDTH)  # one width for all sections, so that their texts line up
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in records])
        if names := [key(param) for param in self.get_params(ctx) if isinstance(param, Setting)]:
            with formatter.section("Settings without an option, for --config and the environment (docs/settings.md)"):
                formatter.write_text(", ".join(sorted(names)))


def _help(param: click.Option, ctx: click.Context) -> str:
    """What --help says about an option: its default too, and its environment variables if they are not named like it."""
    extra = param.get_help_extra(ctx)
    notes = [f"default: {extra['default'].strip('()')}"] if extra.get("default", '""') != '""' else []
    if param.required:
        notes.append("required")
    variables = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    if set(variables) - {f"{ctx.auto_envvar_prefix}_{param.opts[0].lstrip('-').replace('-', '_').upper()}"}:
        notes.append(f"environment: {', '.join(variables)}")
    return (param.help or "") + f"  [{'; '.join(notes)}]" * bool(notes)


def heading_of(param: click.Parameter) -> str:
    """The heading of an option in --help; "Options" if HEADINGS does not list it."""
    return next((heading for heading, names in HEADINGS.items() if param.name in names), "Options")


class Number(click.FloatRange):
    """A finite float in a range; "nan" and "inf" are rejected."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number in a range, called that in help and errors."""

    name = "whole number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


class Named(click.ParamType[dict[str, Any]]):
    """A name and its settings, as `gem_api.named_settings` reads them: the value is the hyper-parameters that they set."""

    def __init__(self, option: str) -> None:
        self.option = option
        self.name = f"{option}[:key=value,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            return parse(self.option, value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ServerAddress(click.ParamType[str]):
    """The address of a server to connect to."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return server_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DERIVED_SHARD_SIZE = "256, or the next multiple of --batch-size; with batch_variation at least 4 commits"


def _type_of(name: str, declared: Declaration) -> click.ParamType[Any] | None:
    """The click type that accepts what a hyper-parameter declares."""
    allowed = declared.values
    if name in NAMES:
        return Named(name)
    if allowed is None:
        return None
    if isinstance(allowed, tuple):
        return click.Choice(allowed)
    low, high = (allowed.ge if allowed.gt is None else allowed.gt), (allowed.le if allowed.lt is None else allowed.lt)
    number: Any = Whole if isinstance(DEFAULTS[name], int) else Number
    return number(low, high, min_open=allowed.gt is not None, max_open=allowed.lt is not None)  # type: ignore[no-any-return]


def _shown_default(name: str) -> str | bool:
    """The default as help shows it; True lets click show it."""
    declared = DECLARATIONS[name].other_defaults
    others = [f"{value:g} with {_in_words(other, word)}" for (other, word), value in declared.items()]
    return "; ".join([f"{DEFAULTS[name]:g}", *others]) if others else True


def _in_words(name: str, word: str) -> str:
    return f"--rule gem:{word}" if name == "rule_options" else f"{flag(name)} {word}"


until_stopped_option = click.option(
    "--until-stopped",
    is_flag=True,
    default=False,
    help="Train without a limit of epochs or steps, until the server is stopped or your own training loop ends.",
)


def without_end(hyperparameters: Hyperparameters, user_gave: Collection[str]) -> Hyperparameters:
    """Removes the limits, as --until-stopped asks. Raises click.UsageError if the user also set one."""
    for name in ("epochs", "steps"):
        if name in user_gave and (limit := getattr(hyperparameters, name)):
            raise click.UsageError(f"--until-stopped contradicts --{name} {limit}: leave one of them out, or give --{name} 0")
    return replace(hyperparameters, epochs=0, steps=0)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that adds several options."""

    def decorate(command: Any) -> Any:
        for add in reversed(options):  # click lists the option that was added last first
            command = add(command)
        return command

    return decorate


def hyperparameter_options(**defaults: Any) -> Callable[[Any], Any]:
    """Adds an option, or a setting without one, for every hyper-parameter that is not a setting of another option. `expanded`
    reads them. `defaults` replaces a default by a pair: the value, and its text for --help."""
    own = [name for name, declared in DECLARATIONS.items() if not declared.option]
    shown = {name: defaults.get(name, (DEFAULTS[name], _shown_default(name))) for name in own}
    return together(*(_hyperparameter_option(name, *default) for name, default in shown.items()))


def _hyperparameter_option(name: str, default: Any, shown_default: str | bool) -> Callable[[Any], Any]:
    declared = DECLARATIONS[name]
    add = click.option if declared.flag else setting
    return add(flag(name), type=_type_of(name, declared), default=default, show_default=shown_default, help=declared.help)


def expanded(context: click.Context) -> tuple[dict[str, Any], set[str]]:
    """The options of a command with `hyperparameter_options`, with every hyper-parameter under its own name, and the names of
    those that the user gave."""
    options, user_gave = dict(context.params), given(context)
    for name in NAMES:
        values = options.pop(name)
        if name in user_gave:
            user_gave |= values.keys()
        options |= {each: DEFAULTS[each] for each, declared in DECLARATIONS.items() if declared.option == name} | values
    return options, user_gave


LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
log_level_option = click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", help="Least important log lines to write."
)
# Every process that logs has these.
log_options = together(
    setting("log_format", type=click.Choice(LOG_FORMATS), default="text", help="Format of the logs on standard error."),
    log_level_option,
)


_FILE = click.Path(dir_okay=False, path_type=Path)


# Identify the client, and name the authorities that it trusts; `credentials` reads them.
credential_options = together(
    # A file, because every user of the machine can read a process's arguments.
    click.option(
        "--token-file", envvar="GEM_TOKEN_FILE", type=_FILE, help="File that holds only the bearer token for the server."
    ),
    click.option(
        "--tls-ca",
        envvar="GEM_TLS_CA",
        type=_FILE,
        help="PEM file of the certificate authorities to trust for the server. Turns on TLS.",
    ),
    setting("tls_cert", type=_FILE, help="PEM file of this client's certificate, for servers that require one (mutual TLS)."),
    setting("tls_key", type=_FILE, help="PEM file of the private key of the client's certificate."),
)


def credentials(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `gem_client.connect` and `Admin`. Raises click.UsageError if they are unusable."""
    try:
        token = read_token(options["token_file"]) if options["token_file"] is not None else None
    except ValueError as error:
        raise click.UsageError(f"--token-file: {error}") from None
    if (options["tls_cert"] is None) != (options["tls_key"] is None):
        raise click.UsageError("a client certificate needs both tls_cert and tls_key")
    return {"token": token, **{name: options[name] for name in ("tls_ca", "tls_cert", "tls_key")}}


def given(context: click.Context) -> set[str]:
    """The names of the options that the user gave: on the command line, in the environment, or in the file of --config."""
    by_default = (click.core.ParameterSource.DEFAULT, None)
    return {name for name in context.params if context.get_parameter_source(name) not in by_default}


def flags(hyperparameters: Hyperparameters) -> list[str]:
    """The command-line flags for these hyper-parameters, without those that have no option; see `settings_without_flags`."""
    values = vars(hyperparameters) | written(hyperparameters)
    return [f"{flag(name)}={values[name]}" for name, each in DECLARATIONS.items() if each.flag and not each.option]


def settings_without_flags(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """The hyper-parameters that have no option, by their keys."""
    return {name: getattr(hyperparameters, name) for name, declared in DECLARATIONS.items() if not declared.flag}


def as_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables for settings, by their keys."""
    return {f"GEM_{name.upper()}": as_text(value) for name, value in settings.items()}
