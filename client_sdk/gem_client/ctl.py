"""gem-ctl: asks a server how it is, and tells it what to do."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.options import SETTINGS, Number, option
from gem_api.v1 import training_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gem_client import Admin, GemError, Retry, connect


class _TypedErrors(click.Group):
    """Turns the SDK's errors into one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GemError as error:
            click.echo(f"gem-ctl: {type(error).__name__}: {error}", err=True)
            sys.exit(1)


@click.group(cls=_TypedErrors, context_settings=SETTINGS)
@option("--server", envvar="GEM_SERVER", default="127.0.0.1:50051", help="The server's address, host:port.")
@option("--timeout", envvar="GEM_TIMEOUT", type=Number(0.1), default=10.0, help="Seconds to wait for an answer.")
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context, /, server: str, timeout: float) -> None:
    """Looks after a GEM server.

    \b
    Examples:
      gem-ctl status
      gem-ctl --server host:50051 status --json | jq .version
      gem-ctl pull model.safetensors
    """
    logging.getLogger("gem_client").addHandler(logging.NullHandler())  # one line of error, not one for each try
    context.obj = server, timeout


@main.command()
@option(
    "--json", "as_json", envvar="GEM_STATUS_JSON", is_flag=True, help="For scripts: one JSON object, all fields always there."
)
@click.pass_obj
def status(target: tuple[str, float], as_json: bool) -> None:
    """Shows the run at a glance: version, workers, staleness, π, shards, memory."""
    with Admin(*target) as admin:
        answer = admin.status()
    click.echo(json.dumps(as_dict(answer), indent=2, allow_nan=False) if as_json else as_text(answer))


@main.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.pass_obj
def pull(target: tuple[str, float], out: Path) -> None:
    """Writes the central variable to OUT, a safetensors file with the model's own tensor names, all float32."""
    server, timeout = target
    with connect(server, retry=Retry(give_up_after=timeout)) as session:
        theta = session.pull()
        tensors = session.layout.split(theta)
        scratch = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            save_file(tensors, scratch, metadata={"format": "pt", "gem_version": str(session.version)})
            scratch.replace(out)
        except (OSError, SafetensorError) as error:
            scratch.unlink(missing_ok=True)
            raise click.ClickException(f"can't write {out}: {error}") from error
        click.echo(f"wrote {out}: version {session.version}, {len(tensors)} tensors, {theta.size} parameters")


@main.command()
@click.pass_obj
def checkpoint(target: tuple[str, float]) -> None:
    """Has the server write a checkpoint now, and waits for it."""
    server, timeout = target
    with Admin(server, timeout) as admin:
        answer = admin.checkpoint()
    click.echo(f"checkpoint of version {answer.version} in {answer.path} (on the server)")


@main.command()
@click.pass_obj
def drain(target: tuple[str, float]) -> None:
    """Ends the server gracefully: queued commits are applied and answered, the process exits.

    A server that has a --checkpoint-dir writes a checkpoint before it exits.

    Workers wait for a server to come back; start it with --resume.
    """
    with Admin(*target) as admin:
        queued = admin.drain()
    click.echo(f"the server is finishing; {queued} commits were queued")


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON values, names as in the .proto file: every field is there, None where it is not set."""
    return {field.name: _json_value(message, field) for field in message.DESCRIPTOR.fields}


def _json_value(message: Message, field: FieldDescriptor) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    values = list(value) if field.is_repeated else [value]
    if field.message_type is not None:
        values = [as_dict(entry) for entry in values]
    elif field.enum_type is not None:
        values = [field.enum_type.values_by_number[entry].name for entry in values]
    return values if field.is_repeated else values[0]


def as_text(answer: pb.GetStatusResponse) -> str:
    """The status for people."""
    settings, shards = answer.hyperparameters, answer.shards
    limit = f" of {_size(answer.memory_limit_bytes)}" if answer.memory_limit_bytes else ""
    lines = [
        f"run         {answer.run_id}, {pb.RunState.Name(answer.state).removeprefix('RUN_STATE_').lower()}, "
        f"up {_duration(answer.uptime_seconds)}",
        f"rule        {settings.rule}, learning rate {settings.learning_rate}, momentum {settings.momentum}, "
        f"batch {settings.batch_size}",
        f"version     {answer.version} ({_counts(answer.commits)})",
        f"model       {answer.parameter_count} parameters, memory {_size(answer.memory_bytes)}{limit}",
        f"staleness   {answer.staleness:.1f}",
        f"median π    {_optional(answer, 'pi_median', '.3f')}",
        f"loss        {_optional(answer, 'training_loss', '.4f')}",
        f"evaluation  {_evaluation(answer)}",
        f"shards      epoch {shards.epoch + 1} of {shards.epochs or 'any'}: {shards.pending} pending, {shards.leased} leased, "
        f"{shards.completed} completed",
        f"checkpoint  {_checkpoint(answer)}",
        f"queue       {answer.queue_length}",
        f"leases      {len(answer.workers)} live; ended: {_counts(answer.leases_ended) or 'none'}",
    ]
    if answer.workers:
        lines += ["", f"{'worker':<32} {'commits':>8} {'staleness':>9} {'median π':>9} {'loss':>8} {'shards':>6} {'lease':>7}"]
    for worker in answer.workers:
        lines.append(
            f"{worker.name:<32} {worker.commits:>8} {worker.staleness:>9} {_optional(worker, 'pi_median', '.3f'):>9} "
            f"{_optional(worker, 'loss', '.4f'):>8} {worker.shards:>6} {worker.lease_remaining_seconds:>5.0f} s"
        )
    return "\n".join(lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _optional(message: Any, field: str, form: str) -> str:
    return format(getattr(message, field), form) if message.HasField(field) else "–"


def _evaluation(answer: pb.GetStatusResponse) -> str:
    if not answer.HasField("evaluation"):
        return "–"
    score = answer.evaluation
    accuracy = f", accuracy {100 * score.accuracy:.2f} %" if score.HasField("accuracy") else ""
    return f"loss {score.loss:.4f}{accuracy} at version {score.version}"


def _checkpoint(answer: pb.GetStatusResponse) -> str:
    if not answer.HasField("checkpoint_version"):
        return "none"
    return f"version {answer.checkpoint_version}, {_duration(answer.checkpoint_age_seconds)} ago"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
