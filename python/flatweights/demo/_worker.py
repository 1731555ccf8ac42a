"""The Ray actor of the demo."""

import hashlib
from time import perf_counter
from typing import Any, Literal, NamedTuple

from flatweights.demo._digits import Examples
from flatweights.demo._options import Options
from flatweights.ray import FlatWorker

Way = Literal["flat", "dict"]


class Worked(NamedTuple):
    """Seconds that a worker took for its part before the average."""

    compute: float
    gather: float


class Received(NamedTuple):
    """Seconds that a worker took for its part after the average."""

    scatter: float
    compute: float


class DigitsWorker(FlatWorker):
    """Trains two replicas on one shard of the data, one for each way of exchange.

    Both in one process: it imports TensorFlow once, and one replica sleeps while the
    other works.
    """

    def build(self, options: Options, rank: int, shard: Examples, test: Examples) -> Any:
        """Build the replicas; return the model whose weights travel as one buffer."""
        from flatweights.demo import _exchange, _replica

        _replica.make_tensorflow_deterministic()
        flat, rival = (
            _replica.Replica(options.mode, options.local_steps, options.seed, rank, shard)
            for _ in range(2)
        )
        self._test = test
        self._replicas: dict[Way, _replica.Replica] = {"flat": flat, "dict": rival}
        self._exchanges: dict[Way, _exchange.Exchange]
        if options.mode == "weights":
            self._exchanges = {
                "flat": _exchange.FlatWeightsExchange(self),
                "dict": _exchange.DictWeightsExchange(rival.model.trainable_variables),
            }
        else:
            self._exchanges = {
                "flat": _exchange.FlatGradientsExchange(flat.model.trainable_variables),
                "dict": _exchange.DictGradientsExchange(rival.model.trainable_variables),
            }
        return flat.model

    def start_from(self, weights: Any) -> None:
        """Set both replicas' weights."""
        self.set_weights(weights)
        self._replicas["dict"].model.set_weights(list(weights.values()))

    def work(self, way: Way) -> tuple[Any, Worked]:
        """Train; return what is to be averaged, and the time."""
        start = perf_counter()
        gradients = self._replicas[way].compute()
        computed = perf_counter()
        sent = self._exchanges[way].gather(gradients)
        return sent, Worked(computed - start, perf_counter() - computed)

    def receive(self, way: Way, average: Any) -> Received:
        """Take over the average; return the time."""
        start = perf_counter()
        gradients = self._exchanges[way].scatter(average)
        scattered = perf_counter()
        self._replicas[way].finish(gradients)
        return Received(scattered - start, perf_counter() - scattered)

    def evaluate(self, way: Way) -> tuple[float, float]:
        """Return loss and accuracy on the examples held out."""
        return self._replicas[way].evaluate(self._test)

    def digest(self) -> str:
        """Return the SHA-256 of the weights in packed form."""
        return hashlib.sha256(self.get_weights().buffer.data).hexdigest()
