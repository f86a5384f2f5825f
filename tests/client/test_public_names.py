"""The names that users of the SDK rely on. Whoever removes or renames one has to change this test, and the changelog."""

from __future__ import annotations

import gem_client
import pytest
from gem_client.torch import CommitAverage, Epoch, Loader, Optimizer, ShardSampler

PACKAGE = """
    Admin Answer CheckpointFailed DeadlineExceeded Draining GemError Group Hyperparameters IncompleteTransfer InvalidRequest
    Layout LayoutMismatch LeaseEnded NonFiniteGradient NormOutOfBounds NotInitialized OptimizerChoice Overloaded OwnSteps
    PermissionDenied Quarantined RejectedCommit Retry RuleFailed SequenceGap ServerUnavailable Session SettingsDiffer
    Superseded TransportError Unauthenticated connect
"""
ADMIN = "checkpoint checkpoint_all close drain healthy lift_quarantine quarantine read_checkpoint report_evaluation status"
ANSWER = "discarded lost pi_median staleness theta version"
SESSION = """
    add_to_window base batch_share batches_in_hand batches_per_commit begin_commit close commit finish_commit generation
    gradient hyperparameters is_first join joined layout learning_rate progress pull pull_final read report_evaluation run_id
    shards shares_memory skip skipped stalled steps_done take_theta theta transport update_kind version
"""  # and `name` and `host_buffers`, which are set at construction
# And `answer`, `batches_per_step`, `inner`, `joined`, `session`, `spec` and `trained`, which are set at construction.
OPTIMIZER = "add_param_group finish load_final load_state_dict note skip state_dict step zero_grad"
SHARD_SAMPLER = "complete epochs items loader samples_in_hand"


def test_the_package_exports_these_names() -> None:
    assert gem_client.__all__ == PACKAGE.split()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (gem_client.Admin, ADMIN),
        (gem_client.Session, SESSION),
        (gem_client.OwnSteps, "finish load_final step"),
        (Optimizer, OPTIMIZER),
        (ShardSampler, SHARD_SAMPLER),
        (Epoch, "loader number"),
        (Loader, "ahead dataset"),
        (CommitAverage, "update_parameters"),
    ],
)
def test_a_class_has_these_public_attributes(kind: type, names: str) -> None:
    assert sorted(name for name in vars(kind) if not name.startswith("_")) == names.split()


def test_an_answer_has_these_fields() -> None:
    assert sorted(gem_client.Answer.__dataclass_fields__) == ANSWER.split()
