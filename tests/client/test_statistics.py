"""BatchNorm's statistics after training, for models and batches of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gem_client import InvalidRequest
from gem_client.torch import update_statistics
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

IMAGES = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) * 2 + 5


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.add(self.first(image), self.second(mask))


def of_a_dictionary(model: nn.Module) -> Callable[[Any], object]:
    return lambda batch: model(batch["image"], batch["mask"])


@pytest.mark.parametrize("training", [True, False])
def test_the_statistics_are_those_of_pytorchs_function(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(training)
    expected, loader = copy.deepcopy(model), DataLoader(TensorDataset(IMAGES, IMAGES), 16)
    update_statistics(model, loader)
    update_bn(loader, expected)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert [each.training for each in model.modules()] == [training] * 3


def test_a_model_may_have_several_inputs_and_batches_any_shape() -> None:
    model = TwoInputs()
    batches = [{"image": IMAGES[:32], "mask": -IMAGES[:32]}, {"image": IMAGES[32:], "mask": -IMAGES[32:]}]
    update_statistics(model, batches, of_a_dictionary(model))
    torch.testing.assert_close(model.first.running_mean, IMAGES.mean(0))
    torch.testing.assert_close(model.second.running_mean, -IMAGES.mean(0))
    with pytest.raises(InvalidRequest, match="forward=lambda batch: model"):
        update_statistics(model, batches)


def test_a_model_without_batchnorm_stays_as_it_is() -> None:
    update_statistics(nn.Linear(3, 1), [{}])
