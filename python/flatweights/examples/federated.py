"""Federated averaging: 100 clients of unequal data, some of which fail in every round.

Every image of handwritten digits belongs to one client. A few labels make up most of a client's
images, and some clients have one image, others 80. Each round, the server sends its weights to
clients that it draws; each takes some epochs of gradient descent on its own images; the server
averages their weights by the number of images, and takes a step of its optimizer: FedAvg (McMahan
et al., AISTATS 2017) takes the average, FedAdam (Reddi et al., ICLR 2021) goes towards it as Adam
does. Each server gets the same clients, and the same failures.

    flatweights examples federated
    flatweights examples --plot federated.png federated --failing 0.5
    flatweights examples federated --server FedAvg FedAvgM FedAdam FedYogi
    flatweights examples federated --server FedAvg --hostile 2 --rule mean trimmed_mean
    flatweights examples federated --server FedAvg --personal

With ``--hostile``, that many clients of each round send their own update multiplied by -5. Then the
mean does not learn. The rules of `flatweights.robust` do, if clients are alike enough to
distinguish hostile clients from the others (``--concentration 10``).

With ``--personal``, the last layer of a client never leaves it (FedPer: Arivazhagan et al.,
"Federated Learning with Personalization Layers", 2019): `TensorFlowVariables` leaves it out, so the
server averages only the layers before it. A client keeps its layer in a file. The accuracy is then
the mean of those of the round's clients, each on the digits whose labels it has.

A client keeps nothing else between rounds, so a few actors play them all. Clients that fail raise
an error; in one round of every ``--deaths``, one of them kills the process of its actor. Ray
restarts the process (``max_restarts``) and repeats the calls of other clients that waited there
(``max_task_retries``), except the one that died, which would die again. So the round lacks only the
clients that failed: `Round.failed` lists them, with the reasons.

For a model and data of your own, change `Client.build` and `split_data`.
"""

import argparse
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import ArrayLike, NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flatweights import FlatWeights, lerp_, robust
from flatweights.ray import FlatWorker, Round, average
from flatweights.server import FedAdam, FedAvg, FedAvgM, FedYogi, ServerOptimizer

BATCH, LEARNING_RATE = 8, 0.2  # of the clients
ENOUGH = 0.9
LAST = 5  # rounds whose mean accuracy is the final one, since single rounds jump
LINES = 10  # of progress, for each server
HEAD = "head"  # the layer that stays with each client, with --personal
LIE = 5.0  # a hostile client sends its update multiplied by minus this

Digits = tuple[NDArray[Any], NDArray[Any]]  # images and labels

SERVERS: dict[str, Callable[[FlatWeights], ServerOptimizer[FlatWeights]]] = {
    "FedAvg": FedAvg,
    "FedAvgM": partial(FedAvgM, momentum=0.5),
    "FedAdam": partial(FedAdam, learning_rate=0.02, tau=1e-3),
    "FedYogi": partial(FedYogi, learning_rate=0.02, tau=1e-3),
}

# The rules that can replace the mean, by the number of hostile clients of a round.
RULES: dict[str, Callable[[int], robust.Rule | None]] = {
    "mean": lambda hostile: None,
    "median": lambda hostile: robust.Median(),
    "trimmed_mean": lambda hostile: robust.TrimmedMean(hostile),
    "krum": lambda hostile: robust.Krum(hostile),
    "multi_krum": lambda hostile: robust.MultiKrum(hostile, hostile + 3),
    "geometric_median": lambda hostile: robust.GeometricMedian(),
}

# The results that a rule needs, in addition to twice the number of hostile ones.
MORE = {"trimmed_mean": 1, "krum": 3, "multi_krum": 3}


def split_by_label(
    labels: ArrayLike, clients: int, concentration: float, seed: int
) -> list[NDArray[np.intp]]:
    """Return the examples of each client: at least one, and each example once.

    A Dirichlet distribution gives the clients' shares of a label (Yurochkin et al., "Bayesian
    Nonparametric Federated Learning of Neural Networks", ICML 2019): near a ``concentration`` of
    0, a label has one client.
    """
    kinds, rng = np.asarray(labels), np.random.default_rng(seed)
    owners = np.empty(len(kinds), np.intp)
    for kind in np.unique(kinds):
        shares = rng.dirichlet(np.full(clients, concentration))
        chosen = kinds == kind
        owners[chosen] = rng.choice(clients, np.sum(chosen), p=shares)
    owners[rng.choice(len(kinds), clients, replace=False)] = range(clients)  # one for each
    return [np.flatnonzero(owners == client) for client in range(clients)]


def split_data(options: argparse.Namespace) -> tuple[list[Digits], Digits]:
    """Return the digits of each client, and those that no client has."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, random_state=options.seed)
    images, test_images, labels, test_labels = split
    parts = split_by_label(labels, options.clients, options.concentration, options.seed)
    return [(images[part], labels[part]) for part in parts], (test_images, test_labels)


class Client(FlatWorker):
    """Plays one client after another; between calls it keeps only the data."""

    def build(self, options: argparse.Namespace) -> Any:
        """Build the model; the same for each client."""
        import keras
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        tf.config.threading.set_intra_op_parallelism_threads(1)  # the actors share the cores
        self.options = options
        self.digits, self.test = split_data(options)
        keras.utils.set_random_seed(options.seed)
        hidden = [keras.layers.Dense(width, activation="relu") for width in (64, 32)]
        head = keras.layers.Dense(10, name=HEAD)
        self.model = keras.Sequential([keras.Input((64,)), *hidden, head])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
        self.head = TensorFlowVariables(self.model, only=HEAD)
        self.first_head = self.head.get_weights()
        return TensorFlowVariables(self.model, exclude=HEAD if options.personal else ())

    def take(self, weights: FlatWeights, client: int, home: Path | None) -> None:
        """Set the server's ``weights`` and, if clients have a ``home``, the client's own layer."""
        self.set_weights(weights)
        file = home and home / f"{client}.safetensors"
        if file and file.exists():
            self.head.load(file)
        elif file:
            self.head.set_weights(self.first_head)

    def train(
        self, weights: FlatWeights, number: int, client: int, fate: str, home: Path | None = None
    ) -> Any:
        """Train ``weights`` on the digits of ``client`` in a round; return them and their number.

        A client whose ``fate`` is "raises" or "dies" does that at the end instead. A client that
        "lies" returns its update with the opposite sign.
        """
        images, labels = self.digits[client]
        rng = np.random.default_rng([self.options.seed, number, client])
        self.take(weights, client, home)
        for _ in range(self.options.local_epochs):
            order = rng.permutation(len(labels))
            # Batches are of one size: the last one takes from the beginning again.
            for batch in np.resize(order, (-(-len(order) // BATCH), BATCH)):
                self.model.train_on_batch(images[batch], labels[batch])
        if fate == "dies":
            os._exit(1)
        if fate == "raises":
            raise ConnectionError(f"client {client} is off line")
        if home:
            self.head.save(home / f"{client}.safetensors")
        learned = self.get_weights()
        if fate == "lies":
            lerp_(learned, weights, 1 + LIE)
        return learned, len(labels)

    def accuracy(self, weights: FlatWeights) -> float:
        """Return the accuracy of ``weights`` on digits that no client has."""
        self.set_weights(weights)
        return self.score(*self.test)

    def own_accuracy(self, weights: FlatWeights, client: int, home: Path) -> float:
        """Return that of ``weights`` and the client's own layer, on digits of its labels."""
        self.take(weights, client, home)
        images, labels = self.test
        of_client = np.isin(labels, self.digits[client][1])
        return self.score(images[of_client], labels[of_client])

    def score(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Return the accuracy of the model."""
        return float(np.mean(np.argmax(self.model(images), axis=1) == labels))


def count_clients(options: argparse.Namespace) -> tuple[int, int, int]:
    """Return how many clients a round draws, and how many of them fail and lie."""
    count = max(1, round(options.fraction * options.clients))
    failing = min(round(options.failing * count), count - 1)
    return count, failing, min(options.hostile, count - failing - 1)


def draw_clients(number: int, options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return the clients of a round, and what each does: train, lie, raise or die."""
    rng = np.random.default_rng([options.seed, number])
    count, failing, lying = count_clients(options)
    fates = ["raises"] * failing + ["lies"] * lying
    fates += ["trains"] * (count - len(fates))
    if failing and options.deaths and number % options.deaths == options.deaths // 2:
        fates[0] = "dies"
    clients = rng.choice(options.clients, count, replace=False)
    return list(zip(clients.tolist(), rng.permutation(fates).tolist(), strict=True))


def play_round(
    actors: Sequence[Any],
    weights: Any,
    number: int,
    clients: Sequence[tuple[int, str]],
    rule: robust.Rule | None = None,
    home: Path | None = None,
) -> Round:
    """Let ``clients`` train from ``weights``; average by ``rule``, or weighted by their images."""
    refs = []
    for rank, (client, fate) in enumerate(clients):
        train = actors[rank % len(actors)].train
        if fate == "dies":  # repeating the call would kill the next process, too
            train = train.options(max_task_retries=0)
        refs.append(train.remote(weights, number, client, fate, home))
    if rule is not None:
        return average(refs, rule=rule, min_results=1)
    # Lies may make the mean diverge: that shows in the accuracy.
    return average(refs, lambda result: result[1], min_results=1, nonfinite="propagate")


def measure(
    actors: Sequence[Any],
    weights: Any,
    number: int,
    clients: Sequence[tuple[int, str]],
    home: Path | None,
) -> float:
    """Return the accuracy after a round: of the server's model, or the mean of its clients'."""
    if not home:
        return float(ray.get(actors[number % len(actors)].accuracy.remote(weights)))
    own = [
        actors[rank % len(actors)].own_accuracy.remote(weights, client, home)
        for rank, (client, _) in enumerate(clients)
    ]
    return float(np.mean(ray.get(own)))


def run_server(
    actors: Sequence[Any],
    optimizer: ServerOptimizer[FlatWeights],
    options: argparse.Namespace,
    rule: robust.Rule | None = None,
) -> tuple[list[float], dict[str, object]]:
    """Train for all rounds; return the accuracy after each, and counts for the table."""
    weights, accuracies, failures = ray.put(optimizer.weights), [], list[Exception]()
    folder = tempfile.TemporaryDirectory() if options.personal else None
    home = Path(folder.name) if folder else None
    for number in range(options.rounds):
        clients = draw_clients(number, options)
        result = play_round(actors, weights, number, clients, rule, home)
        weights = ray.put(optimizer.step(result.weights))
        accuracies.append(measure(actors, weights, number, clients, home))
        failures += result.failed.values()
        if (number + 1) % max(1, options.rounds // LINES) == 0:
            line = f"round {number + 1} of {options.rounds}: accuracy {accuracies[-1]:.3f}"
            print(line, flush=True)
    if folder:
        folder.cleanup()
    died = sum(isinstance(error, ray.exceptions.RayActorError) for error in failures)
    return accuracies, {"raised": len(failures) - died, "died": died}


def summarise(accuracies: Sequence[float]) -> dict[str, object]:
    """Return two accuracies, and the first round that was good enough."""
    enough = [number for number, accuracy in enumerate(accuracies, 1) if accuracy >= ENOUGH]
    return {
        "last accuracy": f"{accuracies[-1]:.3f}",
        f"mean of last {len(accuracies[-LAST:])}": f"{np.mean(accuracies[-LAST:]):.3f}",
        f"first {ENOUGH}": min(enough, default="never"),
    }


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=40, help="averages to take; default: %(default)s")
    add("--local-epochs", type=int, default=5, help="epochs of a client; default: %(default)s")
    add("--workers", type=int, default=2, help="actors; default: %(default)s")
    add("--clients", type=int, default=100, help="clients that have data; default: %(default)s")
    add("--fraction", type=float, default=0.2, help="clients of a round; default: 0.2 of all")
    add("--failing", type=float, default=0.2, help="clients that fail; default: 0.2 of a round")
    add("--deaths", type=int, default=20, help="rounds per death; 0: no deaths; default: 20")
    add("--concentration", type=float, default=0.1, help="likeness of clients; default: 0.1")
    servers = "server optimizers to compare; default: FedAvg FedAdam"
    add("--server", nargs="+", choices=SERVERS, default=["FedAvg", "FedAdam"], help=servers)
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    add("--hostile", type=int, default=0, help="clients of a round that lie; default: 0")
    add("--rule", nargs="+", choices=RULES, default=["mean"], help="averages; default: mean")
    add("--personal", action="store_true", help="the last layer stays with each client")
    options = parser.parse_args(arguments)
    for name, expected, is_valid in (
        ("rounds", "at least 1", options.rounds >= 1),
        ("local_epochs", "at least 1", options.local_epochs >= 1),
        ("workers", "at least 1", options.workers >= 1),
        ("clients", "1 to 1000", 1 <= options.clients <= 1000),
        ("fraction", "above 0, at most 1", 0 < options.fraction <= 1),
        ("failing", "at least 0, below 1", 0 <= options.failing < 1),
        ("deaths", "at least 0", options.deaths >= 0),
        ("hostile", "at least 0", options.hostile >= 0),
        ("concentration", "above 0, at most 1e9", 0 < options.concentration <= 1e9),
        ("seed", f"0 to {2**31 - 1}", 0 <= options.seed < 2**31),
    ):
        if not is_valid:
            value = getattr(options, name)
            parser.error(f"--{name.replace('_', '-')}: expected {expected}, got {value}")
    drawn, failing, _ = count_clients(options)
    for name in MORE.keys() & {*options.rule}:
        least = 2 * options.hostile + MORE[name]
        if drawn - failing < least:
            results = f"results in a round with --hostile {options.hostile}, got {drawn - failing}"
            parser.error(f"--rule {name}: expected at least {least} {results}")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run the program; return curves. It fails if too little is learned."""
    options = parse_options(arguments)
    # Clients fail on purpose, in every round: the table counts them.
    logging.getLogger("flatweights").setLevel(logging.ERROR)
    sizes = [len(labels) for _, labels in split_data(options)[0]]
    print(f"{options.clients} clients with {min(sizes)} to {max(sizes)} images each", flush=True)
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    client = ray.remote(max_restarts=-1, max_task_retries=-1)(Client)
    actors = [client.remote(options) for _ in range(options.workers)]
    start = ray.get(actors[0].get_weights.remote())
    curves, rows = dict[str, list[float]](), []
    for server, name in itertools.product(options.server, options.rule):
        title = server if options.rule == ["mean"] else f"{server}, {name}"
        print(f"{title}:", flush=True)
        optimizer, rule = SERVERS[server](start), RULES[name](options.hostile)
        curves[title], counts = run_server(actors, optimizer, options, rule)
        rows.append({"server": title, **summarise(curves[title]), **counts})
    print("".join(f"{title:<26}" for title in rows[0]))
    for row in rows:
        print("".join(f"{cell!s:<26}" for cell in row.values()))
    worst = min(np.mean(accuracies[-LAST:]) for accuracies in curves.values())
    if worst < ENOUGH and not options.hostile:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --rounds")
    whose = "of their own labels" if options.personal else "that no client has"
    return {f"accuracy on digits {whose} by round": curves}


if __name__ == "__main__":
    main()
