"""An average that lies in pieces on several nodes, and the round that it came of."""

from collections.abc import Hashable, Sequence
from typing import Any

import ray

from flatweights._layout import Layout
from flatweights._sources import Kind, Template
from flatweights.ray._ranges import as_kind, assemble, in_place
from flatweights.ray._round import Round


class ShardedWeights:
    """A model whose ranges are objects of their own, on the nodes that averaged them.

    It is small, and can be sent to any process as it is: the references travel in it. Whoever
    wants the model asks for it, and Ray moves the pieces from node to node.
    """

    def __init__(self, template: Template, keys: Sequence[Hashable], refs: Sequence[Any]) -> None:
        """Take one reference per range.

        Args:
            template: What it is a model of; private to the package.
            keys: The keys of a dict in their order.
            refs: References to the ranges.
        """
        self._template = template
        self._keys = tuple(keys)
        self.refs = tuple(refs)

    @property
    def layout(self) -> Layout:
        """The layout of the whole model; a dict's by sorted keys."""
        return self._template.layout

    def get(self) -> Any:
        """Return the model, of the kind that the workers returned, put together here.

        Raises:
            ray.exceptions.RayError: If a node that held a range is gone, and nobody has a copy.
        """
        return self._ordered(assemble(self._template, ray.get(list(self.refs))))

    def get_in_place(self) -> Any:
        """Return the model as views of the object store, read-only: a dict for `FlatWeights`.

        Of a dict or a list only those parts are copied that a range ends in; an array is
        one part, and put together.

        Raises:
            ray.exceptions.RayError: As `get`.
        """
        parts = in_place(self._template, ray.get(list(self.refs)))
        for part in parts:
            part.flags.writeable = False
        return self._ordered(as_kind(self._template, parts))

    def _ordered(self, model: Any) -> Any:
        return {key: model[key] for key in self._keys} if self._is_mapping else model

    @property
    def _is_mapping(self) -> bool:
        return self._template.kind is Kind.MAPPING

    def __repr__(self) -> str:
        """Sizes."""
        return f"<ShardedWeights: {self.layout.nbytes} bytes in {len(self.refs)} ranges>"


class ShardedRound(Round):
    """The average of one round of a `ShardedAverage`, and which ranks it is of.

    A `Round`; but the average lies in pieces on several nodes until somebody asks for
    `weights` (or `Round.ref`), which put it together here. Workers take the `pieces`.

    Attributes:
        pieces: The average, to be sent to workers: by `WorkerGroup.broadcast`, or to
            `FlatWorker.set_pieces`.
        groups: With ``per_node``, the ranks that were added up first, in the order in which the
            sums were merged; otherwise none.
    """

    def __init__(
        self,
        pieces: ShardedWeights,
        used: Sequence[int],
        *,
        groups: Sequence[Sequence[int]] = (),
        **attributes: Any,
    ) -> None:
        """Take the pieces, and the attributes of a `Round`."""
        self._weights: Any = None
        super().__init__(None, used, **attributes)
        self.pieces = pieces
        self.groups = tuple(map(tuple, groups))

    @property
    def weights(self) -> Any:
        """The average, of the kind that the workers returned: put together here, once.

        Raises:
            ray.exceptions.RayError: If a node that held a range is gone, and nobody has a copy.
        """
        if self._weights is None:
            self._weights = self.pieces.get()
        return self._weights

    @weights.setter
    def weights(self, value: Any) -> None:
        self._weights = value

    def __repr__(self) -> str:
        """Which ranks, without the weights."""
        return (
            f"<ShardedRound of ranks {self.used}, failed {list(self.failed)}, late {self.late}: "
            f"{self.pieces!r}>"
        )
