"""The sizes of a shard's batches."""

from __future__ import annotations

import numpy as np


def smallest_batch(batch_size: int, variation: float) -> int:
    """The fewest samples in a batch of a large shard; `batch_size` if so small batches can't vary."""
    return max(1, round(batch_size * (1 - variation)))


def batch_sizes(samples: int, batch_size: int, variation: float, random: np.random.Generator, together: int = 1) -> list[int]:
    """Cuts a shard into ⌈samples / batch_size⌉ batches.

    Without variation all batches but the last have `batch_size` samples. Otherwise their sizes are random, and so are the times
    that their gradients take: workers on equal machines then do not commit in lockstep (docs/results/many-workers). The number
    of batches is the same, so that it stays known in advance.

    Args:
        samples: Samples in the shard, at least 1.
        batch_size: Samples in a batch; with variation the mean, if the shard has whole batches.
        variation: A batch has from (1 − variation) to (1 + variation) times `batch_size` samples; fewer if the shard is too
            small for that. From 0 to less than 1.
        random: The source of randomness.
        together: Batches in a commit. They get the same size: if each varied by itself, their sum would hardly vary.
    """
    count = -(-samples // batch_size)
    if not variation:
        return [batch_size] * (count - 1) + [samples - (count - 1) * batch_size]
    smallest = smallest_batch(batch_size, variation)
    largest = 2 * batch_size - smallest
    smallest = min(smallest, samples // count)
    commits = [together] * (count // together) + [count % together] * (count % together > 0)
    cut: list[list[int]] = [[]] * len(commits)
    for place in random.permutation(len(commits)):  # the last one drawn makes up for the others
        batches = commits[place]
        count -= batches  # what is left must be possible for the others
        least = max(batches * smallest, samples - count * largest)
        most = min(batches * largest, samples - count * smallest)
        drawn = int(random.integers(least, most + 1))
        samples -= drawn
        cut[place] = [(drawn + batch) // batches for batch in range(batches)]
    return [size for sizes in cut for size in sizes]
