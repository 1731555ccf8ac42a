"""What rounding takes from one message, and the next one gets."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._cast import move_parts
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.wire._blocks import Plan, Scratch
from flatweights.wire._checks import check_finite
from flatweights.wire._views import flat_views


class Residual:
    """What rounding has taken, and is added to what is sent next.

    Attributes:
        plan: For the models that are sent.
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with nothing lost."""
        self.plan = plan
        self._turns = _zeros(plan.layout), _zeros(plan.layout)  # what was lost, and room
        self._scratch = Scratch(plan)

    @property
    def now(self) -> FlatWeights:
        """What was lost."""
        return self._turns[0]

    def encode(
        self,
        model: Any,
        memory: NDArray[np.uint8],
        reference: NDArray[np.uint8] | None,
        where: str,
    ) -> FlatWeights:
        """Return ``model``, less the ``reference``, plus `now`, rounded; only then set `now`.

        Args:
            model: The parts by name.
            memory: Their bytes, in the layout of `plan`.
            reference: Bytes of what is to be taken from them; nothing, if None.
            where: How errors name ``model``.

        Raises:
            ValueError: If what is rounded is NaN or infinite then; `now` is as it was.
        """
        values = FlatWeights.empty(self.plan.wire)
        now, following = self._turns
        wire, lost = flat_views(values), flat_views(following)
        with np.errstate(all="ignore"):
            for block in self.plan.blocks:
                wanted, numbers = self._scratch.of(block), block.read(memory)
                before, after = block.read(now.buffer), block.read(following.buffer)
                if reference is None:
                    np.add(numbers, before, out=wanted)
                else:
                    # In this order: the sum of weight and residual would lose the latter.
                    np.subtract(numbers, block.read(reference), out=wanted)
                    np.add(wanted, before, out=wanted)
                sent = block.pieces(wire)
                move_parts(sent, block.cut(wanted))
                move_parts(block.pieces(lost), sent)
                np.subtract(wanted, after, out=after)
        self.plan.keep(values, model)
        check_finite(values, model, where)
        self._turns = following, now
        return values


def _zeros(layout: Layout) -> FlatWeights:
    weights = FlatWeights.empty(layout)
    weights.buffer[...] = 0
    return weights
