"""An example of your own task: a small network learns the sine function."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Sine:
    def __init__(self, data):  # the folder /data; not needed here
        x = torch.linspace(-3, 3, 2048).unsqueeze(1)
        self._data = TensorDataset(x, torch.sin(x))

    def model(self):
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_data(self):
        return self._data

    def test_data(self):
        return self._data

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def correct(self, model, batch):  # the number of correct answers; None, as this is a regression
        return None
