"""The TensorFlow operations that read, write and bind variables.

Dispatching one op per variable makes reading a model slow, so one operation per group reads
all of its variables.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights._locks import TurnLock
from flatweights.tensorflow._groups import Group


class Operations(ABC):
    """The operations on the variables of one model.

    Attributes:
        groups: The variables.
        lock: Held from the first to the last operation of a call, and shared by all models that
            may have variables in common: so calls are atomic to each other.
        context: The context of eager TensorFlow; None for the variables of a session.
    """

    groups: list[Group]
    lock: TurnLock
    context: Any = None

    @abstractmethod
    def check(self) -> None:
        """Wait for operations that were dispatched earlier.

        Raises:
            RuntimeError: If nothing can be moved now.
        """

    @abstractmethod
    def place(self) -> object:
        """Return where the variables are: a binding is valid only in the place it was made."""

    @abstractmethod
    def bind(self, groups: Sequence[Group]) -> list[NDArray[np.int64]]:
        """Run the binding op for each variable of ``groups``; return its results."""

    @abstractmethod
    def read(self, groups: Sequence[Group]) -> dict[int, NDArray[Any]]:
        """Return the values by position. Do not write to them: they may alias variables.

        Raises:
            RuntimeError: If a variable is not initialized; the message names it.
        """

    @abstractmethod
    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Set the variables at these positions to copies of arrays that `settable` returned."""
