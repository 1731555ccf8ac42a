"""`TensorFlowVariables`: get and set the weights of a model."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights._cast import is_settable, settable
from flatweights._dtypes import is_floating
from flatweights._flatten import new_vector
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.tensorflow._discover import discover
from flatweights.tensorflow._eager import EagerTransport
from flatweights.tensorflow._match import match_slots
from flatweights.tensorflow._session import SessionTransport
from flatweights.tensorflow._transport import Transport


class TensorFlowVariables:
    """Gets and sets the weights of a TensorFlow model, as one vector or by name.

    A drop-in for the class of this name in Ray (`ray.experimental.tf_utils`, later
    `ray.rllib.utils.tf_utils`), for eager TensorFlow, Keras 3 and TF1 graphs.

    Order and names are the same in every process that builds the same model:

    * In a graph, variables come in the order of `tf.compat.v1.global_variables` under their
      operation's names, as in Ray.
    * Eager variables come in the order in which the model holds them, under names derived
      from its structure: in Sequential and functional models the layer's class and
      a count (``dense_1/kernel``), or the name it was given; elsewhere the attribute
      (``blocks/0/kernel``). Elements of a list of models get its position in front,
      values of a dict their key. Repeats are numbered in order.

    The vector has the dtype that `numpy.concatenate` would promote the variables to.

    >>> import tensorflow as tf
    >>> v = TensorFlowVariables([tf.Variable([1.0, 2.0], name="w"), tf.Variable(3.0, name="b")])
    >>> v.get_flat()
    array([1., 2., 3.], dtype=float32)
    >>> v.set_flat([4, 5, 6])
    >>> v.get_weights()
    {'w': array([4., 5.], dtype=float32), 'b': array(6., dtype=float32)}
    """

    def __init__(
        self,
        output: Any,
        sess: Any = None,
        input_variables: Any = None,
    ) -> None:
        """Find the variables of ``output``.

        In a graph this adds operations, and no later call does.

        Args:
            output: Operations or tensors of a graph (all global variables that they
                depend on), a variable, a Keras 3 model or layer, a `tf.Module`, or a
                nesting of these in lists, tuples and dicts. None for ``input_variables`` alone.
            sess: Session for the variables of a graph; may be set later.
            input_variables: More variables, after those of ``output``.

        Raises:
            TypeError: If there is something else in ``output``, or a variable whose dtype
                cannot be moved (strings, quantized types).
            ValueError: If there are no variables, they are of several graphs, or some are not
                built or have no fixed shape.
            RuntimeError: If the graph is finalized.
        """
        found = discover(output, input_variables, sess)
        self._variables = found.given
        self._layout = Layout(
            list(found.variables),
            [v.shape.as_list() for v in found.variables.values()],
            [v.dtype.base_dtype.as_numpy_dtype for v in found.variables.values()],
        )
        self._session: SessionTransport | None = None
        self._transport: Transport
        if found.graph is None:
            self._transport = EagerTransport(list(found.variables.values()), self._layout)
        else:
            self._session = SessionTransport(found.variables, found.graph, self._layout)
            self._session.set_session(sess)
            self._transport = self._session

    @property
    def variables(self) -> dict[str, Any]:
        """The variables by name, in order."""
        return self._variables

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and places of the variables."""
        return self._layout

    @property
    def sess(self) -> Any:
        """The session that gets and sets run in; None without one, and for eager variables."""
        return self._session.session if self._session else None

    @property
    def placeholders(self) -> dict[str, tf.Tensor]:
        """By name, where a variable's value is fed; in graphs only.

        Raises:
            AttributeError: For eager variables.
        """
        return self._in_graph("placeholders").placeholders

    @property
    def assignment_nodes(self) -> dict[str, Any]:
        """By name, what assigns a placeholder's value; in graphs only.

        Raises:
            AttributeError: For eager variables.
        """
        return self._in_graph("assignment_nodes").assignment_nodes

    def _in_graph(self, attribute: str) -> SessionTransport:
        if self._session is None:
            raise AttributeError(f"eager variables have no {attribute}")
        return self._session

    def set_session(self, sess: Any) -> None:
        """Run gets and sets in ``sess`` from now on.

        Args:
            sess: A session of the graph that the variables are in, or None for none.

        Raises:
            ValueError: If it is of another graph, or the variables are eager.
        """
        if self._session is not None:
            self._session.set_session(sess)
        elif sess is not None:
            raise ValueError("expected variables of the session's graph, got eager ones")

    def get_flat_size(self) -> int:
        """Return the number of elements of the vector."""
        return self._layout.size

    def get_flat(
        self, out: NDArray[Any] | None = None, *, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return all weights as one vector, back to back in the order of `variables`.

        Each byte is moved twice: TensorFlow concatenates, then the result is copied out.

        Args:
            out: Where to write: contiguous, of `get_flat_size` elements. A new vector, if None.
            dtype: Dtype of the result, floating or complex: float64 for
                `scipy.optimize`, bfloat16 for the wire. That of the layout, if None.

        Returns:
            ``out``, or the new vector.

        Raises:
            TypeError: If ``out`` is not of ``dtype``, or ``dtype`` cannot hold the weights.
            ValueError: If ``out`` has another length, is strided or read-only.
            RuntimeError: In a graph, if no session is set or a variable is not
                initialized; if called inside a `tf.function`.
        """
        target = self._layout.dtype if dtype is None else np.dtype(dtype)
        if target != self._layout.dtype and not (
            (is_floating(target) or target.kind == "c")
            and all(is_settable(slot.dtype, target) for slot in self._layout.slots)
        ):
            raise TypeError(f"dtype: expected one that holds {self._layout.dtype}, got {target}")
        if out is None:
            out = new_vector(self._layout.size, target)
        else:
            self._check_out(out, target)
        self._transport.gather(self._layout.vector_views(out))
        return out

    def _check_out(self, out: NDArray[Any], dtype: np.dtype[Any]) -> None:
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}")
        expected = f"{dtype} ({self._layout.size},)"
        if out.dtype != dtype:
            raise TypeError(f"out: expected {expected}, got {out.dtype} {out.shape}")
        if out.shape != (self._layout.size,) or not out.flags.c_contiguous:
            raise ValueError(
                f"out: expected contiguous {expected}, got {out.dtype} {out.shape} with "
                f"strides {out.strides}"
            )
        if not out.flags.writeable:
            raise ValueError("out: expected a writable array, got a read-only one")

    def set_flat(self, new_weights: ArrayLike) -> None:
        """Set all weights from one vector.

        It is cast as ``np.copyto(casting="same_kind")`` does, and integer variables take
        the rounded values, so the float64 vector of an optimizer sets a float32 model.
        What does not fit an integer raises, and nothing is set. The vector is copied, not kept.

        Args:
            new_weights: Vector of `get_flat_size` elements.

        Raises:
            ValueError: If it has another length, or a value does not fit an integer variable.
            TypeError: If its dtype cannot be cast.
            RuntimeError: In a graph, if no session is set; if called inside a `tf.function`.
        """
        flat = np.asarray(new_weights)
        if flat.shape != (self._layout.size,):
            raise ValueError(
                f"new_weights: expected shape ({self._layout.size},), got {flat.shape}"
            )
        views = self._layout.vector_views(np.ascontiguousarray(flat))
        self._transport.scatter([self._settable(i, view) for i, view in enumerate(views)])

    def get_weights(self) -> FlatWeights:
        """Return the weights by name, over one packed buffer that nothing else aliases.

        Raises:
            RuntimeError: As `get_flat`.
        """
        weights = FlatWeights.empty(self._layout)
        self._transport.gather(list(weights.values()))
        return weights

    def set_weights(
        self,
        new_weights: Mapping[str, ArrayLike],
        *,
        strict: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        """Set weights by name; a subset is allowed.

        Which weights are meant for which variables is decided in this order. If all
        given names are known, by name. Else, if they are a full set whose shapes and
        dtypes agree with the model's in order, by position (two networks in one graph, a
        renamed scope, shifted automatic numbers). Else, if some names are known, those,
        with a warning that lists the others. Values are cast as by `set_flat`. Everything
        is checked before anything is set.

        Args:
            new_weights: Arrays by name: `FlatWeights`, or any mapping.
            strict: Accept nothing but all names of the model, each known.
            rename: Names in ``new_weights`` to names of the model.

        Raises:
            AssertionError: If nothing matches; as Ray's class says it.
            ValueError: If a shape differs, a value does not fit an integer variable,
                or ``strict`` or ``rename`` are not met.
            TypeError: If ``new_weights`` is no mapping, or a dtype cannot be cast.
            RuntimeError: As `set_flat`.
        """
        if not isinstance(new_weights, Mapping):
            raise TypeError(
                f"expected a mapping from name to array, got {type(new_weights).__name__}"
            )
        keys = match_slots(new_weights, self._layout, strict=strict, rename=rename)
        values = {i: self._settable(i, new_weights[key]) for i, key in keys.items()}
        if len(values) == len(self._layout):
            self._transport.scatter([values[i] for i in range(len(values))])
        else:
            self._transport.scatter_some(values)

    def _settable(self, i: int, value: ArrayLike) -> NDArray[Any]:
        slot = self._layout.slots[i]
        return settable(value, slot, f"slot {i} {slot.name!r}")

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: variables belong to the process that built them."""
        raise TypeError(
            "TensorFlowVariables cannot be pickled: a copy would set another model than yours. "
            "Build the model inside the actor, and send get_weights() or get_flat()"
        )
