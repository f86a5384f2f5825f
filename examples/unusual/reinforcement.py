"""REINFORCE: each worker plays episodes of its own, and each episode is a step. A worker's seed is that of its episodes."""

import sys

import gem_client
import torch
from gem_client.torch import Optimizer
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
CELLS, MOST_STEPS, DISCOUNT = 9, 40, 0.95


class Corridor:
    """The player begins in the middle. The right end is worth 1, the left end nothing, and both end the episode."""

    def reset(self) -> torch.Tensor:
        self.cell = CELLS // 2
        return self.seen()

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self.cell += 2 * action - 1
        return self.seen(), float(self.cell == CELLS - 1), self.cell in (0, CELLS - 1)

    def seen(self) -> torch.Tensor:
        return nn.functional.one_hot(torch.tensor(self.cell), CELLS).float()


world, policy = Corridor(), nn.Sequential(nn.Linear(CELLS, 32), nn.Tanh(), nn.Linear(32, 2))
with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(torch.optim.Adam(policy.named_parameters(), lr=0.01), session)
    average = 0.0
    for episode in range(150):
        seen, over, logs, rewards = world.reset(), False, list[torch.Tensor](), list[float]()
        while not over and len(logs) < MOST_STEPS:
            chances = torch.distributions.Categorical(logits=policy(seen))
            action = chances.sample()
            logs.append(chances.log_prob(action))
            seen, reward, over = world.step(int(action))
            rewards.append(reward)
        worth = rewards[-1] * torch.tensor([DISCOUNT ** (len(logs) - number) for number in range(1, len(logs) + 1)])
        optimizer.zero_grad()
        loss = -((worth - average) * torch.stack(logs)).sum()
        loss.backward()
        optimizer.step(loss=loss)
        average += 0.05 * (rewards[-1] - average)
        if episode % 25 == 24:
            print(f"episode {episode} loss {loss.item():.6f} reward {average:.3f}", flush=True)
    optimizer.load_final()
