"""GEM for PyTorch loops: an optimizer whose step is one round trip, and a sampler that feeds from leased shards.

The optimizer trains every parameter that has `requires_grad` at construction. The server holds it in float32, whatever its
dtype in the model; a tied weight counts once. Frozen parameters and buffers (such as BatchNorm's running statistics) stay with
each worker, which must load frozen parameters itself.

To evaluate, read θ into another model. This does not affect the model in training:

    tensors = session.layout.split(session.read())
    loaded = evaluated.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)
    assert not loaded.unexpected_keys

Of a model that `torch.compile` wraps, `evaluated` is the plain one.

If the model has BatchNorm, compute its statistics afterwards, with `update_statistics`.
"""

from __future__ import annotations

from gem_api.process.extras import install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"gem_client.torch needs PyTorch: {install('torch')}", name=error.name) from error

from gem_client.torch.average import CommitAverage
from gem_client.torch.optimizer import Optimizer
from gem_client.torch.rank_session import connect_ranks
from gem_client.torch.sampler import Epoch, Loader, ShardSampler
from gem_client.torch.statistics import update_statistics

__all__ = ["CommitAverage", "Epoch", "Loader", "Optimizer", "ShardSampler", "connect_ranks", "update_statistics"]
