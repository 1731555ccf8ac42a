"""The plan of an exchange between nodes, the same on all of them. It does not import Ray.

The packed form of the model is cut into one shard per node. Each node sums its own ranks, sends
every other node that node's shard of the sum (reduce-scatter), averages its own shard over all
nodes, and sends the average to every other node (all-gather). The form of the sums determines the
bits:

- A node with few ranks sends their values unchanged, if these take no more bytes than a sum. If
  all nodes do so, the average has the bits of `flatweights.average` over all ranks.
- Otherwise a node sends its `RunningAverage`; sums are merged in the order of the nodes.
- With ``reduce_dtype="float32"``, a node sends the average of its ranks, in their own dtypes.
- Models that were encoded in 16 bits stay in 16 bits: a node sends a rank's own model, or the
  average of several, and the average of its shard, both rounded, with the rounding errors of
  earlier exchanges.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flatweights._average import average_used
from flatweights._dtypes import is_averaged
from flatweights._flatten import new_vector
from flatweights._layout import Layout
from flatweights._running_average import RunningAverage, running_of, state_of
from flatweights._sources import Kind, Template
from flatweights.ray.nodes._rounding import Coding, Residuals
from flatweights.ray.nodes._shards import Bytes, Model, Shard, model_of, shards_of

ReduceDType = Literal["float64", "float32"]
"""The dtype in which sums of several ranks travel between nodes."""


SMALL = 256 * 1024
"""Bytes of a model below which a round through the driver is faster."""


def check_reduce_dtype(reduce_dtype: str) -> None:
    """Raise `ValueError` unless ``reduce_dtype`` is one of the dtypes."""
    if reduce_dtype not in ("float64", "float32"):
        raise ValueError(f"reduce_dtype: expected 'float64' or 'float32', got {reduce_dtype!r}")


Form = Literal["values", "sum", "mean"]
"""The form in which a node sends the models of its ranks."""

Group = tuple[int, ...]


class Plan(NamedTuple):
    """One exchange.

    Attributes:
        number: Counts the exchanges of a group, from 1.
        template: The template of the models.
        groups: By node, its ranks whose models are averaged; empty for a node that only takes part.
        weights: By rank.
        reduce_dtype: See `ReduceDType`.
        blocks: The number of shards of each node, one behind the other: more than one, in an
            exchange that overlaps both steps. Everything about a shard then holds for each of
            these.
        coding: The models before they were encoded, if they are in 16 bits.
        settled: By node, the number of the last exchange that succeeded with it.
        residuals: The residuals of the node that works on the plan; None while the plan travels.
    """

    number: int
    template: Template
    groups: tuple[Group, ...]
    weights: Mapping[int, float]
    reduce_dtype: ReduceDType
    blocks: int = 1
    coding: Coding | None = None
    settled: tuple[int, ...] = ()
    residuals: Residuals | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards. If there are fewer shards than nodes, the last nodes have none."""
        return shards_of(self.template.layout, len(self.groups) * self.blocks)

    def in_blocks(self) -> Plan:
        """Return the same plan with the shard of each node cut into blocks."""
        nbytes = nbytes_of(self.template) // len(self.groups)
        return self._replace(blocks=min(max(1, nbytes // _BLOCK), _MOST_BLOCKS))

    def of_node(self, node: int) -> range:
        """Return the indices of the shards of ``node``."""
        return range(node * self.blocks, (node + 1) * self.blocks)

    def bounds(self, shard: int) -> slice:
        """Return the range of the bytes of a ``shard``."""
        shards = self.shards
        if shard >= len(shards):
            return slice(0, 0)
        return slice(shards[shard].begin, min(shards[shard].end, nbytes_of(self.template)))

    def form(self, node: int) -> Form:
        """Return the form in which ``node`` sends its models."""
        group, layout = self.groups[node], self.template.layout
        is_rounded = self.reduce_dtype == "float32" or self.coding is not None
        if is_rounded and len(group) > 1 and any(self.weights[k] for k in group):
            return "mean"
        if self.coding is not None:
            return "values"
        return "values" if len(group) * values_nbytes(layout) <= sum_nbytes(layout) else "sum"

    def merged_groups(self) -> tuple[Group, ...]:
        """Return the groups in the order of their merger; none if all nodes send values."""
        forms = {self.form(node) for node, group in enumerate(self.groups) if group}
        return () if forms <= {"values"} else tuple(filter(None, self.groups))

    def sizes(self, node: int, shard: int) -> list[int]:
        """Return the bytes of the buffers that ``node`` sends of a ``shard``."""
        bounds, form = self.bounds(shard), self.form(node)
        nbytes = bounds.stop - bounds.start
        sizes = [nbytes] * (len(self.groups[node]) if form == "values" else 1)
        if form == "sum":
            if not nbytes:
                return [0, 0, 0]
            layout = self.shards[shard].layout
            kept = sum(slot.nbytes for slot in layout.slots if not is_averaged(slot.dtype))
            return [sum_nbytes(layout), _WEIGHTS, kept]
        return sizes

    def new_contribution(self, node: int, shard: int) -> list[Bytes]:
        """Return buffers for the contribution of ``node`` to a ``shard``."""
        return [new_vector(size, _BYTE) for size in self.sizes(node, shard)]

    def contribution(self, node: int, shard: int, models: Mapping[int, Bytes]) -> list[Bytes]:
        """Return the contribution of ``node`` to a ``shard``, in the form of `new_contribution`.

        Args:
            node: The node.
            shard: The shard.
            models: All bytes of its ranks' models.
        """
        bounds, form = self.bounds(shard), self.form(node)
        parts = [models[rank][bounds] for rank in self.groups[node]]
        if bounds.stop == bounds.start:
            return self.new_contribution(node, shard)
        if form == "values":
            return parts
        layout, weights = self.shards[shard].layout, [self.weights[k] for k in self.groups[node]]
        if self.coding is not None:
            (mean,) = self.new_contribution(node, shard)
            self._round(shard, parts, weights, mean, of_node=True)
            return [mean]
        sources = [model_of(part, layout) for part in parts]
        if form == "mean":
            (mean,) = self.new_contribution(node, shard)
            average_used(sources, weights, out=model_of(mean, layout))
            return [mean]
        total = RunningAverage()
        total.add_all(sources, weights)
        memory, sum_weights, kept = state_of(total)
        kept_bytes = [_as_bytes(np.ascontiguousarray(part)) for part in kept.values()]
        return [
            _as_bytes(memory),
            _as_bytes(np.array(sum_weights, np.float64)),
            np.concatenate(kept_bytes) if kept_bytes else new_vector(0, _BYTE),
        ]

    def merge(self, shard: int, contributions: Sequence[Sequence[Bytes]], out: Bytes) -> None:
        """Write the average of a ``shard`` to ``out``.

        Args:
            shard: The shard.
            contributions: The contribution of each node.
            out: The bytes of the shard.
        """
        if not out.size:
            return
        layout = self.shards[shard].layout
        if self.coding is not None:
            sent: list[tuple[int, float, Bytes]] = []  # by the lowest rank
            for node, (group, parts) in enumerate(zip(self.groups, contributions, strict=True)):
                weights = [self.weights[rank] for rank in group]
                if self.form(node) == "mean":
                    group, weights = group[:1], [sum(weights)]
                sent += zip(group, weights, parts, strict=True)
            sent.sort(key=lambda one: one[0])
            _, weights, sources = map(list, zip(*sent, strict=True))
            self._round(shard, sources, weights, out, of_node=False)
            return
        target = model_of(out, layout)
        if not self.merged_groups():
            models = {
                rank: model_of(part, layout)
                for group, parts in zip(self.groups, contributions, strict=True)
                for rank, part in zip(group, parts, strict=True)
            }
            ranks = sorted(models)
            weights = [self.weights[rank] for rank in ranks]
            average_used([models[rank] for rank in ranks], weights, out=target)
            return
        total = RunningAverage()
        for node, (group, parts) in enumerate(zip(self.groups, contributions, strict=True)):
            form, weights = self.form(node), [self.weights[rank] for rank in group]
            if form == "values" and group:
                of_node = RunningAverage()
                of_node.add_all([model_of(part, layout) for part in parts], weights)
                total.merge(of_node)
            elif form == "mean":
                total.add(model_of(parts[0], layout), sum(weights))
            elif form == "sum":
                total.merge(_sum_of(parts, layout, target))
        total.mean(out=target)

    def _round(
        self, shard: int, sources: list[Bytes], weights: list[float], out: Bytes, *, of_node: bool
    ) -> None:
        assert self.coding is not None
        assert self.residuals is not None
        shards = self.template.layout, len(self.groups) * self.blocks
        self.residuals.round(shards, shard, self.coding, sources, weights, out, of_node=of_node)


_BYTE = np.dtype(np.uint8)
_BLOCK = 512 << 10  # bytes of a block: each costs some calls of Python
_MOST_BLOCKS = 32
_WEIGHTS = 24  # bytes of the weights of a sum


def nbytes_of(template: Template) -> int:
    """Return the bytes of a packed model; for an array, the bytes of its elements."""
    layout = template.layout
    return layout.slots[0].nbytes if template.kind is Kind.ARRAY else layout.nbytes


@functools.lru_cache(maxsize=64)
def values_nbytes(layout: Layout) -> int:
    """Return the bytes of the parts of a model of ``layout`` that have a mean."""
    return sum(slot.nbytes for slot in layout.slots if is_averaged(slot.dtype))


@functools.lru_cache(maxsize=64)
def sum_nbytes(layout: Layout) -> int:
    """Return the bytes of a sum over models of ``layout``."""
    per_number = {"f4": 8, "f8": 16, "c8": 16, "c16": 32}
    total = 0
    for slot in layout.slots:
        if is_averaged(slot.dtype):
            total += slot.size * per_number.get(f"{slot.dtype.kind}{slot.dtype.itemsize}", 8)
    return total


def _sum_of(contribution: Sequence[Bytes], layout: Layout, like: Model) -> RunningAverage:
    """Return the `RunningAverage` that a contribution holds, of models like ``like``."""
    memory, weights, kept = contribution
    parts, start = {}, 0
    for i, slot in enumerate(layout.slots):
        if not is_averaged(slot.dtype):
            parts[i] = kept[start : start + slot.nbytes].view(slot.dtype).reshape(slot.shape)
            start += slot.nbytes
    base, ratios, total = weights.view(np.float64).tolist()
    sums = memory.view(np.float64)
    return running_of(RunningAverage, Template.of(like), sums, (base, ratios, total), parts)


def _as_bytes(array: Any) -> Bytes:
    view: Bytes = array.reshape(-1).view(np.uint8)
    return view
