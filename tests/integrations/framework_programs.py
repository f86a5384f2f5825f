"""Programs of other frameworks as workers, by the expressions of the guide; prints what came of each as JSON.

A process of its own for each framework: JAX warns of later forks, and Keras has one backend for a whole process.

python framework_programs.py FRAMEWORK ADDRESS ADDRESS_FOR_TWO
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gem_client
import numpy as np
from kit.model import in_background
from kit.pages import ROOT, blocks
from kit.server import DEADLINE

PAGE = ROOT / "docs/guides/without-pytorch.md"
PRINTED_ADDRESS = "127.0.0.1:50051"
X = np.linspace(-3, 3, 256, dtype=np.float32)[:, None]
Y = np.sin(X)
SEED = threading.Lock()  # Keras has one seed for the whole process: the models of two workers are made one after the other


class Program(NamedTuple):
    """A model, what makes a step of its optimizer on a batch of indices and returns the loss, and what says how wrong it is."""

    model: Any
    train: Callable[[list[int]], Any]
    error: Callable[[], float]


def flax() -> Program:
    import jax.numpy as jnp
    import optax
    from flax import nnx

    model = nnx.Sequential(nnx.Linear(1, 32, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(32, 1, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    jitted = nnx.jit(step)
    return Program(
        model, lambda batch: jitted(model, optimizer, X[batch], Y[batch]), lambda: float(np.mean((model(X) - Y) ** 2))
    )


def keras() -> Program:
    import keras

    with SEED:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((1,)), keras.layers.Dense(32, "tanh", name="first"), keras.layers.Dense(1, name="last")]
        model = keras.Sequential(layers, name="sine")
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return Program(
        model, lambda batch: model.train_on_batch(X[batch], Y[batch]), lambda: float(model.evaluate(X, Y, verbose=0))
    )


def scikit_learn(make: str) -> Program:
    from sklearn.datasets import load_digits
    from sklearn.linear_model import SGDClassifier
    from sklearn.neural_network import MLPClassifier

    images, digits = load_digits(return_X_y=True)
    images, digits = images[: len(X)] / 16, digits[: len(X)]
    model = {"MLPClassifier": MLPClassifier, "SGDClassifier": SGDClassifier}[make](random_state=0)
    model.partial_fit(images[:10], digits[:10], classes=range(10))

    def train(batch: list[int]) -> Any:
        model.partial_fit(images[batch], digits[batch])
        return getattr(model, "loss_", None)

    return Program(model, train, lambda: 1 - float(model.score(images, digits)))


FRAMEWORKS: dict[str, Callable[[], Program]] = {
    "flax nnx": flax,
    "Keras": keras,
    "SGDClassifier": partial(scikit_learn, "SGDClassifier"),
    "MLPClassifier": partial(scikit_learn, "MLPClassifier"),
}


def arguments(framework: str, model: Any) -> tuple[Any, Any]:
    """`parameters` and `assign`, from the row of the guide's table."""
    (row,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {framework} |"))
    names: dict[str, Any] = {"model": model, "np": np}
    if framework == "flax nnx":
        from flax import nnx

        names["nnx"] = nnx
    if framework == "Keras":
        import keras

        names["keras"] = keras
    parameters, assign = (eval(cell.strip(" `"), names) for cell in row.strip("|").split("|")[1:])
    return parameters, assign


def packed(parameters: Callable[[], Any]) -> Any:
    return np.concatenate([np.asarray(each).ravel() for each in parameters().values()])


class Outcome(NamedTuple):
    """What a worker ended with: its error, its steps, its final parameters, and those of the plain program on its batches."""

    error: float
    steps: int
    values: Any
    plain: Any


def by_the_table(framework: str, address: str) -> Outcome:
    program, batches = FRAMEWORKS[framework](), []
    parameters, assign = arguments(framework, program.model)
    with gem_client.connect(address) as session:
        own, shards = gem_client.OwnSteps(session, parameters, assign), session.shards(len(X))
        while not shards.complete:
            for batch in shards:
                own.step(program.train(batch))
                batches.append(batch)
        own.load_final()
    plain = FRAMEWORKS[framework]()
    for batch in batches:
        plain.train(batch)
    return Outcome(program.error(), len(batches), packed(parameters), packed(arguments(framework, plain.model)[0]))


def by_keras_fit(address: str) -> Outcome:
    import keras as library

    (printed,) = (block for block in blocks(language="python", folder="docs/guides") if "model.fit(" in block.text)
    program, plain = keras(), keras()
    names = {"keras": library, "gem_client": gem_client, "model": program.model, "x": X, "y": Y}
    library.utils.set_random_seed(1)
    exec(compile(printed.text.replace(PRINTED_ADDRESS, address), str(printed), "exec", dont_inherit=True), names)
    library.utils.set_random_seed(1)
    plain.model.fit(X, Y, epochs=10, verbose=0)
    parameters, plains = (arguments("Keras", each.model)[0] for each in (program, plain))
    return Outcome(program.error(), 10 * len(X) // 32, packed(parameters), packed(plains))


def main(framework: str, alone: str, together: str) -> None:
    work = by_keras_fit if framework == "Keras fit" else partial(by_the_table, framework)
    untrained = FRAMEWORKS[framework.removesuffix(" fit")]().error()
    one = work(alone)
    two = [worker.result(DEADLINE) for worker in [in_background(partial(work, together)) for _ in range(2)]]
    result = {
        "untrained": untrained,
        "errors": [one.error, *(each.error for each in two)],
        "steps": [one.steps, *(each.steps for each in two)],
        "from the plain program": float(np.abs(one.values - one.plain).max()),
        "from each other": float(np.abs(two[0].values - two[1].values).max()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
