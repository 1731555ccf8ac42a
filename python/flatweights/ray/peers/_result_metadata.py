"""The results of the ranks of one node in one round; the driver gets metadata of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flatweights._sources import Template
from flatweights._trees import Tree
from flatweights.ray.nodes._rounding import Coding
from flatweights.ray.nodes._shards import Bytes, canonical, packed_bytes
from flatweights.ray.results._result import split, weight_of
from flatweights.ray.results._wire import nbytes_of, widen
from flatweights.ray.support._errors import portable
from flatweights.wire import Difference


class ResultMetadata(NamedTuple):
    """The driver's metadata of a rank's result, which stays on its node.

    Attributes:
        template: The template of the weights; dicts by sorted keys.
        containers: The containers of a dict, a list or a tree, in their own order.
        coding: The weights before they were encoded, if they stay in 16 bits.
        weight: Its weight, if a function of the result determines it.
        extras: The part of the result beside the weights.
        not_finite: The error about NaN or infinity, if the weights were screened and hold any.
        nbytes: Bytes of the returned weights.
        error: The caller's mistake for which it cannot be averaged, if there is one.
    """

    template: Template | None = None
    containers: Tree | None = None
    coding: Coding | None = None
    weight: float | None = None
    extras: Any = None
    not_finite: Exception | None = None
    nbytes: int = 0
    error: Exception | None = None


class ReadOptions(NamedTuple):
    """The way in which results are read.

    Attributes:
        screen: Whether to look for NaN and infinity in them.
        weigh: A function of a result that returns its weight.
        is_encoded: Whether weights in 16 bits stay so.
    """

    screen: bool
    weigh: Callable[[Any], float] | None
    is_encoded: bool = False


def read_into(
    models: dict[int, Bytes], rank: int, result: Any, reading: ReadOptions
) -> ResultMetadata:
    """Keep the bytes of the weights in ``result``, without a copy; return metadata.

    Args:
        models: By rank, all bytes of the packed form; this adds those of ``rank``.
        rank: The rank that returned it.
        result: Weights, or weights and extras.
        reading: The way to read it.
    """
    try:
        received, extras = split(result)
        coding = None
        if reading.is_encoded and isinstance(received, Difference):
            coding = Coding(received.layout, received.base)
            model, containers = received.values, None
        else:
            model, containers = canonical(widen(received))
        where = f"rank {rank}"
        template = Template.of(model, where)
        weight = reading.weigh and weight_of(reading.weigh, result, where)
        not_finite = None
        if reading.screen:
            not_finite = template.find_nonfinite(template.read(model, where), where)
        nbytes = nbytes_of(received) or template.layout.nbytes
        models[rank] = packed_bytes(template, model)
        return ResultMetadata(template, containers, coding, weight, extras, not_finite, nbytes)
    except Exception as error:  # the driver raises it
        return ResultMetadata(error=portable(error))


class Exchanged(NamedTuple):
    """An average that nodes have exchanged, and the agents that have it.

    Attributes:
        number: The number of the exchange.
        tokens: The tokens of the agents.
        difference: The difference that they have, if models are in 16 bits.
    """

    number: int
    tokens: frozenset[str]
    difference: Difference | None = None
