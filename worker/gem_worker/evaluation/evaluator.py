"""The command gem-evaluator: evaluates a running server's θ on held-out data at intervals."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from gem_api import __version__
from gem_api.errors import InvalidRequest
from gem_api.process import logs
from gem_api.process.extras import needs
from gem_api.process.options import SETTINGS, WithHeadings, credentials, log_options
from gem_api.process.stacks import print_stacks_on_signal
from gem_api.v1 import training_pb2 as pb
from gem_client import GemError, NotInitialized, Retry
from gem_client.retry import logging_failures

with needs("gem-evaluator", "torch"):
    print_stacks_on_signal()  # before the imports that take seconds: from here on the signal doesn't end the process
    import torch

from gem_worker.command import (
    EXIT_FAILED,
    EXIT_WRONG_USE,
    Stopped,
    evaluate_every_setting,
    log_as,
    member_options,
    stop_on_signals,
)
from gem_worker.device import devices
from gem_worker.evaluation.evaluate import RemoteEvaluator
from gem_worker.tasks import TaskError, load_task


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@member_options
@evaluate_every_setting(5.0)
@click.option("--once", is_flag=True, help="Evaluate once, as soon as the server has a model, and exit.")
@log_options
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Evaluates a GEM server's model on the task's held-out data, and reports loss and accuracy to the server.

    It does not train. Every few seconds it asks for the version and evaluates a new one, until SIGTERM or Ctrl-C.

    Exit status: 0 after SIGTERM or Ctrl-C, or after --once; 1 if the server rejects the request or stays unreachable, or if the
    task fails or is not the run's; 2 for wrong use, or a task that can't be loaded.
    """
    log = logs.configure(options["log_format"], options["log_level"])
    log_as("evaluator")
    stop_on_signals()
    torch.set_num_threads(options["threads"])
    try:
        sys.exit(_evaluate(options, log))
    except Stopped:
        log.info("stopped")
        sys.exit(0)


def _evaluate(options: dict[str, Any], log: logs.Logger) -> int:
    retry, security = Retry(give_up_after=options["give_up_after"]), credentials(options)
    try:
        (device,) = devices(options["device"])
        task = load_task(options["task"], options["data"])
        evaluator = RemoteEvaluator(options["server"], task, retry, device, **security)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE
    except InvalidRequest as error:
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE
    try:
        while True:
            done = _evaluate_if_new(evaluator, retry.call(evaluator.admin.status, logging_failures("the run's status")), log)
            if options["once"] and done:
                return 0
            time.sleep(options["evaluate_every"])
    except (GemError, TaskError) as error:
        log.error("the evaluation failed", error=type(error).__name__, why=str(error))
        return EXIT_FAILED
    finally:
        evaluator.close()


def _evaluate_if_new(evaluator: RemoteEvaluator, status: pb.GetStatusResponse, log: logs.Logger) -> bool:
    """Evaluates θ if the server has no evaluation of its version; returns whether the server has a model.

    Asks the server each time: a restarted server no longer knows earlier evaluations.
    """
    if status.HasField("evaluation") and status.evaluation.version == status.version:
        return True
    try:
        score = evaluator.evaluate()
    except NotInitialized:
        log.info("waiting: the server has no model yet; the first worker provides it")
        return False
    accuracy = None if score.accuracy is None else round(score.accuracy, 4)
    log.info("evaluated", version=score.version, loss=round(score.loss, 4), accuracy=accuracy)
    return True


if __name__ == "__main__":
    main(prog_name="gem-evaluator")
