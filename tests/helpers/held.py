"""Arrays as variables of a member, in tests and in their Ray workers."""

from typing import Any

import flatweights as fw


class Held:
    """Arrays as `flatweights.ray.Variables`."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays
        self.layout = fw.Layout.of(arrays)

    def gather_into(self, buffer: Any) -> None:
        """See `Variables`."""
        for array, view in zip(self.arrays.values(), self.layout.packed_views(buffer), strict=True):
            view[...] = array

    def scatter(self, buffer: Any) -> None:
        """See `Variables`."""
        for array, view in zip(self.arrays.values(), self.layout.packed_views(buffer), strict=True):
            array[...] = view
