"""A worker in JAX: a perceptron learns the sine by optax's AdamW, each worker with its own.

python examples/jax/train.py [HOST:PORT]
"""

import sys
from typing import Any

import gem_client
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree


def predict(model: Any, x: jax.Array) -> jax.Array:
    for layer in model[:-1]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return x @ model[-1]["weight"] + model[-1]["bias"]


def mean_squared_error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predict(model, x) - y) ** 2)


def main(address: str) -> None:
    x = np.linspace(-6, 6, 2048, dtype=np.float32)[:, None]
    y = np.sin(x)
    sizes, keys = [1, 64, 64, 1], jax.random.split(jax.random.key(0), 3)
    model = [
        {"weight": jax.random.normal(key, (rows, columns)) * rows**-0.5, "bias": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes, sizes[1:], strict=False)
    ]
    names = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)]
    packed, unravel = ravel_pytree(model)  # in the order of the names, as the session packs them
    loss_and_gradient = jax.jit(jax.value_and_grad(lambda packed, x, y: mean_squared_error(unravel(packed), x, y)))
    adamw = optax.adamw(1e-2)
    advance, state = jax.jit(adamw.update), adamw.init(packed)

    with gem_client.connect(address) as session:
        theta = session.join(names, optimizer="worker")
        shards = session.shards(len(x))
        while not shards.complete:
            for batch in shards:
                loss, gradient = loss_and_gradient(theta, x[batch], y[batch])
                change, state = advance(gradient, state, theta)
                theta = session.commit(np.asarray(change), loss=float(loss), kind="delta").theta
        final = mean_squared_error(unravel(jnp.array(session.pull_final())), x, y)
        print(f"{session.steps_done} commits of this worker, {session.version} of all; loss {final:.5f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
