"""Evaluates each new version of a server's θ: the body of gem-evaluator."""

from __future__ import annotations

import time
from typing import Any

import torch
from gem_api.errors import InvalidRequest
from gem_api.process import logs
from gem_api.v1 import training_pb2 as pb
from gem_client import GemError, NotInitialized, Retry
from gem_client.retry import logging_failures

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE
from gem_worker.device import devices
from gem_worker.evaluation.evaluate import RemoteEvaluator
from gem_worker.tasks import TaskError, load_task


def follow(options: dict[str, Any], security: dict[str, Any], log: logs.Logger) -> int:
    """Evaluates until the process is stopped, or once with --once; returns the exit status.

    Args:
        options: The options of gem-evaluator.
        security: `token`, `tls_ca`, `tls_cert` and `tls_key` as for `connect`.
        log: Receives what happens.
    """
    torch.set_num_threads(options["threads"])
    retry = Retry(give_up_after=options["give_up_after"])
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
