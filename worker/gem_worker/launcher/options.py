"""The options of a run: what the user gave, what a run to resume has stored, and defaults. Needs no PyTorch."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from gem_api.hyperparameters import DECLARATIONS, FIXED, Hyperparameters, flag, require_valid
from gem_api.process.option_types import Times
from gem_api.process.options import expanded, without_end
from gem_api.process.settings import settings_of
from gem_api.process.settings_file import document

from gem_worker.launcher.cluster import ClusterError, require_rule
from gem_worker.launcher.run_folder import RunFolder

_HYPERPARAMETERS = [field.name for field in fields(Hyperparameters)]
_EPOCHS = {"digits": 40}
# Settings of the servers that gem-train has not, and hands over from its --config.
_OF_SERVERS = {key for key, row in settings_of("server").items() if row.handed_over} - settings_of("train").keys()
_FIXED = {key for key, row in settings_of("train").items() if row.fixed}
# Only the server knows which of these go together.
_OF_THE_RULE = {"rule", "rule_options", "optimizer", "optimizer_options", "schedule"}
# What JSON has for an option of these types; for all others, text.
_KINDS = (
    (click.IntRange, (int,)),
    (click.FloatRange, (int, float)),
    (click.types.BoolParamType, (bool,)),
    (Times, (str, int, float)),
)


def run_options(context: click.Context) -> tuple[dict[str, Any], set[str]]:
    """The options for `launch`, from a context of gem-train, and the names of those that the user gave.

    Raises:
        ClusterError, InvalidRequest: There can be no run with these options. The message says why.
    """
    options, user_gave = expanded(context)
    options["server_settings"] = {name: value for name, value in document(context).items() if name in _OF_SERVERS}
    if options["server_settings"]:
        user_gave.add("server_settings")
    options = _effective(context, options, user_gave)
    if not options["resume"] and user_gave & _OF_THE_RULE:
        require_rule(hyperparameters_of(options))
    return options, user_gave


def _effective(context: click.Context, options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options that the run uses: those of the user, of the run to resume, and defaults. Raises ClusterError."""
    if options["resume"] and RunFolder(options["resume"]).empty:
        options = {**options, "folder": options["resume"], "resume": None}
    if options["until_stopped"]:
        options |= vars(without_end(hyperparameters_of(options), user_gave))
        user_gave |= {"epochs", "steps"}
    options = _resumed(context, options, user_gave) if options["resume"] else _completed(options)
    if options["on"] == "local" and (only := user_gave & {"resources", "working_dir", "ray_labels", "ray_spread"}):
        raise ClusterError(f"{_written(min(only))} needs --on ray")
    options = _with_durability(options, user_gave)
    if options["resume"]:
        return options
    named = [pair.partition("=")[0].strip() for pair in options["resources"].split(",")]
    if options["on"] == "ray" and "GPU" in named and "device" not in user_gave:
        options["device"] = "auto"
    return with_defaults(options, user_gave)


def with_defaults(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options with the defaults that follow from the rule and the optimizer. Raises ClusterError if a setting of the rule
    is not for that optimizer."""
    hyperparameters = hyperparameters_of(options).with_defaults(user_gave)
    require_used(hyperparameters, user_gave)
    return options | vars(hyperparameters)


def require_used(hyperparameters: Hyperparameters, user_gave: Collection[str]) -> None:
    """Raises ClusterError if the rule does not use a setting that the user gave."""
    try:
        hyperparameters.require_used(user_gave)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def _with_durability(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options with --durability log if there are several servers. Raises ClusterError if the user wants another one."""
    if options["servers"] == 1 or options["durability"] == "log":
        return options
    if "durability" in user_gave:
        raise ClusterError(
            f"--servers {options['servers']} needs --durability log, not {options['durability']}: with it, a server that dies "
            "comes back without losing a commit, and none is older than the others"
        )
    return {**options, "durability": "log"}


def hyperparameters_of(options: dict[str, Any]) -> Hyperparameters:
    """The run's hyper-parameters."""
    given = Hyperparameters(**{name: options[name] for name in _HYPERPARAMETERS})
    return replace(given, shard_size=options["shard_size"] or given.default_shard_size)


def rule_of(run: Hyperparameters) -> str:
    """The rule in words, with the optimizer that it is around."""
    if run.optimizer == "sgd":
        return run.rule
    around = "the workers' own optimizers" if run.optimizer == "worker" else run.optimizer
    return f"{run.rule} around {around}"


def _completed(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the default number of epochs filled in. Raises ClusterError if the run would never end."""
    epochs = options["epochs"]
    if epochs is None:
        epochs = 0 if options["steps"] else _EPOCHS.get(options["task"], 1)
    return _with_an_end({**options, "epochs": epochs})


def _with_an_end(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options. Raises ClusterError if the run would never end without --until-stopped."""
    if not options["epochs"] and not options["steps"] and not options["until_stopped"]:
        raise ClusterError(
            "--epochs 0 without --steps would train forever: set one of them, or --until-stopped if that is what you want"
        )
    return options


def _resumed(context: click.Context, options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The stored options of the run to resume, with the user's changes. Raises ClusterError."""
    path = options["resume"]
    try:
        stored = _stored_options(context, RunFolder(path).options)
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not the folder of a run that can be resumed: {error}") from error
    changes = {name: options[name] for name in user_gave - {"resume", "runs", "until_stopped"}}
    ranges = _same_ranges(RunFolder(path), stored.get("servers", 1), changes)
    changed = {name for name, value in changes.items() if name not in stored or str(value) != str(stored[name])}
    _require_changeable(changed)
    resumed = {**options, **stored, **changes, "servers": ranges, "resume": path}
    require_used(hyperparameters_of(resumed), changed)
    if {"epochs", "steps"} & changes.keys():
        return _with_an_end({**resumed, "until_stopped": options["until_stopped"]})
    return resumed


def _same_ranges(folder: RunFolder, stored: int, changes: dict[str, Any]) -> int:
    """The number of servers that a run to resume has: that of its checkpoints, else the stored one. Raises ClusterError if the
    user wants another one."""
    present = folder.count_ranges() or stored
    wanted = changes.pop("servers", present)
    if wanted != present:
        raise ClusterError(
            f"the run's checkpoints are for --servers {present}, not {wanted}: run `gem-ctl reshard {folder.checkpoints} "
            f"FOLDER --ranges {wanted}`, put FOLDER in the place of {folder.checkpoints}, and resume again"
        )
    return present


def _require_changeable(changed: set[str]) -> None:
    """Raises ClusterError, with the reason, if an option was changed that a resumed run can't change."""
    for names, why in (
        (changed & set(FIXED), "the server's state for each worker, and the shards leased so far, depend on them"),
        (changed & (_FIXED - set(FIXED)), "its results must come from one task, one data set and one step time"),
    ):
        if names:
            flags_ = ", ".join(_written(name) for name in sorted(names))
            raise ClusterError(f"a resumed run can't change {flags_}: {why}; omit them, or start a new run")


def _written(name: str) -> str:
    """An option or a setting as a user writes it."""
    return flag(name) if name in DECLARATIONS else settings_of("train")[name].option.partition("/")[0] or name


def _stored_options(context: click.Context, path: Path) -> dict[str, Any]:
    """The options in a run.json. Raises OSError or RecursionError, or ValueError if one is of the wrong kind or out of range.

    Null is right only for an option without a default."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a file")
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict):
        raise ValueError(f"{path.name} holds no options")
    for name in [name for name, declared in DECLARATIONS.items() if declared.option and name in stored]:
        try:
            require_valid(name, stored[name])
        except ValueError as error:
            raise ValueError(f"{path.name} has a wrong {name}: {error}") from error
    for param in context.command.params:
        if param.name not in stored or ((value := stored[param.name]) is None and not _has_default(param, context)):
            continue
        wanted = next((kinds for known, kinds in _KINDS if isinstance(param.type, known)), (str,))
        if type(value) not in wanted:
            raise ValueError(f"{path.name} has {param.name} {reprlib.repr(value)}")
        if isinstance(param.type, click.IntRange | click.FloatRange | Times):
            try:
                param.type.convert(value, param, context)
            except click.BadParameter as error:
                raise ValueError(f"{path.name} has a wrong {param.name}: {error.message}") from error
    return stored


def _has_default(param: click.Parameter, context: click.Context) -> bool:
    return isinstance(param.get_default(context), (str, int, float, Path))
