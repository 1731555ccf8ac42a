"""The cost of a round between nodes by each transport: a model of links and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flatweights._dtypes import is_averaged
from flatweights._numbers import check_count, readable_bytes
from flatweights.ray.nodes._plan import SMALL

TransportName = Literal["the guide's loop", "shm", "driver", "streams"]

# By transport, the share of a link's rate that the weights of a round get, after headers and
# waiting, as measured over links of 300 to 1,000 Mbit/s; and the other seconds of a round.
_SHARE: Mapping[TransportName, float] = {
    "the guide's loop": 0.93,
    "shm": 1.0,
    "driver": 0.93,
    "streams": 0.88,
}
_FIXED: Mapping[TransportName, float] = {
    "the guide's loop": 8e-3,
    "shm": 0.3e-3,
    "driver": 6e-3,
    "streams": 10e-3,
}


# Bytes per second that the processes of a node read and write together: as measured over channels,
# and as fitted to rounds between nodes that shared a machine.
_CHANNEL_MEMORY = 50e9
_MEMORY = 10e9

# Fetches of published weights that pass one link one after the other, at each level of their tree.
_FETCHES_OF_LEVEL = 2.4
_FIXED_OF_LEVEL = 5e-3  # seconds

_LEGEND = (
    "M: the bytes of the model. N workers on K nodes, W on each. Memory: on the node that needs",
    "most, beside the workers' own models. The arrow: the way that a group takes by itself.",
)


@dataclass(frozen=True)
class TransportCost:
    """The cost of a round by one transport.

    Attributes:
        transport: ``"the guide's loop"`` (`ray.get` of all results in the driver, ``sum(ws) / n``,
            one `ray.put`); ``"driver"``, where a group averages in the driver; ``"streams"``, where
            one agent per node exchanges shards with the others.
        options: The option of the group: ``reduce_dtype="float32"`` or ``wire_dtype="bfloat16"``;
            else empty.
        sent: Bytes of weights through the busiest link out of a node.
        received: Bytes of weights through the busiest link into one.
        critical: Bytes that must pass one link one after the other: a round takes at least their
            time.
        seconds: The time of a round, without the workers' training.
        formula: The bytes of the busiest link in each direction: M is the model, N the number of
            workers, K of nodes, W of workers on each node.
        kept: Bytes of memory for weights on the node that needs most, beside the workers' own
            models; for agents, an estimate.
    """

    transport: TransportName
    options: str
    sent: float
    received: float
    critical: float
    seconds: float
    formula: str
    kept: float


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a round by each transport, and the one that a group chooses.

    Attributes:
        transports: The cost of a round, by transport and options.
        chosen: The cost of the transport that a group chooses by itself.
        title: The arguments, as text.
        published: The seconds until weights that a `flatweights.ray.Publisher` publishes are set by
            a `flatweights.ray.Subscriber` in each worker.
    """

    transports: tuple[TransportCost, ...]
    chosen: TransportCost
    title: str
    published: float

    def __getitem__(self, key: str | tuple[str, str]) -> TransportCost:
        """Return the cost of a transport, or of one with options."""
        transport, options = (key, "") if isinstance(key, str) else key
        for cost in self.transports:
            if (cost.transport, cost.options) == (transport, options):
                return cost
        raise KeyError(key)

    def __str__(self) -> str:
        """A table for a terminal; the chosen transport has an arrow."""
        rows = [("", "transport", "out", "in", "seconds", "memory", "bytes of the busiest link")]
        for cost in self.transports:
            mark = "->" if cost is self.chosen else ""
            name = f"{cost.transport}, {cost.options}" if cost.options else cost.transport
            sizes = (readable_bytes(cost.sent), readable_bytes(cost.received))
            seconds = f"{cost.seconds:,.0f}" if cost.seconds >= 100 else f"{cost.seconds:.3g}"
            rows.append((mark, name, *sizes, seconds, readable_bytes(cost.kept), cost.formula))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            mark, name, *numbers, formula = row
            cells = [mark.ljust(widths[0]), name.ljust(widths[1])]
            cells += [text.rjust(widths[2 + i]) for i, text in enumerate(numbers)]
            lines.append("  ".join([*cells, formula]).rstrip())
        published = f"Published weights are set by all workers after {self.published:.3g} s."
        return "\n".join([self.title, "", *lines, "", published, "", *_LEGEND])


def plan(
    *,
    nodes: int,
    workers: int,
    model: int | str,
    link: float | str | None = None,
    dtype: str = "float32",
    memory: float | str | None = None,
) -> CostEstimate:
    """Return the cost of a round between nodes, by each transport that it can use.

    Each node has one link, whose two directions work at the same time. The driver is on a node with
    workers. Times were fitted to links of 300 to 1,000 Mbit/s; on faster links, processors and
    memory matter more than this model assumes.

    >>> print(plan(nodes=4, workers=8, model="500MB", link="10Gbit")["driver"].formula)
    driver: (N - W) M in, (K - 1) M out

    Args:
        nodes: The number of nodes with workers.
        workers: The number of workers on each.
        model: Bytes of the model, such as ``500_000_000`` or ``"500MB"``.
        link: Bits per second of a node's link in each direction, such as ``10e9`` or ``"10Gbit"``.
            One node needs none.
        dtype: The dtype of most of the weights.
        memory: Bytes per second that the processes of a node read and write together, such as
            ``10e9`` or ``"10GB"``. If None, the measured rates: 50 GB over channels, 10 GB
            elsewhere.

    Raises:
        ValueError: If a number is not positive, a text is not a number with a unit, or several
            nodes have no ``link``.
        TypeError: If ``nodes`` or ``workers`` is not an integer, or weights of ``dtype`` have no
            mean.
    """
    nbytes = _number(model, "model", _BYTES)
    check_count(nodes, "nodes")
    if link is None and nodes > 1:
        raise ValueError(f"link: expected {_BITS}, for {nodes} nodes, got none")
    bits = math.inf if link is None else _number(link, "link", _BITS)
    setting = _Setting(
        nodes=nodes,
        workers=check_count(workers, "workers"),
        nbytes=nbytes,
        link=bits / 8,
        memory=None if memory is None else _number(memory, "memory", _BYTES),
        wide=_width_of_sums(dtype),
        is_float32=np.dtype(dtype) == np.float32,
    )
    title = f"{_counted(nodes, 'node')} of {_counted(workers, 'worker')}, "
    title += readable_bytes(nbytes)
    if nodes > 1:
        title += f", {bits / 1e9:g} Gbit/s"
    transports = tuple(setting.transports())
    best = "shm" if nodes == 1 else "streams" if nbytes >= SMALL else "driver"
    chosen = next(cost for cost in transports if cost.transport == best and not cost.options)
    return CostEstimate(transports, chosen, title, setting.published())


@dataclass(frozen=True)
class _Setting:
    """The setting of a plan.

    Attributes:
        nodes: The number of nodes with workers.
        workers: The number of workers on each.
        nbytes: Bytes of the model.
        link: Bytes per second of a link in one direction.
        memory: Bytes per second that a node's processes read and write.
        wide: Bytes of a sum for each byte of a model.
        is_float32: Whether the weights have this dtype, which may travel in 16 bits.
    """

    nodes: int
    workers: int
    nbytes: float
    link: float
    memory: float | None
    wide: float
    is_float32: bool

    def transports(self) -> Iterator[TransportCost]:
        """Yield the costs of all transports."""
        yield self._by_driver("the guide's loop")
        if self.nodes == 1:
            yield self._by_channels()
        yield self._by_driver("driver")
        if self.nodes > 1:
            yield self._by_agents()
        if self.nodes > 1 and self.workers > 1:
            yield self._by_agents(sums=1.0, options='reduce_dtype="float32"')
        if self.nodes > 1 and self.is_float32:
            yield self._by_agents(sums=0.5, mean=0.5, options='wire_dtype="bfloat16"')

    def published(self) -> float:
        """Return the seconds until published weights are set by all workers."""
        # The publisher writes them, its proxy and the relay of another node copy them, and all
        # workers set them. Of a tree in which each relay tells two more, and all fetch from any
        # that has them, as many levels as there are; as simulated with up to 125 nodes.
        copies = (1 if self.nodes == 1 else 3) + self.workers
        levels = math.log2((self.nodes + 1) / 2)
        passed = min(self.nodes - 1, _FETCHES_OF_LEVEL * levels)
        seconds = levels * _FIXED_OF_LEVEL
        if passed:
            seconds += passed * self.nbytes / (self.link * _SHARE["driver"])
        return seconds + 2 * copies * self.nbytes / (self.memory or _MEMORY)

    def _by_channels(self) -> TransportCost:
        # Each worker gathers into its segment and sets from the driver's segment; the driver
        # averages.
        moved = 5 * self.workers + 1
        kept = self.workers + 3  # a segment of each worker, and the driver's
        formula = "none: the workers and the driver map the same memory"
        rate = self.memory or _CHANNEL_MEMORY
        return self._cost("shm", "", (0, 0, 0), moved, formula, kept, rate)

    def _by_driver(self, transport: TransportName) -> TransportCost:
        every = self.nodes * self.workers
        # All workers of the node gather and set; the driver reads all and writes one. The guide's
        # loop copies into the store, adds with a temporary for each, and puts.
        moved = 4 * self.workers + every + 3
        if transport == "the guide's loop":
            moved = 6 * self.workers + 3 * every + 3
        received, returned = every - self.workers, self.nodes - 1
        sent = max(returned, self.workers) if returned else 0
        formula = "driver: (N - W) M in, (K - 1) M out"
        links = (sent, received, received + returned)
        return self._cost(transport, "", links, moved, formula, kept=every + 2)

    def _by_agents(
        self, *, sums: float | None = None, mean: float = 1.0, options: str = ""
    ) -> TransportCost:
        # A node sends the values of its ranks as long as they take no more bytes than a sum.
        sums = min(self.workers, self.wide) if sums is None else sums
        links = (self.nodes - 1) / self.nodes * (sums + mean)
        moved = 4 * self.workers
        beside = self.workers + 3 * (sums + mean)  # they are summed and averaged while they travel
        formula = f"(K - 1) / K x ({sums:g} + {mean:g}) M each way"
        kept = self.workers + 3 + sums + mean
        return self._cost(
            "streams", options, (links, links, links), moved, formula, kept, beside=beside
        )

    def _cost(
        self,
        transport: TransportName,
        options: str,
        links: Iterable[float],
        moved: float,
        formula: str,
        kept: float,
        rate: float | None = None,
        beside: float = 0.0,
    ) -> TransportCost:
        """Return the cost of a transport.

        Args:
            transport: The transport.
            options: See `TransportCost`.
            links: Models sent, received, and those that pass one link one after the other.
            moved: Models that pass the memory of a node.
            formula: See `TransportCost`.
            kept: Models that it keeps in memory.
            rate: Bytes per second of a node's memory, if not the usual rate.
            beside: Models that pass it while others pass the links.
        """
        rate = rate or self.memory or _MEMORY
        sent, received, critical = (count * self.nbytes for count in links)
        seconds = max(critical / (self.link * _SHARE[transport]), beside * self.nbytes / rate)
        seconds += moved * self.nbytes / rate + _FIXED[transport]
        nbytes = kept * self.nbytes
        return TransportCost(transport, options, sent, received, critical, seconds, formula, nbytes)


_BYTES = "bytes, such as 500_000_000 or '500MB'"
_BITS = "bits per second, such as 10e9 or '10Gbit'"
_PREFIXES = ("", "k", "m", "g", "t")
_TEXT = re.compile(
    r"([0-9][0-9_]*(?:\.[0-9]+)?) *([kmgt]?)(i?)(b|bytes?|bits?)?(?:/s)?", re.IGNORECASE
)


def _number(value: float | str, name: str, expected: str) -> float:
    """Return a number of bytes or bits, given as a number or a text with a unit.

    Raises:
        ValueError: If it is not positive, or not such a text.
    """
    number = _value_of(value, is_bits=expected is _BITS) if isinstance(value, str) else value
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return float(number)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _value_of(text: str, *, is_bits: bool) -> float | None:
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, binary, unit = match.groups()
    if is_bits and not (prefix or unit):
        return None  # no link has so few bits: the unit was forgotten
    in_bits = (unit or "").lower().startswith("bit") or (is_bits and unit is None)
    if in_bits is not is_bits:
        return None
    step = 1024.0 if binary else 1000.0
    return float(number) * step ** _PREFIXES.index(prefix.lower())


def _width_of_sums(dtype: str) -> float:
    """Return the bytes of a sum for each byte of a model of ``dtype``."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected the name of a dtype, got {dtype!r}") from None
    if not is_averaged(kind):
        raise TypeError(f"dtype: expected one that has a mean, got {dtype!r}")
    return 4.0 if kind.itemsize == 2 else 2.0  # float64 and its compensation
