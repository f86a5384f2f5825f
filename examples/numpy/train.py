"""A worker in NumPy alone: a perceptron with a gradient written by hand learns which of three spirals a point lies on.

python examples/numpy/train.py [HOST:PORT]
"""

import sys

import gem_client
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
ARMS, HIDDEN = 3, 32


def spirals(points: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Points in the plane, shape (points, 2), and the arm that each lies on, shape (points,)."""
    random = np.random.default_rng(seed)
    arms = random.integers(ARMS, size=points)
    radius = np.sqrt(random.uniform(0.02, 1, points))
    angle = 4 * radius + 2 * np.pi * arms / ARMS + random.normal(0, 0.2, points)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32), arms


def first_values(seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        "hidden.weight": random.normal(0, 1, (2, HIDDEN)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "output.weight": random.normal(0, HIDDEN**-0.5, (HIDDEN, ARMS)).astype(np.float32),
        "output.bias": np.zeros(ARMS, np.float32),
    }


def forward(model: dict[str, Array], points: Array) -> tuple[Array, Array]:
    """The hidden layer, shape (n, HIDDEN), and the probability of each arm, shape (n, ARMS)."""
    hidden = np.tanh(points @ model["hidden.weight"] + model["hidden.bias"])
    scores = hidden @ model["output.weight"] + model["output.bias"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def loss_and_gradient(model: dict[str, Array], points: Array, arms: NDArray[np.int64]) -> tuple[float, dict[str, Array]]:
    """The mean cross-entropy of a batch, and its gradient by the chain rule."""
    hidden, probabilities = forward(model, points)
    right = np.arange(len(arms)), arms
    loss = float(-np.log(probabilities[right]).mean())
    probabilities[right] -= 1
    of_scores = probabilities / len(arms)
    of_sums = of_scores @ model["output.weight"].T * (1 - hidden**2)
    return loss, {
        "hidden.weight": points.T @ of_sums,
        "hidden.bias": of_sums.sum(axis=0),
        "output.weight": hidden.T @ of_scores,
        "output.bias": of_scores.sum(axis=0),
    }


def accuracy(model: dict[str, Array], points: Array, arms: NDArray[np.int64]) -> float:
    return float((forward(model, points)[1].argmax(axis=1) == arms).mean())


def main(address: str) -> None:
    points, arms = spirals(3_000, seed=1)  # the same in every worker
    with gem_client.connect(address) as session:
        theta = session.join(first_values())
        before = accuracy(session.layout.split(theta), *spirals(1_000, seed=2))
        shards = session.shards(len(points))
        while not shards.complete:
            for batch in shards:
                loss, gradient = loss_and_gradient(session.layout.split(theta), points[batch], arms[batch])
                theta = session.commit(gradient, loss=loss).theta
        final = session.layout.split(session.pull_final())
        after = accuracy(final, *spirals(1_000, seed=2))
        counts = f"{session.steps_done} commits of this worker, {session.version} of all"
        print(f"{counts}; accuracy {before:.1%} before, {after:.1%} after")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
