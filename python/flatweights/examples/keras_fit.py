"""Compiled Keras models that run fit in actors: only the lines that average are new.

`Network` is an actor as in Ray's guide: a compiled model that can `fit`, and Keras's own
`get_weights` and `set_weights`. Between two fits the driver averages the weights, as in the
guide (`exchange_as_in_the_guide`) and with flatweights (`exchange`): these lines are the
whole difference. `FlatNetwork` is the same actor as a `FlatWorker` in a `WorkerGroup`: its weights
travel as one buffer instead of a list of arrays, and the exchange is one line.

    flatweights examples keras_fit
    flatweights examples --plot keras_fit.png keras_fit --workers 4 --rounds 20

For a model of your own, change `compile_model`; for your data, `Network.__init__`. Each actor's
optimizer keeps its own state (here: Adam's moments). To average that too, build the optimizer, and
return ``[self.model, self.model.optimizer]`` from `FlatNetwork.build`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import ray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flatweights.ray import FlatWorker, WorkerGroup, average

ENOUGH = 0.95


def compile_model(seed: int) -> Any:
    """Return a network, ready to be fitted; the same for every worker."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # the actors share the cores
    tf.config.experimental.enable_op_determinism()  # so that both classes learn the same
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
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images / 16, labels, test_size=0.2, random_state=seed)
        train_x, test_x, train_y, test_y = parts
        self.digits = train_x[rank::workers], train_y[rank::workers]
        self.test = test_x, test_y
        self.model = compile_model(seed)

    def train(self) -> float:
        """Go once over the worker's data; return the loss."""
        return float(self.model.fit(*self.digits, verbose=0).history["loss"][0])

    def evaluate(self) -> float:
        """Return the accuracy on digits that no worker trains on."""
        return float(self.model.evaluate(*self.test, verbose=0)[1])

    def get_weights(self) -> Any:
        """Return one array for each variable."""
        return self.model.get_weights()

    def set_weights(self, new_weights: Any) -> None:
        """Set the variables."""
        self.model.set_weights(new_weights)


class FlatNetwork(FlatWorker, Network):
    """The same actor; its weights leave and enter as one buffer."""

    def build(self, seed: int, workers: int, rank: int) -> Any:
        """Build the model in this process."""
        Network.__init__(self, seed, workers, rank)
        return self.model


def exchange_as_in_the_guide(workers: Sequence[Any]) -> None:
    """Average the weights with a loop over the layers."""
    weights = ray.get([worker.get_weights.remote() for worker in workers])
    ref = ray.put([sum(layer) / len(layer) for layer in zip(*weights, strict=True)])
    ray.get([worker.set_weights.remote(ref) for worker in workers])


def exchange(workers: Sequence[Any]) -> None:
    """Average the weights, which are read in place from the object store."""
    result = average([worker.get_weights.remote() for worker in workers])
    ray.get([worker.set_weights.remote(result.ref) for worker in workers])


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run the program; return curves. It fails if too little is learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="actors of either class; default: %(default)s")
    add("--rounds", type=int, default=10, help="fits, each with an exchange; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.workers, options.rounds) < 1:
        parser.error(f"expected at least 1 worker and 1 round, got {vars(options)}")
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
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
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, options.rounds + 1):
        losses["Network"].append(mean(ray.get([worker.train.remote() for worker in plain])))
        losses["FlatNetwork"].append(mean(group.step("train").values()))
        for way in ways.values():
            way()
        # Once more, now that no worker is busy with the end of its fit. It takes as long, and
        # changes nothing: equal weights are their own average.
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - begin))
        last = ", ".join(f"{values[-1]:.4f}" for values in losses.values())
        print(f"round {number} of {options.rounds}: losses {last}", flush=True)
    accuracy = {
        "Network": ray.get(plain[0].evaluate.remote()),
        "FlatNetwork": group.step("evaluate")[0],
    }
    group.shutdown()

    print(f"\n{'':27}{'last loss':>10}{'accuracy':>10}{'exchange':>12}{'times as fast':>15}")
    for name, network in zip(ways, ["Network", "Network", "FlatNetwork"], strict=True):
        cells = f"{losses[network][-1]:10.4f}{accuracy[network]:10.3f}{median(times[name]):9.1f} ms"
        print(f"{name:27}{cells}{median(times[guide]) / median(times[name]):15.1f}")
    if min(accuracy.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --rounds")
    return {"loss by round": losses, "exchange, ms by round": times}


if __name__ == "__main__":
    main()
