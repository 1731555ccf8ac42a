"""The operations that TensorFlow runs: they read, write and bind variables.

Dispatching one TensorFlow op per variable is what makes reading a model slow; here one
operation per group reads all of its variables.
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
        lock: Held from the first to the last operation of a call, by all models whose variables
            could be the same: each call is then all or nothing to the others.
        context: The context of eager TensorFlow; None for the variables of a session.
    """

    groups: list[Group]
    lock: TurnLock
    context: Any = None

    @abstractmethod
    def check(self) -> None:
        """Wait for what was dispatched before.

        Raises:
            RuntimeError: If nothing can be moved now.
        """

    @abstractmethod
    def place(self) -> object:
        """Return where the variables are: bindings made in one place are void in another."""

    @abstractmethod
    def bind(self, groups: Sequence[Group]) -> list[NDArray[np.int64]]:
        """Run the op that binds for each variable of ``groups``; return its results."""

    @abstractmethod
    def read(self, groups: Sequence[Group]) -> dict[int, NDArray[Any]]:
        """Return the values by position, which may alias variables: they are not written to.

        Raises:
            RuntimeError: If a variable is not initialized; the message names it.
        """

    @abstractmethod
    def write(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Set the variables at these positions; the arrays, made by `settable`, are copied."""
