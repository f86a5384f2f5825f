"""--config, a TOML file of settings that all commands of a run may share, and the settings that have no option.

A key is the name of the setting's environment variable in lower case and without GEM_: `learning_rate` for GEM_LEARNING_RATE.
A command takes the keys that it knows. The command line wins over the environment, that over the file, that over the default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gem_api.hyperparameters import DECLARATIONS
from gem_api.named_settings import NAMES, nearest
from gem_api.process.logs import print_error
from gem_api.process.printable import printable
from gem_api.process.settings import KEYS

_DOCUMENT, _PATH = "gem_api.settings_file", "gem_api.settings_path"  # where the context keeps the file's content, and its path

# Variables that are no settings: they belong to processes of our own, to docker-compose.yml, or to the commands of gem-ctl.
_OTHER_VARIABLES = {f"GEM_{name}" for name in (
    "CONFIG", "LAUNCHER_PID", "CHECKPOINT_TO", "DATA_FOLDER", "GRAFANA_PASSWORD", "GRAFANA_PORT", "LANE_PORT",
    "METRICS_RETENTION", "PAGE_PORT", "PROMETHEUS_PORT", "PUBLISH", "SERVER_PORT", "TORCH", "WORKER_IMAGE",
)}  # fmt: skip
_COMMAND_PREFIXES = (
    "GEM_DOCTOR_", "GEM_LOG_REPLAY_", "GEM_PLAN_", "GEM_PULL_", "GEM_RESHARD_", "GEM_STATUS_", "GEM_TRACK_",
)  # fmt: skip
# What Kubernetes adds for each service whose name begins with "gem".
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
# What other programs call an option of ours.
_ELSEWHERE = {
    "lr": "--learning-rate", "bs": "--batch-size", "batch": "--batch-size", "wd": "--weight-decay", "n_epochs": "--epochs",
    "num_epochs": "--epochs", "max_steps": "--steps", "num_workers": "--workers", "host": "--listen", "port": "--listen",
    "bind": "--listen", "address": "--server", "addr": "--server", "scheduler": "--schedule", "lr_scheduler": "--schedule",
    "params": "--parameters",
}  # fmt: skip
_warned = False


class WithoutOption(click.Parameter):
    """A setting without an option: only the environment and the file of --config can set it."""

    param_type_name = "setting"

    def _parse_decls(self, decls: Any, expose_value: bool) -> tuple[str, list[str], list[str]]:
        return decls[0], [], []

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """It is not on the command line."""


def key(param: click.Parameter) -> str:
    """The key of an option or setting in the file."""
    own = param.envvar or f"GEM_{str(param.name).upper()}"
    return (own if isinstance(own, str) else own[0]).removeprefix("GEM_").lower()


def document(context: click.Context) -> dict[str, Any]:
    """The values in the file of --config, by its keys; nothing without such a file."""
    found: dict[str, Any] = context.meta.get(_DOCUMENT, {})
    return found


def origin(context: click.Context, param: click.Parameter) -> str:
    """Where a value that is no argument comes from, as "the variable GEM_BATCH_SIZE"; empty for an argument or a default."""
    source = context.get_parameter_source(str(param.name))
    if source is ParameterSource.ENVIRONMENT:
        own = [param.envvar] if isinstance(param.envvar, str) else [*(param.envvar or ())]
        names = [*own, f"{context.auto_envvar_prefix}_{str(param.name).upper()}"]  # of gem-ctl's commands: GEM_PLAN_WORKERS
        return f"the variable {next((name for name in names if os.environ.get(name)), names[0])}"
    return f"{key(param)} in {context.meta.get(_PATH)}" if source is ParameterSource.DEFAULT_MAP else ""


def as_text(value: Any) -> str:
    """A value as the environment would hold it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def instead(command: click.Command, option: str) -> str | None:
    """The text to write in the place of an option that the command does not have; None if nothing is known of it."""
    name = option.lstrip("-").replace("-", "_")
    if (usual := _ELSEWHERE.get(name)) and any(usual in param.opts for param in command.params):
        return f"there is no option {option}: write {usual}"
    if (declared := DECLARATIONS.get(name)) and declared.option:
        return f"{option} is a setting of --{declared.option}: write --{declared.option} {_example(name)}"
    for param in command.params:
        if isinstance(param, WithoutOption) and name in (key(param), f"no_{key(param)}"):
            return f"{option} is not an option: set {key(param)} in the file of --config, or GEM_{key(param).upper()}"
    return None


def misplaced(command: click.Command) -> str | None:
    """The text to write in the place of a variable of the environment that would set nothing; None if there is none."""
    names = {param.name for param in command.params}
    for name, declared in DECLARATIONS.items():
        if declared.option in names and (variable := f"GEM_{name.upper()}") in os.environ:
            return f"{variable} is a setting of --{declared.option}: write GEM_{declared.option.upper()}={_example(name)}"
    return None


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """A line for each of these variables of the environment that begins with GEM_ and that nothing of ours reads."""
    known = {f"GEM_{name.upper()}" for name in (*KEYS, *DECLARATIONS)} | _OTHER_VARIABLES
    for name in sorted(names):
        ours = name in known or name.startswith(_COMMAND_PREFIXES) or _SERVICE_LINK.fullmatch(name)
        if name.startswith("GEM_") and not ours:
            alike = nearest(name, known) if nearest(name[4:], {each[4:] for each in known}) else ""
            yield f"the variable {printable(name)} is not a setting, and is ignored{alike}"


def warn_of_unknown_variables() -> None:
    """Prints the `unknown_variables` of this process, once. No error: a cluster may set GEM_... for purposes of its own."""
    global _warned
    if not _warned:
        _warned = True
        for line in unknown_variables(os.environ):
            print_error(f"warning: {line}")


def _example(name: str) -> str:
    """A hyper-parameter that is a setting of an option, as it is written."""
    declared = DECLARATIONS[name]
    return f"{'gem' if declared.option == 'rule' and declared.key else 'NAME'}:{declared.key or 'KEY'}=VALUE"


def load(context: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Reads the file of --config, as the callback of that option."""
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows begin a file with a byte order mark
        texts = {name: _value(name, value) for name, value in content.items()}
    except (OSError, ValueError, RecursionError) as error:  # also what is no UTF-8 or no TOML
        why = "its brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise click.BadParameter(f"{path}: {why}", context, param) from None
    context.meta[_DOCUMENT], context.meta[_PATH] = content, path
    context.default_map = {str(each.name): texts[key(each)] for each in context.command.params if key(each) in texts}


def _value(name: str, value: Any) -> Any:
    """A value as the option takes it. Raises ValueError."""
    if (declared := DECLARATIONS.get(name)) and declared.option:
        raise ValueError(f'{name} is a setting of {declared.option}: write {declared.option} = "{_example(name)}"')
    if isinstance(value, Mapping) and name not in NAMES:
        raise ValueError(f"{name} is no table: this file has no sections, so write the settings without [{name}]")
    if name not in KEYS:
        raise ValueError(f"there is no setting {name!r}{nearest(name, KEYS)}; docs/settings.md lists them all")
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a text, a number, true or false" + (", or a table" if name in NAMES else ""))
    return as_text(value)
