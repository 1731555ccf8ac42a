"""Compiled Keras models that fit in actors: only the lines that average are new.

`Network` is an actor as Ray's guide has it: a compiled model that can `fit`, and Keras's own
`get_weights` and `set_weights`. Between two fits the driver averages the weights, in the way of
the guide and in that of flatweights (`exchange_as_in_the_guide`, `exchange`): these lines are all
that differ. `FlatNetwork` is the same actor as a `FlatWorker` in a `WorkerGroup`: weights travel as
one buffer instead of as a list of arrays, and the exchange is one line.

    python -m flatweights.examples.keras_fit
    python -m flatweights.examples.keras_fit --workers 4 --rounds 20 --plot keras_fit.png

For a model of your own, change `compile_model`, and `load_shard` to load your data. Each optimizer
keeps what it remembers (here: Adam's moments); to average that too, build the optimizer, and return
``[self.model, self.model.optimizer]`` from `FlatNetwork.build`.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import ray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup, average

ENOUGH = 0.95


def load_shard(rank: int, workers: int, seed: int) -> tuple[Any, Any]:
    """Return the digits of one worker, and those that no worker has: images and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out, rest = np.split(np.random.default_rng(seed).permutation(len(labels)), [359])
    own = np.array_split(rest, workers)[rank]
    return (images[own] / 16, labels[own]), (images[held_out] / 16, labels[held_out])


def compile_model(seed: int) -> Any:
    """Return a network, ready to be fitted; the same for every worker."""
    examples.prepare_tensorflow()
    import keras

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


class Network:
    """A model that is fitted to one worker's data: an actor as in Ray's guide."""

    def __init__(self, seed: int, workers: int, rank: int) -> None:
        """Build the model in this process."""
        self.shard, self.held_out = load_shard(rank, workers, seed)
        self.model = compile_model(seed)

    def train(self) -> float:
        """Go once over the worker's data; return the loss."""
        return float(self.model.fit(*self.shard, verbose=0).history["loss"][0])

    def evaluate(self) -> float:
        """Return the accuracy on digits that were not fitted."""
        return float(self.model.evaluate(*self.held_out, verbose=0)[1])

    def get_weights(self) -> Any:
        """Return one array for each variable."""
        return self.model.get_weights()

    def set_weights(self, new_weights: Any) -> None:
        """Set the variables."""
        self.model.set_weights(new_weights)


class FlatNetwork(FlatWorker, Network):
    """The same; the weights leave and enter as one buffer."""

    def build(self, seed: int, workers: int, rank: int) -> Any:
        """Build the model in this process."""
        Network.__init__(self, seed, workers, rank)
        return self.model


def exchange_as_in_the_guide(workers: Sequence[Any]) -> None:
    """Average the weights with a loop over the layers."""
    weights = ray.get([worker.get_weights.remote() for worker in workers])
    mean = ray.put([sum(layer) / len(layer) for layer in zip(*weights, strict=True)])
    ray.get([worker.set_weights.remote(mean) for worker in workers])


def exchange(workers: Sequence[Any]) -> None:
    """Average the weights where they lie in the object store."""
    mean = average([worker.get_weights.remote() for worker in workers])
    ray.get([worker.set_weights.remote(mean.ref) for worker in workers])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if too little is learned."""
    parser = examples.make_parser(
        __doc__,
        "the losses, and what the exchanges took",
        workers=(2, "actors of either class"),
        rounds=(10, "fits, each with an exchange after it"),
    )
    options = parser.parse_args(arguments)
    examples.start_ray(2 * options.workers)
    settings, ranks = (options.seed, options.workers), range(options.workers)
    actor = ray.remote(Network)
    plain = [actor.remote(*settings, rank) for rank in ranks]
    group = WorkerGroup.create(FlatNetwork, len(ranks), *settings, arguments=lambda rank: [rank])
    guide = "Network, as in Ray's guide"
    ways: dict[str, Callable[[], object]] = {
        guide: lambda: exchange_as_in_the_guide(plain),
        "Network": lambda: exchange(plain),
        "FlatNetwork": lambda: group.broadcast(group.average()),
    }
    losses: dict[str, list[float]] = {"Network": [], "FlatNetwork": []}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        losses["Network"].append(np.mean(ray.get([one.train.remote() for one in plain])).item())
        losses["FlatNetwork"].append(np.mean([*group.step("train").values()]).item())
        for way in ways.values():
            way()
        # Once more, now that no worker is busy with what a fit leaves to be done. It takes as
        # long, and changes nothing: equal weights have themselves as their mean.
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    accuracy = {
        "Network": ray.get(plain[0].evaluate.remote()),
        "FlatNetwork": group.step("evaluate")[0],
    }
    group.shutdown()

    rows = []
    for name, times in seconds.items():
        network = name.partition(",")[0]
        rows.append(
            {
                "": name,
                "last loss": f"{losses[network][-1]:.4f}",
                "accuracy": f"{accuracy[network]:.3f}",
                "exchange per round": f"{1e3 * median(times):.1f} ms",
                "times as fast": f"{median(seconds[guide]) / median(times):.1f}",
            }
        )
    examples.print_table(rows)
    if options.plot:
        rounds = range(1, options.rounds + 1)
        curves = {name: (rounds, values) for name, values in losses.items()}
        times_of = {name: (rounds, [1e3 * s for s in some]) for name, some in seconds.items()}
        examples.draw(
            options.plot,
            "Compiled Keras models, averaged between fits",
            examples.Panel("loss", "round", curves, "log"),
            examples.Panel("exchange, ms", "round", times_of),
        )
    if min(accuracy.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main)
