"""What TensorFlow is asked to do: read and write variables, and hand them over to be bound.

Dispatching one TensorFlow op per variable is what makes reading a model slow; here one
concat per group reads all of its variables, and one split writes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatweights.tensorflow._groups import Group


class Operations(ABC):
    """The operations on the variables of one model.

    Attributes:
        groups: The variables.
        context: The context of eager TensorFlow; None for the variables of a session.
    """

    groups: list[Group]
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
        """Run the op that binds for each variable of ``groups``; return what it gave."""

    @abstractmethod
    def read(self, groups: Sequence[Group]) -> list[NDArray[Any]]:
        """Return one vector per group, which may alias a variable: it is not written to."""

    @abstractmethod
    def write(self, groups: Sequence[Group], vectors: Sequence[NDArray[Any]]) -> None:
        """Set the variables from one vector per group, which TensorFlow may keep."""

    @abstractmethod
    def write_some(self, values: Mapping[int, NDArray[Any]]) -> None:
        """Set the variables at these positions, from arrays that TensorFlow may keep."""
