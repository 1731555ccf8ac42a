"""Federated averaging: 100 clients of unequal data, some of which fail in every round.

Every image of handwritten digits belongs to one client. A few labels make up most of a client's
images, and some clients have two images, others 55. Each round, the server sends its weights to
clients that it draws; each takes some epochs of gradient descent on its own images; the server
averages their weights by the number of images, and takes a step of its optimizer: FedAvg (McMahan
et al., AISTATS 2017) takes the average, FedAdam (Reddi et al., ICLR 2021) goes towards it as Adam
does. Each server gets the same clients, and the same failures.

    python -m flatweights.examples.federated
    python -m flatweights.examples.federated --failing 0.5 --plot federated.png
    python -m flatweights.examples.federated --server FedAvg FedAvgM FedAdam FedYogi

A client keeps nothing between rounds, so a few actors play them all. Clients that fail raise an
error; in one round of every ``--deaths``, one of them kills the process of its actor. Ray
restarts the process (``max_restarts``) and repeats the calls of other clients that waited there
(``max_task_retries``), except the one that died, which would die again. So the round lacks the
clients that failed, and no others: `Round.failed` says which, and why.

For a model and data of your own, change `Client.build` and `split_data`.
"""

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import ArrayLike, NDArray

from flatweights import FlatWeights, examples
from flatweights.ray import FlatWorker, Round, WorkerGroup, average
from flatweights.server import FedAdam, FedAvg, FedAvgM, FedYogi, ServerOptimizer

BATCH, LEARNING_RATE = 8, 0.2  # of the clients
ENOUGH = 0.9
LAST = 5  # rounds whose mean accuracy is the final one, since single rounds jump

SERVERS: dict[str, Callable[[FlatWeights], ServerOptimizer[FlatWeights]]] = {
    "FedAvg": FedAvg,
    "FedAvgM": partial(FedAvgM, momentum=0.5),
    "FedAdam": partial(FedAdam, learning_rate=0.02, tau=1e-3),
    "FedYogi": partial(FedYogi, learning_rate=0.02, tau=1e-3),
}


def split_by_label(
    labels: ArrayLike, clients: int, concentration: float, seed: int
) -> list[NDArray[np.intp]]:
    """Return the examples of each client: at least one, and each example once.

    As in Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification", 2019, a Dirichlet distribution around the mix of all labels gives the
    mix of each client: near a ``concentration`` of 0, each has few labels. A client whose labels
    are used up takes from those that are left. Unlike there, the numbers of examples differ too.
    """
    kinds, rng = np.asarray(labels), np.random.default_rng(seed)
    stacks = [list(rng.permutation(np.flatnonzero(kinds == kind))) for kind in np.unique(kinds)]
    overall = np.array([len(stack) / len(kinds) for stack in stacks])
    sizes = 1 + rng.multinomial(len(kinds) - clients, rng.dirichlet(np.full(clients, 2.0)))
    parts = [np.empty(size, np.intp) for size in sizes]
    for part in parts:
        mix = rng.dirichlet(concentration * overall)
        for i in range(len(part)):
            left = np.array([len(stack) for stack in stacks])
            chances = np.where(left > 0, mix, 0.0)
            chances = chances if chances.sum() > 0 else left
            part[i] = stacks[rng.choice(len(stacks), p=chances / chances.sum())].pop()
    return parts


def split_data(options: argparse.Namespace) -> tuple[list[examples.Digits], examples.Digits]:
    """Return the digits of each client, and those that no client has."""
    (images, labels), test = examples.load_digits(options.seed)
    parts = split_by_label(labels, options.clients, options.concentration, options.seed)
    return [examples.Digits(images[part], labels[part]) for part in parts], test


class DropoutError(RuntimeError):
    """A client went away before it could send its weights."""


class Client(FlatWorker):
    """Plays one client after another; between calls it keeps the data alone."""

    def build(self, options: argparse.Namespace) -> Any:
        """Build the model; the same for each client."""
        examples.prepare_tensorflow()
        import keras

        self.options = options
        self.digits, self.test = split_data(options)
        keras.utils.set_random_seed(options.seed)
        hidden = [keras.layers.Dense(width, activation="relu") for width in (64, 32)]
        self.model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
        return self.model

    def train(self, weights: FlatWeights, number: int, client: int, fate: str) -> Any:
        """Train ``weights`` on the digits of ``client`` in a round; return them and their number.

        A client whose ``fate`` is "raises" or "dies" does that in the end instead.
        """
        images, labels = self.digits[client]
        rng = np.random.default_rng([self.options.seed, number, client])
        self.set_weights(weights)
        for _ in range(self.options.local_epochs):
            order = rng.permutation(len(labels))
            # Batches are of one size: the last one takes from the beginning again.
            for batch in np.resize(order, (-(-len(order) // BATCH), BATCH)):
                self.model.train_on_batch(images[batch], labels[batch])
        if fate == "dies":
            os._exit(1)
        if fate == "raises":
            raise DropoutError(f"client {client} is off line")
        return self.get_weights(), len(labels)

    def accuracy(self, weights: FlatWeights) -> float:
        """Return the accuracy of ``weights`` on digits that no client has."""
        self.set_weights(weights)
        images, labels = self.test
        return float(np.mean(np.argmax(self.model(images), axis=1) == labels))


def draw_clients(number: int, options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return the clients of a round, and the fate of each: "trains", "raises" or "dies"."""
    rng = np.random.default_rng([options.seed, number])
    count = max(1, round(options.fraction * options.clients))
    failing = min(round(options.failing * count), count - 1)
    fates = ["raises"] * failing + ["trains"] * (count - failing)
    if failing and options.deaths and number % options.deaths == options.deaths // 2:
        fates[0] = "dies"
    clients = rng.choice(options.clients, count, replace=False)
    return list(zip(clients.tolist(), rng.permutation(fates).tolist(), strict=True))


def play_round(
    actors: Sequence[Any], weights: Any, number: int, clients: Sequence[tuple[int, str]]
) -> Round:
    """Let ``clients`` train from ``weights``; average their weights by their numbers of images."""
    refs = []
    for rank, (client, fate) in enumerate(clients):
        train = actors[rank % len(actors)].train
        if fate == "dies":  # repeated, it would end the next process too
            train = train.options(max_task_retries=0)
        refs.append(train.remote(weights, number, client, fate))
    return average(refs, weights=lambda result: result[1], min_results=1)


def run_server(
    actors: Sequence[Any], optimizer: ServerOptimizer[FlatWeights], options: argparse.Namespace
) -> tuple[list[float], dict[str, object]]:
    """Train for all rounds; return the accuracy after each, and counts for the table."""
    weights, nbytes = ray.put(optimizer.weights), 0
    refs, failures = [], list[Exception]()
    for number in range(options.rounds):
        result = play_round(actors, weights, number, draw_clients(number, options))
        weights = ray.put(optimizer.step(result.weights))
        refs.append(actors[number % len(actors)].accuracy.remote(weights))
        failures += result.failed.values()
        nbytes += result.nbytes
    died = sum(isinstance(error, ray.exceptions.RayActorError) for error in failures)
    counts = {"raised": len(failures) - died, "died": died, "MB received": f"{nbytes / 1e6:.1f}"}
    return ray.get(refs), counts


def summarise(accuracies: Sequence[float]) -> dict[str, object]:
    """Return the final accuracy, the first round that was good enough, and the number of rounds."""
    enough = [number for number, accuracy in enumerate(accuracies, 1) if accuracy >= ENOUGH]
    return {
        "accuracy": f"{np.mean(accuracies[-LAST:]):.3f}",
        f"first {ENOUGH}": min(enough, default="never"),
        "rounds": len(accuracies),
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = examples.make_parser(
        __doc__,
        "accuracy over rounds",
        rounds=(40, "averages to take"),
        local_epochs=(5, "over a client's data, in a round"),
        workers=(2, "actors"),
    )
    add, integer, positive = parser.add_argument, examples.integer, examples.positive
    add("--clients", type=integer(1, 1000), default=100, help="that have data")
    add("--fraction", type=positive(1), default=0.2, help="of the clients, drawn for a round")
    add("--failing", type=examples.fraction, default=0.2, help="share of those drawn that fails")
    add("--deaths", type=integer(0), default=20, help="rounds per death of a process; 0: none")
    add("--concentration", type=positive(), default=1.0, help="how alike the mixes of labels are")
    add("--server", nargs="+", choices=SERVERS, default=["FedAvg", "FedAdam"], help="to compare")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if too little is learned."""
    options = parse_options(arguments)
    # Clients fail on purpose, in every round: the table counts them.
    logging.getLogger("flatweights").setLevel(logging.ERROR)
    sizes = [len(digits.labels) for digits in split_data(options)[0]]
    fates = [fate for _, fate in draw_clients(0, options)]
    print(
        f"{options.clients} clients with {min(sizes)} to {max(sizes)} images each; "
        f"{len(fates)} take part in a round, {len(fates) - fates.count('trains')} of them fail",
        flush=True,
    )
    examples.start_ray(options.workers)
    # Whatever its log level, Ray prints the reason of each death.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        client = ray.remote(max_restarts=-1, max_task_retries=-1)(Client)
        actors = [client.remote(options) for _ in range(options.workers)]
        start = ray.get(actors[0].get_weights.remote())
        runs = {name: run_server(actors, SERVERS[name](start), options) for name in options.server}
        exchange = examples.time_exchange(WorkerGroup(actors))
    print(exchange)
    rows = [
        {"server": name, **summarise(accuracies), **counts}
        for name, (accuracies, counts) in runs.items()
    ]
    rounds = range(1, options.rounds + 1)
    curves = {name: (rounds, accuracies) for name, (accuracies, _) in runs.items()}
    panel = examples.Panel("accuracy on digits that no client has", "round", curves)
    examples.report(rows, options.plot, "Digits of clients, some of which fail", panel)
    if min(np.mean(accuracies[-LAST:]) for accuracies, _ in runs.values()) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --rounds")


if __name__ == "__main__":
    examples.run(main)
