"""How many samples the batches of a shard have."""

from __future__ import annotations

import numpy as np


def batch_sizes(samples: int, batch_size: int, variation: float, random: np.random.Generator) -> list[int]:
    """Cuts a shard into ⌈samples / batch_size⌉ batches.

    Without variation all batches but the last have `batch_size` samples. Otherwise their sizes are random, from
    (1 − variation) to (1 + variation) times `batch_size`, and so are the times that their gradients take. Workers on equal
    machines then do not commit in lockstep (docs/results/many-workers). The number of batches is the same, so that it stays
    known in advance.

    Args:
        samples: Samples in the shard, at least 1.
        batch_size: Mean samples in a batch of a whole shard.
        variation: From 0 to less than 1.
        random: The source of randomness.
    """
    count = -(-samples // batch_size)
    if not variation:
        return [batch_size] * (count - 1) + [samples - (count - 1) * batch_size]
    smallest = max(1, round(batch_size * (1 - variation)))
    largest = 2 * batch_size - smallest
    smallest = min(smallest, samples // count)  # the end of an epoch may have fewer samples for as many batches
    sizes: list[int] = []
    for others in reversed(range(count)):  # each leaves enough samples for the others, and not too many
        sizes.append(
            int(random.integers(max(smallest, samples - others * largest), min(largest, samples - others * smallest) + 1))
        )
        samples -= sizes[-1]
    random.shuffle(sizes)  # the last one drawn makes up for the others
    return sizes
