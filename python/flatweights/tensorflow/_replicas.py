"""Mirrored variables: read from one replica, set on all."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from flatweights._layout import Layout
from flatweights._locks import TurnLock
from flatweights.tensorflow._eager import EagerOperations
from flatweights.tensorflow._groups import make_groups
from flatweights.tensorflow._library import Library
from flatweights.tensorflow._mover import Mover

_lock = TurnLock()
"""Held while replicas follow, so that the last call sets all to the value of the first."""


class Replicas:
    """The other replicas of the variables that a mover moves; usually there are none."""

    def __init__(
        self,
        first: Mover,
        layout: Layout,
        replicas: Mapping[str, Sequence[tf.Variable]],
        library: Library | None,
    ) -> None:
        """Take the ``replicas`` of some variables of ``layout``, which ``first`` moves."""
        self._first = first
        self._layout = layout
        self._movers: list[tuple[list[int], Mover]] = []
        # Variables of different strategies may differ in their number of replicas.
        for k in range(max(map(len, replicas.values()), default=0)):
            names = [name for name, others in replicas.items() if len(others) > k]
            variables = [replicas[name][k] for name in names]
            positions = [layout.index(name) for name in names]
            slots = [layout.slots[i] for i in positions]
            own = Layout(
                [slot.name for slot in slots],
                [slot.shape for slot in slots],
                [slot.dtype for slot in slots],
            )
            groups = make_groups(variables, own)
            mover = Mover(EagerOperations(variables, groups, library), own, library)
            self._movers.append((positions, mover))

    def follow(self) -> None:
        """Give all replicas the values of the first."""
        if not self._movers:
            return
        with _lock.ready():
            packed = self._layout.new_buffer()
            self._first.get_packed(packed)
            parts = self._layout.packed_views(packed)
            for positions, mover in self._movers:
                mover.set_parts({j: parts[i] for j, i in enumerate(positions)})
