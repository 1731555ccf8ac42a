"""`TensorFlowVariables`: get and set the weights of a model."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights._cast import is_settable, settable
from flatweights._dtypes import is_averaged, is_floating
from flatweights._flatten import new_vector
from flatweights._inplace import finite
from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.tensorflow._discover import discover
from flatweights.tensorflow._eager import EagerOperations
from flatweights.tensorflow._frozen import check_frozen
from flatweights.tensorflow._groups import make_groups
from flatweights.tensorflow._library import load_library
from flatweights.tensorflow._match import match_slots
from flatweights.tensorflow._mover import ADD, LERP, Mover, Update
from flatweights.tensorflow._replicas import Replicas
from flatweights.tensorflow._session import SessionOperations


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

    Variables are bound, where they can be (`unbound` names the others): read and written
    where they are, all of them locked meanwhile, as TensorFlow's optimizers lock theirs. A
    wrong call changes nothing. A read sees all or nothing of another thread's set or
    update; beside a training step it may see some variables updated and some not, but
    each one whole. Values that were read before, and variables that were assigned from
    these, never change. Any number of threads may call.

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
        *,
        trainable_only: bool = False,
    ) -> None:
        """Find the variables of ``output``.

        In a graph this adds operations, and no later call does.

        Args:
            output: Operations or tensors of a graph (all global variables that they
                depend on), a variable, a model, layer or optimizer of Keras 3 or `tf_keras`,
                a `tf.Module`, any object with variables in its attributes, or a nesting of
                these in lists, tuples and dicts: ``[model, optimizer]`` is the whole state
                of a training. None for ``input_variables`` alone.
            sess: Session for the variables of a graph; may be set later.
            input_variables: More variables, after those of ``output``.
            trainable_only: Leave out what is not trained: frozen layers, moving statistics,
                seeds, optimizers.

        Raises:
            TypeError: If there is something else in ``output``, or a variable whose dtype
                cannot be moved (strings, quantized types).
            ValueError: If there are no variables, they are of several graphs, or some are not
                built or have no fixed shape.
            RuntimeError: If the graph is finalized, or the environment variable
                FLATWEIGHTS_TENSORFLOW insists on bound variables and the op library for that
                cannot be had.
        """
        found = discover(output, input_variables, sess, trainable_only=trainable_only)
        self._variables = found.given
        self._layout = Layout(
            list(found.variables),
            [v.shape.as_list() for v in found.variables.values()],
            [v.dtype.base_dtype.as_numpy_dtype for v in found.variables.values()],
        )
        self._dtype = self._layout.dtype
        self._not_computed_with = [
            str(slot)
            for slot in self._layout.slots
            if is_floating(slot.dtype) and not is_averaged(slot.dtype)
        ]
        library = None if _runs_elsewhere(sess) else load_library()
        variables = list(found.variables.values())
        groups = make_groups(variables, self._layout)
        self._session: SessionOperations | None = None
        if found.graph is None:
            eager = EagerOperations(variables, groups, library)
            self._mover = Mover(eager, self._layout, library)
            if tf.executing_eagerly():
                self._mover.bind()
            self._replicas = Replicas(self._mover, self._layout, found.replicas, library)
        else:
            self._session = SessionOperations(found.variables, found.graph, groups, library)
            self._session.set_session(sess)
            self._mover = Mover(self._session, self._layout, library)
            if sess is not None and self._session.place() is not None:
                self._mover.bind()
            self._replicas = Replicas(self._mover, self._layout, {}, library)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables by name, in order."""
        return self._variables

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and places of the variables."""
        return self._layout

    @property
    def unbound(self) -> dict[str, str]:
        """By name, the variables that TensorFlow's operations move, and why.

        All others are bound: read and written where they are, at the speed of memory. It
        is decided when they are first got or set, and again in another session.
        """
        return dict(self._mover.reasons)

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

    def _in_graph(self, attribute: str) -> SessionOperations:
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

        Each byte is moved once, without an operation of TensorFlow, and the result is from
        `flatweights`' pool of buffers; but see `unbound`.

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
        if dtype is None:
            at_once = self._mover.get_at_once(out)
            if at_once is not None:
                return at_once
        target = self._dtype if dtype is None else np.dtype(dtype)
        if (
            target is not self._dtype
            and target != self._dtype
            and not (
                (is_floating(target) or target.kind == "c")
                and all(is_settable(slot.dtype, target) for slot in self._layout.slots)
            )
        ):
            raise TypeError(f"dtype: expected one that holds {self._layout.dtype}, got {target}")
        if out is None:
            out = new_vector(self._layout.size, target)
        else:
            self._check_out(out, target)
        self._mover.get_vector(out)
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

    def set_flat(self, new_weights: ArrayLike, *, share: bool = False) -> None:
        """Set all weights from one vector.

        It is cast as ``np.copyto(casting="same_kind")`` does, and integer variables take
        the rounded values, so the float64 vector of an optimizer sets a float32 model.
        What does not fit an integer raises, and nothing is set.

        The vector is copied, unless ``share`` is set: then each variable whose slot
        lies at a 64-byte boundary in it and has its dtype aliases it instead, and keeps it
        alive. TensorFlow copies such a value before it writes to it, so a training step
        ends the sharing and changes nothing in the vector. For actors that use a model and
        do not train it: all of one node then hold one copy of the weights, that in Ray's
        object store. (The slots of a packed buffer all lie at such boundaries: see
        `set_weights`.) Variables that TensorFlow writes to in place, as after a
        `tf.gather` from them, are always copied to, and so are unbound ones.

        Args:
            new_weights: Vector of `get_flat_size` elements.
            share: Alias the vector, which must be read-only: its owner could change the
                model behind its back otherwise.

        Raises:
            ValueError: If it has another length, a value does not fit an integer variable,
                or it is to be shared and can be written to.
            TypeError: If its dtype cannot be cast.
            RuntimeError: In a graph, if no session is set; if called inside a `tf.function`.
        """
        if share or not self._mover.set_at_once(new_weights):
            flat = self._vector(new_weights, "new_weights")
            if share:
                check_frozen(flat, "new_weights")
            self._mover.set_vector(flat, share=share)
        self._replicas.follow()

    def _vector(self, value: ArrayLike, what: str) -> NDArray[Any]:
        flat = np.asarray(value)
        if flat.shape != (self._layout.size,):
            raise ValueError(f"{what}: expected shape ({self._layout.size},), got {flat.shape}")
        return flat if flat.flags.c_contiguous else np.ascontiguousarray(flat)

    def add_flat(self, delta: ArrayLike, scale: float = 1.0) -> None:
        """Add ``scale * delta`` to the weights, in place.

        A step of gradient descent, of evolution strategies, of a line search, without
        getting and setting: one pass over the variables' own memory, by the kernel of
        `flatweights.axpy_`, with its bits. ``delta`` is cast to the dtype of each variable
        first. Integer and boolean variables stay as they are.

        >>> import tensorflow as tf
        >>> v = tf.Variable([1.0, 2.0])
        >>> TensorFlowVariables(v).add_flat([1.0, 1.0], scale=-0.5)
        >>> v.numpy()
        array([0.5, 1.5], dtype=float32)

        Args:
            delta: Vector of `get_flat_size` elements.
            scale: A finite real number.

        Raises:
            ValueError: If it has another length, or ``scale`` is not finite.
            TypeError: If its dtype cannot be cast, a variable's dtype is one that
                is not computed with (float8), or ``scale`` is no real number.
            RuntimeError: As `get_flat`.
        """
        self._update(ADD, delta, "delta", finite(scale, "scale"))

    def lerp_flat(self, target: ArrayLike, t: float) -> None:
        """Move the weights towards ``target``, by the fraction ``t`` of the way, in place.

        ``w += t * (target - w)``, the soft update of a target network, without getting and
        setting: as `add_flat`, by the kernel of `flatweights.lerp_`.

        >>> import tensorflow as tf
        >>> v = tf.Variable([0.0, 2.0])
        >>> TensorFlowVariables(v).lerp_flat([4.0, 2.0], 0.25)
        >>> v.numpy()
        array([1., 2.], dtype=float32)

        Args:
            target: Vector of `get_flat_size` elements.
            t: A finite real number; outside of 0 to 1 it extrapolates.

        Raises:
            ValueError: As `add_flat`.
            TypeError: As `add_flat`.
            RuntimeError: As `get_flat`.
        """
        self._update(LERP, target, "target", finite(t, "t"))

    def _update(self, update: Update, value: ArrayLike, what: str, a: float) -> None:
        flat = self._vector(value, what)
        if self._not_computed_with:
            raise TypeError(
                f"expected dtypes that are computed with, got {', '.join(self._not_computed_with)}"
            )
        self._mover.update(update, flat, a)
        self._replicas.follow()

    def get_weights(self) -> FlatWeights:
        """Return the weights by name, over one packed buffer that nothing else aliases.

        Raises:
            RuntimeError: As `get_flat`.
        """
        weights = FlatWeights.empty(self._layout)
        self._mover.get_packed(weights.buffer)
        return weights

    def set_weights(
        self,
        new_weights: Mapping[str, ArrayLike],
        *,
        strict: bool = False,
        rename: Mapping[str, str] | None = None,
        share: bool = False,
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
            share: Alias the arrays, which must be read-only, as `set_flat` does. Arrays
                and `FlatWeights` that ``ray.get`` returns are.

        Raises:
            AssertionError: If nothing matches; as Ray's class says it.
            ValueError: If a shape differs, a value does not fit an integer variable,
                ``strict`` or ``rename`` are not met, or something that can be written to
                is to be shared.
            TypeError: If ``new_weights`` is no mapping, or a dtype cannot be cast.
            RuntimeError: As `set_flat`.
        """
        if not isinstance(new_weights, Mapping):
            raise TypeError(
                f"expected a mapping from name to array, got {type(new_weights).__name__}"
            )
        if isinstance(new_weights, FlatWeights) and not rename and self._fits(new_weights):
            if share:
                check_frozen(new_weights.buffer, "new_weights")
            self._mover.set_packed(new_weights.buffer, share=share)
            return self._replicas.follow()
        keys = match_slots(new_weights, self._layout, strict=strict, rename=rename)
        values = {i: self._settable(i, new_weights[key]) for i, key in keys.items()}
        if share:
            for i, value in values.items():
                check_frozen(value, f"slot {i} {self._layout.slots[i].name!r}")
        self._mover.set_parts(values, share=share)
        return self._replicas.follow()

    def _fits(self, weights: FlatWeights) -> bool:
        return weights.layout is self._layout or weights.layout == self._layout

    def _settable(self, i: int, value: ArrayLike) -> NDArray[Any]:
        slot = self._layout.slots[i]
        return settable(value, slot, f"slot {i} {slot.name!r}")

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: variables belong to the process that built them."""
        raise TypeError(
            "TensorFlowVariables cannot be pickled: a copy would set another model than yours. "
            "Build the model inside the actor, and send get_weights() or get_flat()"
        )


def _runs_elsewhere(session: Any) -> bool:
    # A server that does not know the op refuses the whole graph.
    target = getattr(session, "sess_str", "")
    return bool(target)
