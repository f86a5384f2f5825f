"""Command-line options that several commands share. Each is an environment variable and a key of the settings file too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, Hyperparameters, flag
from gem_api.named_settings import NAMES, written
from gem_api.process.secret_file import read_token
from gem_api.process.settings import HEADINGS, Command, Setting, settings_of
from gem_api.process.settings_file import (
    WithoutOption,
    as_text,
    instead,
    key,
    load,
    misplaced,
    origin,
    warn_of_unknown_variables,
)

# Every command passes these to click. An option's environment variable is GEM_ and its name.
SETTINGS: dict[str, Any] = {
    "auto_envvar_prefix": "GEM",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}
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
        except click.MissingParameter as error:
            examples = [line.strip() for line in (self.help or "").splitlines() if line.strip().startswith(ctx.command_path)]
            shown = f". For example: {examples[0]}" if examples else "."
            raise click.UsageError(error.format_message().removesuffix(".") + shown, ctx) from None
        except click.BadParameter as error:
            if error.param is not None and (source := origin(ctx, error.param)):
                told = f"{error.message.removesuffix('.')} ({source})."
                raise click.BadParameter(told, error.ctx, error.param, error.param_hint) from None
            raise
        except click.NoSuchOption as error:
            if hint := instead(self, error.option_name):
                raise click.UsageError(hint, ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with no_false_abort():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        params.sort(key=lambda param: HEADINGS.index(heading_of(param)))
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in params:
            if record := param.get_help_record(ctx):
                sections.setdefault(heading_of(param), []).append((record[0], _help(param, ctx)))
        longest = max(len(option) for records in sections.values() for option, _ in records)
        width = min(longest, _MAX_NAME_WIDTH)  # one width for all sections, so that their texts line up
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in records])
        if names := [key(param) for param in self.get_params(ctx) if isinstance(param, WithoutOption)]:
            with formatter.section("Settings without an option, for --config and the environment (docs/settings.md)"):
                formatter.write_text(", ".join(sorted(names)))


def _help(param: click.Option, ctx: click.Context) -> str:
    """The help of an option: its default too, and its environment variables if they are not named like it."""
    extra = param.get_help_extra(ctx)
    notes = [f"default: {extra['default'].strip('()')}"] if extra.get("default", '""') != '""' else []
    if param.required:
        notes.append("required")
    variables = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    if set(variables) - {f"{ctx.auto_envvar_prefix}_{param.opts[0].lstrip('-').replace('-', '_').upper()}"}:
        notes.append(f"environment: {', '.join(variables)}")
    return (param.help or "") + f"  [{'; '.join(notes)}]" * bool(notes)


def heading_of(param: click.Parameter) -> str:
    """The heading of an option in --help; the last one if it names none."""
    return param.heading if isinstance(param, Option) else HEADINGS[-1]


class Option(click.Option):
    """An option under a heading of --help, one of HEADINGS."""

    def __init__(self, *declarations: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.heading = heading


def option(*declarations: str, heading: str, **attributes: Any) -> Callable[[Any], Any]:
    """Adds an option under a heading; `attributes` as for `click.option`."""
    return click.option(*declarations, cls=Option, heading=heading, **attributes)


def setting_options(settings: Iterable[Setting]) -> Callable[[Any], Any]:
    """Adds these settings to a command: an option each, or what only the environment and the file of --config can set."""

    def decorate(command: Any) -> Any:
        for row in reversed(list(settings)):  # click lists the option that was added last first
            command = _add(row)(command)
        return command

    return decorate


def _add(row: Setting) -> Callable[[Any], Any]:
    variables = list(row.variables) or f"GEM_{row.key.upper()}"
    attributes: dict[str, Any] = {"type": row.type, "default": row.default, "envvar": variables}
    name = row.name or row.key
    if not row.option:
        return click.option(name, cls=WithoutOption, **attributes)  # type: ignore[arg-type]
    if row.type is click.BOOL:
        attributes["is_flag"] = True
    if row.shown_default:
        attributes["show_default"] = row.shown_default
    return option(row.option, name, heading=row.heading, help=row.help, metavar=row.metavar or None, **attributes)


def command_options(command: Command) -> Callable[[Any], Any]:
    """Adds all settings of a command, and --config."""
    config = option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        heading="Most used",
        is_eager=True,
        expose_value=False,
        callback=load,
        help="TOML file of settings, which all commands of a run may share. The command line wins over the environment, that "
        "over this file.",
    )
    add_settings = setting_options(settings_of(command).values())
    return lambda function: add_settings(config(function))


# For what needs a run's hyper-parameters alone. `expanded` reads them.
hyperparameter_options = setting_options(row for key, row in settings_of("server").items() if key in DECLARATIONS)


def without_end(hyperparameters: Hyperparameters, user_gave: Collection[str]) -> Hyperparameters:
    """Removes the limits, as --until-stopped asks. Raises click.UsageError if the user also set one."""
    for name in ("epochs", "steps"):
        if name in user_gave and (limit := getattr(hyperparameters, name)):
            raise click.UsageError(f"--until-stopped contradicts --{name} {limit}: leave one of them out, or give --{name} 0")
    return replace(hyperparameters, epochs=0, steps=0)


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
    return [f"{flag(name)}={values[name]}" for name, each in DECLARATIONS.items() if each.heading]


def settings_without_flags(hyperparameters: Hyperparameters) -> dict[str, Any]:
    """The hyper-parameters that have no option, by their keys."""
    return {name: getattr(hyperparameters, name) for name, each in DECLARATIONS.items() if not (each.heading or each.option)}


def as_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables for settings, by their keys."""
    return {f"GEM_{name.upper()}": as_text(value) for name, value in settings.items()}


def handed_over(command: Command, values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The values that gem-train hands to a process of a command: flags, and settings without an option by their keys."""
    own = settings_of("train")
    rows = [row for row in settings_of(command).values() if row.handed_over and row.key in own]
    given_ = [row for row in rows if row.option and values[row.key] is not None]
    return [_flag(row, values[row.key]) for row in given_], {row.key: values[row.key] for row in rows if not row.option}


def _flag(row: Setting, value: Any) -> str:
    on, _, off = row.option.partition("/")
    if row.type is click.BOOL:
        return on if value else off
    return f"{on}={value}"
