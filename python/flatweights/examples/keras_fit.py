"""Compiled Keras models that fit in actors: only the lines that average are new.

`Network` is an actor as Ray's guide has it: a compiled model that can `fit`, and Keras's own
`get_weights` and `set_weights`. Between two fits the driver averages the weights, in the way of
the guide (`exchange_as_in_the_guide`) and in that of flatweights (`exchange`): these lines are the
whole difference. `FlatNetwork` is the same actor as a `FlatWorker` in a `WorkerGroup`: its weights
travel as one buffer instead of a list of arrays, and the exchange is one line.

    python -m flatweights.examples.keras_fit
    python -m flatweights.examples.keras_fit --workers 4 --rounds 20 --plot keras_fit.png

For a model of your own, change `compile_model`; for your data, `Network.__init__`. Each actor's
optimizer keeps its own state (here: Adam's moments). To average that too, build the optimizer, and
return ``[self.model, self.model.optimizer]`` from `FlatNetwork.build`.
"""

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import ray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup, average

ENOUGH = 0.95


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
        digits, self.test = examples.load_digits(seed)
        self.digits = digits.shard(rank, workers)
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
    """Average the weights where they lie in the object store."""
    result = average([worker.get_weights.remote() for worker in workers])
    ray.get([worker.set_weights.remote(result.ref) for worker in workers])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if too little is learned."""
    options = examples.make_parser(
        __doc__,
        "the losses, and the time of each exchange",
        workers=(2, "actors of either class"),
        rounds=(10, "fits, each with an exchange after it"),
    ).parse_args(arguments)
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

    rows = [
        {
            "": name,
            "last loss": f"{losses[network][-1]:.4f}",
            "accuracy": f"{accuracy[network]:.3f}",
            "exchange per round": f"{median(times[name]):.1f} ms",
            "times as fast": f"{median(times[guide]) / median(times[name]):.1f}",
        }
        for name, network in zip(ways, ["Network", "Network", "FlatNetwork"], strict=True)
    ]
    rounds = range(1, options.rounds + 1)
    panels = [
        examples.Panel("loss", "round", {k: (rounds, v) for k, v in losses.items()}, "log"),
        examples.Panel("exchange, ms", "round", {k: (rounds, v) for k, v in times.items()}),
    ]
    examples.report(rows, options.plot, "Compiled Keras models, averaged between fits", *panels)
    if min(accuracy.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main)
