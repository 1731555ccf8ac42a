"""`TensorFlowVariables`: get and set the weights of a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights import _core
from flatweights._choice import Choice, Which
from flatweights._core import check_out, is_settable
from flatweights._dtypes import is_averaged, is_floating, is_integer, read_dtype
from flatweights._flatten import new_vector
from flatweights._layout import Layout, cast_for_slot, place_of
from flatweights._match import match_slots, names_of
from flatweights._numbers import finite
from flatweights._safetensors import read
from flatweights._trees import as_array, as_vector
from flatweights._weights import FlatWeights
from flatweights.tensorflow._adapted import Adapted
from flatweights.tensorflow._apply import Steps
from flatweights.tensorflow._buckets import Operations, make_buckets
from flatweights.tensorflow._changes import Changes
from flatweights.tensorflow._discover import discover, layout_of
from flatweights.tensorflow._eager import EagerOperations
from flatweights.tensorflow._frozen import check_frozen
from flatweights.tensorflow._gradients import Gradients
from flatweights.tensorflow._kinds import is_seed
from flatweights.tensorflow._mover import ADD, LERP, Mover, Update
from flatweights.tensorflow._objective import Objective
from flatweights.tensorflow._python_op import unconverted
from flatweights.tensorflow._session import SessionOperations
from flatweights.tensorflow.library._load import load_library


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
      (``blocks/0/kernel``). Elements of a list of models are prefixed by their position,
      values of a dict by their key. In ``[model, optimizer]`` the model's names stay, and
      slots are named after their variable (``optimizer/dense/kernel/momentums``). Repeats
      are numbered in order.

    The vector has the dtype that `numpy.concatenate` would promote the variables to.

    Variables are bound where possible (`unbound` lists the others): they are read and written
    in place, all locked together, as TensorFlow's optimizers lock theirs. A call that raises
    changes nothing. A read sees all or nothing of another thread's set or update; during a
    training step it may see only some variables updated, but each one whole. Values that
    were read earlier, and variables assigned from them, never change. Any number of threads
    may call.

    Calls that move unbound variables take a lock, so all of this holds between them. But if
    TensorFlow updates such a variable during `add_flat` or `lerp_flat`, one of the two updates
    may be lost; and an interrupt (`KeyboardInterrupt`) while TensorFlow assigns such variables may
    leave only some of them set. The replicas of mirrored variables are set one after the other:
    they may differ during a call, and are equal once all calls have returned.

    >>> import tensorflow as tf
    >>> v = TensorFlowVariables([tf.Variable([1.0, 2.0], name="w"), tf.Variable(3.0, name="b")])
    >>> v.get_flat()
    array([1., 2., 3.], dtype=float32)
    >>> v.set_flat([4, 5, 6])
    >>> v.get_weights()
    {'w': array([4., 5.], dtype=float32), 'b': array(6., dtype=float32)}
    """

    # Tells workers that `set_weights` of this class, given all weights, does the same as `scatter`.
    scatters_weights: ClassVar[bool] = True

    def __init__(
        self,
        output: Any,
        sess: Any = None,
        input_variables: Any = None,
        *,
        trainable_only: bool = False,
        exclude: Which | None = None,
        only: Which | None = None,
    ) -> None:
        """Find the variables of ``output``.

        In a graph this adds operations; later gets and sets add none.

        With ``exclude`` or ``only``, this object has some of the variables: vectors, buffers and
        weights by name contain no others, and nothing reads or sets the others. So layers can stay
        at home: what a worker or a member sends, receives and averages is what such an object has.
        An optimizer's slots stay where their variable stays; its counters are variables of their
        own. Names, by which processes compare what they have, are those among all variables.

        >>> import keras
        >>> layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(2, name="head")]
        >>> model = keras.Sequential([keras.Input((3,)), *layers])
        >>> list(TensorFlowVariables(model, exclude="head").variables)
        ['body/kernel', 'body/bias']
        >>> list(TensorFlowVariables(model, only=lambda slot: "kernel" in slot.name).variables)
        ['body/kernel', 'head/kernel']

        Args:
            output: Operations or tensors of a graph (all global variables that they
                depend on), a variable, a model, layer or optimizer of Keras 3 or `tf_keras`,
                a `tf.Module`, any object with variables in its attributes, or a nesting of
                these in lists, tuples and dicts: ``[model, optimizer]`` is the whole training
                state. None to use only ``input_variables``.
            sess: Session for the variables of a graph; may be set later.
            input_variables: More variables, after those of ``output``.
            trainable_only: Leave out variables that are not trained: frozen layers, moving
                statistics, seeds, optimizers.
            exclude: Variables to leave out: names; prefixes of names, up to a ``/`` (``"block"``
                is ``block/norm/gamma``, but not ``block_1/kernel``); or a function that is true of
                their `flatweights.Slot`. A text or several; the same in all processes.
            only: The variables to have, instead of those to leave out. Of the optimizer's slots, a
                text has those whose variables are chosen, too; if it means no such slot, all that
                it means: ``["body", "optimizer"]`` has the slots of ``body``, ``"optimizer"`` all.

        Raises:
            TypeError: If there is something else in ``output``, or a variable whose dtype
                cannot be moved (strings, quantized types). If a function of ``exclude`` or ``only``
                returns what is neither true nor false, such as an array.
            ValueError: If there are no variables, they are of several graphs, or some are not
                built or have no fixed shape. If ``exclude`` and ``only`` are both given, leave no
                variable, or contain a text that is no variable's name or prefix.
            RuntimeError: If the graph is finalized, or the environment variable
                FLATWEIGHTS_TENSORFLOW requires bound variables and the op library is not
                available.
        """
        discovered = discover(
            output,
            input_variables,
            sess,
            trainable_only=trainable_only,
            choice=Choice(exclude, only),
        )
        self._variables = discovered.wrappers
        self._layout = layout_of(discovered.variables)
        self._left_out = discovered.left_out
        self._dtype = self._layout.dtype
        self._seeds = {i for i, v in enumerate(discovered.variables.values()) if is_seed(v)}
        self._has_warned = False
        self._without_arithmetic = [
            str(slot)
            for slot in self._layout.slots
            if is_floating(slot.dtype) and not is_averaged(slot.dtype)
        ]
        # A session with an address runs on a server. A server without the op rejects the whole
        # graph.
        is_elsewhere = bool(getattr(sess, "sess_str", ""))
        library = None if is_elsewhere else load_library()
        buckets = make_buckets(list(discovered.variables.values()), self._layout)
        operations: Operations
        self._session: SessionOperations | None = None
        if discovered.graph is None:
            operations = EagerOperations(buckets, library)
            is_usable = tf.executing_eagerly()
        else:
            operations = self._session = SessionOperations(
                discovered.variables, discovered.graph, buckets, library
            )
            self._session.set_session(sess)
            is_usable = self._session.raw_session() is not None
        self._moves = Mover(operations, self._layout, library, discovered.replicas)
        if is_usable:
            self._moves.bind()
        self._changes = Changes(discovered.layers, self._variables)
        is_eager = self._session is None
        self._adapted = Adapted(discovered.layers if is_eager else (), self._variables)
        states = discovered.states
        self._states = {i for i, name in enumerate(discovered.variables) if name in states}
        self._gradients = Gradients(self._variables, self._layout, self._states)
        self._steps = Steps(self._variables, self._layout, self._session, self._states)

    def __repr__(self) -> str:
        """Sizes, and how many variables are not bound."""
        unbound = f", {len(self.unbound)} unbound" if self.unbound else ""
        name = type(self).__name__
        return f"<{name} of {len(self._layout)} variables, {self._layout.size:,} elements{unbound}>"

    @property
    def _mover(self) -> Mover:
        """Moves the variables, which are still the model's: else it raises `RuntimeError`."""
        self._changes.check()
        return self._moves

    @property
    def variables(self) -> dict[str, Any]:
        """The variables by name, in order."""
        return self._variables

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and positions of the variables."""
        return self._layout

    @property
    def seed_names(self) -> tuple[str, ...]:
        """The names of the states of seed generators, such as those of Dropout layers.

        `flatweights.ray` sets averages and published weights with ``seeds=False``, so that these
        stay each process's own: with equal ones, all workers would drop the same units.
        """
        return tuple(self._layout.names[i] for i in sorted(self._seeds))

    @property
    def unbound(self) -> dict[str, str]:
        """By name, the variables that TensorFlow's operations move, and why.

        All others are bound: read and written in place, at the speed of memory. This is
        decided at construction or at the first get or set, and again in another session.
        """
        return self._moves.reasons

    @property
    def shared(self) -> dict[str, bool]:
        """By name, whether a variable's value aliases memory that was shared with it.

        True after ``share=True``, until the variable gets another value; False if the value
        was copied nevertheless: see `set_flat`.

        >>> import tensorflow as tf
        >>> TensorFlowVariables(tf.Variable(3.0, name="b")).shared
        {'b': False}
        """
        return dict(zip(self._layout.names, self._moves.shared(), strict=True))

    @property
    def sess(self) -> Any:
        """The session that gets and sets run in; None without one, and for eager variables."""
        return self._session.session if self._session else None

    @property
    def placeholders(self) -> dict[str, tf.Tensor]:
        """By name, the placeholder for a variable's value; in graphs only.

        Raises:
            AttributeError: For eager variables.
        """
        return self._in_graph("placeholders").placeholders

    @property
    def assignment_nodes(self) -> dict[str, Any]:
        """By name, the op that assigns a placeholder's value; in graphs only.

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
            if sess is None:
                self._moves.unbind()
        elif sess is not None:
            raise ValueError("expected variables of the session's graph, got eager ones")

    def get_flat_size(self) -> int:
        """Return the number of elements of the vector."""
        return self._layout.size

    def get_flat(
        self, out: NDArray[Any] | None = None, *, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Return all weights as one vector, back to back in the order of `variables`.

        Except for `unbound` variables, each byte is moved once, without a TensorFlow operation.
        A new vector's memory comes from `flatweights`' pool of buffers.

        A floating vector rounds integers beyond its precision (2**53 for float64: the state of
        a `tf.random.Generator`), and `set_flat` does not accept a complex vector for real
        variables. In both cases the first call warns and names the variable: `get_weights` and
        `set_weights` keep each dtype.

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
                initialized; if called inside a `tf.function`; if the model has got other variables
                since, by ``quantize`` or ``enable_lora``.
        """
        if dtype is None:
            vector = self._mover.try_get(out)
            if vector is not None:
                return vector
        target = self._dtype if dtype is None else read_dtype(dtype, "dtype")
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
            check_out(out, self._layout.size, target)
        self._mover.get_vector(out)
        self._warn_of_loss(out)
        return out

    def _warn_of_loss(self, flat: NDArray[Any]) -> None:
        """Warn once, of the first slot whose value `set_flat` cannot restore from ``flat``."""
        if self._has_warned:
            return
        for i in _lossy_slots(self._layout, flat.dtype):
            slot = self._layout.slots[i]
            values = flat[slot.start : slot.start + slot.size]
            if flat.dtype.kind == "c" or not _holds_integers(values):
                self._has_warned = True
                warnings.warn(
                    f"{place_of(i, slot)}: set_flat cannot restore its {slot.dtype} from a vector "
                    f"of {flat.dtype}; get_weights and set_weights keep each dtype",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return

    def set_flat(self, new_weights: ArrayLike, *, share: bool = False, seeds: bool = True) -> None:
        """Set all weights from one vector.

        It is cast as ``np.copyto(casting="same_kind")`` does, and integer variables take
        the rounded values, so the float64 vector of an optimizer sets a float32 model.
        A value that does not fit an integer variable raises, and nothing is set.

        The vector is copied unless ``share`` is set. Then a variable aliases the vector and
        keeps it alive if its slot has the vector's dtype and begins at a 64-byte boundary
        (`shared` shows which). TensorFlow copies such a value, and every slice of it, before
        it writes to it, so a training step ends the sharing and does not change the vector.
        This is for actors that use a model without training it: all actors of a node then use
        the one copy of the weights in Ray's object store. (All slots of a packed buffer begin at
        such boundaries: see `set_weights`.) Unbound variables, and variables that TensorFlow
        writes to in place, as after a `tf.gather` from them, always get a copy.

        Code that violates TensorFlow's rule that tensors never change writes to the shared
        vector: a `tf.numpy_function` that changes its argument, `tf.raw_ops.InplaceUpdate` and
        similar operations. Do not share with models that contain such code.

        Args:
            new_weights: Vector of `get_flat_size` elements.
            share: Alias the vector, which must be read-only, since its owner could otherwise
                change the model unnoticed. Everything that it is a view of must be read-only,
                too, down to an array that owns its memory or an object that exports a read-only
                buffer (Ray's, `bytes`, a read-only `mmap`). Their flags are trusted: older
                writable views of a frozen array and other maps of a file are not detected.
                Arrays that only claim to be read-only (of `numpy.from_dlpack`, of an
                ``__array_interface__``) are rejected.
            seeds: Whether states of seed generators (`seed_names`) are set, too.

        Raises:
            ValueError: If it has another length, a value does not fit an integer variable,
                or it is to be shared and is not known to be read-only.
            TypeError: If its dtype cannot be cast.
            RuntimeError: In a graph, if no session is set; if called inside a `tf.function`; if
                the model has got other variables since, by ``quantize`` or ``enable_lora``.
        """
        keeps = self._seeds and not seeds
        if share or keeps or not self._mover.try_set(new_weights):
            flat = self._vector(new_weights, "new_weights")
            if share:
                check_frozen(as_array(new_weights, "new_weights"), "new_weights")
            if keeps:
                self._set_without_seeds(self._layout.vector_views(flat), share=share)
            else:
                self._mover.set_vector(flat, share=share)
        self._adapted.check()

    def _set_without_seeds(self, values: Sequence[NDArray[Any]], *, share: bool = False) -> None:
        """Set all variables except the states of seed generators, from one array for each slot."""
        others = [i for i in range(len(self._layout)) if i not in self._seeds]
        parts = {i: cast_for_slot(self._layout, i, values[i]) for i in others}
        self._mover.set_parts(parts, share=share)

    def _set_packed(
        self, buffer: NDArray[np.uint8], *, share: bool = False, seeds: bool = True
    ) -> None:
        if self._seeds and not seeds:
            self._set_without_seeds(self._layout.packed_views(buffer), share=share)
        else:
            self._mover.set_packed(buffer, share=share)

    def _vector(self, value: ArrayLike, argument: str) -> NDArray[Any]:
        flat = as_vector(value, self._layout.size, argument)
        return flat if flat.flags.c_contiguous else np.ascontiguousarray(flat)

    def add_flat(self, delta: ArrayLike, scale: float = 1.0) -> None:
        """Add ``scale * delta`` to the weights, in place.

        This makes steps of gradient descent, evolution strategies or a line search without a
        get and a set: one pass over the variables' own memory, by the kernel of
        `flatweights.axpy_` and with the same bits. ``delta`` is first cast to the dtype of
        each variable. Integer and boolean variables stay as they are.

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
            TypeError: If its dtype cannot be cast, a variable has a dtype without arithmetic
                (float8), or ``scale`` is not a real number.
            RuntimeError: As `get_flat`.
        """
        self._update(ADD, delta, "delta", finite(scale, "scale"))

    def lerp_flat(self, target: ArrayLike, t: float) -> None:
        """Move the weights towards ``target``, by the fraction ``t`` of the way, in place.

        ``w += t * (target - w)``, the soft update of a target network, without a get and a
        set: like `add_flat`, but by the kernel of `flatweights.lerp_`.

        >>> import tensorflow as tf
        >>> v = tf.Variable([0.0, 2.0])
        >>> TensorFlowVariables(v).lerp_flat([4.0, 2.0], 0.25)
        >>> v.numpy()
        array([1., 2.], dtype=float32)

        Args:
            target: Vector of `get_flat_size` elements.
            t: A finite real number; outside 0 to 1 it extrapolates.

        Raises:
            ValueError: As `add_flat`.
            TypeError: As `add_flat`.
            RuntimeError: As `get_flat`.
        """
        self._update(LERP, target, "target", finite(t, "t"))

    def _update(self, update: Update, value: ArrayLike, argument: str, a: float) -> None:
        flat = self._vector(value, argument)
        if self._without_arithmetic:
            raise TypeError(
                f"expected dtypes with arithmetic, got {', '.join(self._without_arithmetic)}"
            )
        self._mover.update(update, flat, a)
        self._adapted.check()

    def get_weights(self) -> FlatWeights:
        """Return the weights by name, over one packed buffer that nothing else aliases.

        Raises:
            RuntimeError: As `get_flat`.
        """
        buffer = self._layout.new_buffer()
        self._mover.get_packed(buffer)
        return FlatWeights.wrap(buffer, self._layout)

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        """Read all variables into a packed ``buffer``, such as `flatweights.ray.Member` has.

        Like `get_weights`, for memory of the caller's, and without a view of each part. Padding
        between the parts is left as it is.

        >>> import tensorflow as tf
        >>> variables = TensorFlowVariables(tf.Variable([1.0, 2.0]))
        >>> buffer = variables.layout.new_buffer()
        >>> variables.gather_into(buffer)
        >>> variables.layout.packed_views(buffer)
        [array([1., 2.], dtype=float32)]

        Args:
            buffer: Writable uint8 vector of ``layout.nbytes``.

        Raises:
            TypeError: If it is no NumPy array.
            ValueError: If it is another one.
            RuntimeError: As `get_flat`.
        """
        mover = self._mover
        if not mover.try_get_packed(buffer):
            mover.get_packed(buffer)

    def scatter(self, buffer: NDArray[np.uint8], *, seeds: bool = True) -> None:
        """Set all variables from a packed ``buffer``, which is not changed.

        Like `set_weights` of all weights, without a view of each part.

        >>> import tensorflow as tf
        >>> v = tf.Variable([1.0, 2.0])
        >>> variables = TensorFlowVariables(v)
        >>> buffer = variables.layout.new_buffer()
        >>> variables.layout.packed_views(buffer)[0][:] = [3.0, 4.0]
        >>> variables.scatter(buffer)
        >>> v.numpy()
        array([3., 4.], dtype=float32)

        Args:
            buffer: Contiguous uint8 vector of ``layout.nbytes``.
            seeds: Whether states of seed generators (`seed_names`) are set, too.

        Raises:
            TypeError: If it is no NumPy array.
            ValueError: If it is another one; no variable is changed.
            RuntimeError: As `get_flat`.
        """
        keeps = self._seeds and not seeds
        if keeps or not self._mover.try_set_packed(buffer):
            self._set_packed(buffer, seeds=seeds)
        self._adapted.check()

    @property
    def gpu(self) -> bytes | None:
        """The UUID of the GPU in whose memory `flatweights.ray.Member` may average the variables.

        It is None unless all variables are bound, and those on a GPU are on the same one. Before
        their first use, variables are not bound yet.
        """
        return self._mover.gpu

    def gather_into_segment(self, segment: _core.DeviceSegment) -> None:
        """Read all variables into a segment of their `gpu`; for `flatweights.ray.Member`.

        Args:
            segment: Memory of that GPU, of ``layout.nbytes`` or more.

        Raises:
            RuntimeError: If the driver fails, or the variables have to be bound again.
        """
        self._mover.get_segment(segment)

    def scatter_segment(
        self, segment: _core.DeviceSegment | _core.PeerDeviceSegment, *, seeds: bool = True
    ) -> None:
        """Set all variables from a segment of their `gpu`; for `flatweights.ray.Member`.

        Args:
            segment: As in `gather_into_segment`; a peer's segment, too.
            seeds: As in `scatter`.

        Raises:
            RuntimeError: As `gather_into_segment`; no variable is changed.
        """
        skipped = self._seeds if self._seeds and not seeds else ()
        self._mover.set_segment(segment, [i for i in range(len(self._layout)) if i not in skipped])

    def set_weights(
        self,
        new_weights: Mapping[str, ArrayLike],
        *,
        strict: bool = False,
        rename: Mapping[str, str] | None = None,
        share: bool = False,
        seeds: bool = True,
    ) -> None:
        """Set weights by name; a subset is allowed.

        The first rule that applies decides which weights are for which variables:

        1. All names are known: by name.
        2. The weights are a full set whose shapes and dtypes agree with the model's in order:
           by position (two networks in one graph, a renamed scope, shifted automatic
           numbers), unless the names show that they are in another order.
        3. Some names are known: only those, with a warning that lists the others.

        Weights of variables that ``exclude`` or ``only`` left out are ignored, unless ``strict``.
        Values are cast as by `set_flat`, except that variables of one byte, such as kernels of an
        int8 model, take whole numbers only: rounded, weights of a float model would be zeros.
        Everything is checked before anything is set.

        Args:
            new_weights: Arrays by name: `FlatWeights`, or any mapping.
            strict: Accept only exactly the names of the model.
            rename: Maps names in ``new_weights`` to names of the model.
            share: Alias the arrays, which must be read-only, as `set_flat` does. Arrays
                and `FlatWeights` that ``ray.get`` returns are.
            seeds: Whether states of seed generators (`seed_names`) are set, too.

        Raises:
            AssertionError: If nothing matches, as in Ray's class.
            ValueError: If a shape differs, a value does not fit an integer variable, only one
                of weights and model is quantized, ``strict`` or ``rename`` does not hold, or an
                array to be shared is not known to be read-only.
            TypeError: If ``new_weights`` is not a mapping, or a dtype cannot be cast.
            RuntimeError: As `set_flat`.
        """
        if isinstance(new_weights, FlatWeights) and not rename:
            layout = new_weights.layout
            if layout is self._layout or layout == self._layout:
                if share:
                    self._check_frozen(dict(enumerate(new_weights.values())))
                self._set_packed(new_weights.buffer, share=share, seeds=seeds)
                self._adapted.check()
                return
        self._check_halves(new_weights, rename)
        keys = match_slots(
            new_weights, self._layout, strict=strict, rename=rename, ignored=self._left_out
        )
        if not seeds:
            keys = {i: key for i, key in keys.items() if i not in self._seeds}
        if share:
            self._check_frozen({i: new_weights[key] for i, key in keys.items()})
        self._mover.set_parts(self._cast(new_weights, keys), share=share)
        self._adapted.check()

    def _check_halves(
        self, weights: Mapping[str, ArrayLike], rename: Mapping[str, str] | None
    ) -> None:
        """Raise if only one of ``weights`` and model has a weight in its quantized form.

        Keras calls the two halves of a quantized weight ``kernel``, of integers, and
        ``kernel_scale``. Names from before a ``rename`` tell, too: the float model has no name that
        the scale's could be mapped to.
        """
        keys = {name: key for key, name in names_of(weights, rename).items()}
        for i, slot in enumerate(self._layout.slots):
            if slot.name not in keys:
                continue
            key = keys[slot.name]
            own_scale = f"{slot.name}_scale"
            given_scale = own_scale if own_scale in keys else f"{key}_scale"
            is_ours = own_scale in self._layout or own_scale in self._left_out
            if is_ours == (given_scale in keys):
                continue
            value = as_array(weights[key], place_of(i, slot))
            ours, given = slot.dtype, value.dtype
            quantized, other = (ours, given) if is_ours else (given, ours)
            if is_integer(quantized) and is_floating(other):
                which = (
                    f"only the model has {own_scale!r}, so only it is"
                    if is_ours
                    else f"only the weights have {given_scale!r}, so only they are"
                )
                raise ValueError(
                    f"{place_of(i, slot)}: expected {ours}, got {given}: {which} quantized"
                )

    def _cast(
        self, weights: Mapping[str, ArrayLike], keys: Mapping[int, str]
    ) -> dict[int, NDArray[Any]]:
        """Return the ``weights`` for the slots that ``keys`` maps to their names.

        Raises:
            ValueError: If one does not fit its slot.
        """
        parts = {}
        for i, key in keys.items():
            slot = self._layout.slots[i]
            value = as_array(weights[key], place_of(i, slot))
            parts[i] = cast_for_slot(self._layout, i, value)
            is_small = is_integer(slot.dtype) and slot.dtype.itemsize == 1
            if is_small and is_floating(value.dtype) and (parts[i] != value.astype(float)).any():
                raise ValueError(
                    f"{place_of(i, slot)}: expected whole numbers, got {value.dtype} with "
                    "fractions, such as weights of a model that is not quantized"
                )
        return parts

    def _check_frozen(self, values: Mapping[int, ArrayLike]) -> None:
        for i, value in values.items():
            where = place_of(i, self._layout.slots[i])
            check_frozen(as_array(value, where), where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file; an existing file is replaced atomically.

        Like ``get_weights().save(path)``, with layout and checksum; see `FlatWeights.save`.
        `load` reads the file in either mode of TensorFlow; other programs can read it, too.

        >>> import tempfile
        >>> import tensorflow as tf
        >>> v = tf.Variable([1.0, 2.0])
        >>> weights = TensorFlowVariables(v)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights.save(f"{folder}/model.safetensors")
        ...     weights.set_flat([0.0, 0.0])
        ...     weights.load(f"{folder}/model.safetensors")
        >>> v.numpy()
        array([1., 2.], dtype=float32)

        Args:
            path: The file. The target of a symbolic link is replaced, not the link.

        Raises:
            OSError: If it cannot be written; the old file is unchanged then.
            RuntimeError: As `get_flat`.
        """
        self.get_weights().save(path)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        strict: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        """Set weights from a safetensors file of `save` or another program.

        The file is read into memory and checked, then copied to the variables. Weights are
        matched to variables as in `set_weights`, so the file may have fewer or more of them.
        But files of other programs are matched only by name, since the order of their tensors
        has no meaning. If anything is wrong, nothing is set.

        Args:
            path: The file.
            strict: Accept only exactly the names of the model.
            rename: Maps names in the file to names of the model.

        Raises:
            OSError: If it cannot be opened.
            ValueError: If it is not a complete safetensors file, differs from what `save`
                wrote, or as in `set_weights`.
            AssertionError: If nothing in it matches.
            TypeError: If a dtype cannot be cast.
            RuntimeError: As `set_flat`.
        """
        saved = read(path)
        parts = FlatWeights.wrap(saved.buffer, saved.layout)
        try:
            self._check_halves(parts, rename)
            keys = match_slots(
                parts, self._layout, strict=strict, rename=rename, ignored=self._left_out
            )
            names = {i: (rename or {}).get(key, key) for i, key in keys.items()}
            by_position = any(self._layout.names[i] != name for i, name in names.items())
            if by_position and not saved.is_ours:
                raise ValueError(
                    f"expected names of the model, got {list(names.values())}, and no layout that "
                    "tells their order; rename= can map them"
                )
            values = self._cast(parts, keys)
        except (AssertionError, TypeError, ValueError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error
        self._mover.set_parts(values)
        self._adapted.check()

    def flatten_gradients(
        self,
        grads: Any,
        *,
        out: NDArray[Any] | None = None,
        dtype: DTypeLike | None = None,
        clip_norm: float | None = None,
    ) -> Any:
        """Return gradients as one vector, in the order of `get_flat`.

        Gradients in memory are read in place, each byte once. Rows of `tf.IndexedSlices` with
        the same index are added, at least in float32. None, and gradients that are not given,
        count as zeros.

        Gradients of a graph (inside a `tf.function`, or of `tf.gradients` and
        `tf.compat.v1.train.Optimizer.compute_gradients`) give one tensor of that graph, for one
        fetch instead of one per variable. In a TF1 graph the first call adds operations; later
        calls with the same gradients return the same tensor.

        >>> import tensorflow as tf
        >>> w, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(w * w)
        >>> variables = TensorFlowVariables([w, b])
        >>> variables.flatten_gradients(tape.gradient(loss, [w, b]))
        array([2., 4., 0.], dtype=float32)

        Args:
            grads: One gradient for each variable in order, or for each one that is trainable; or
                pairs (gradient, variable) in any order, or a mapping from name to
                gradient. A gradient is a tensor, an array, `tf.IndexedSlices`, a session's
                value of one of these, or None.
            out: Where to write: contiguous, of `get_flat_size` elements. A new vector, if None.
            dtype: Dtype of the result; that of the layout, if None. It is cast as by `set_flat`:
                integers are rounded values. Code that XLA compiles does not check that they fit.
            clip_norm: Scale the vector so that its Euclidean norm is at most this (Pascanu,
                Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
                ICML 2013), as `tf.clip_by_global_norm` does: if the norm is not finite, all of
                the vector becomes NaN. It applies to the gradients as given, so for a scaled
                loss it has to be scaled, too.

        Returns:
            ``out``, or the new vector; for gradients of a graph, a tensor.

        Raises:
            TypeError: If a dtype cannot be cast, or ``out`` is not of ``dtype``.
            ValueError: If there are too many or too few gradients, a shape differs from the
                variable's, an index is out of range, a name or variable is unknown or
                occurs twice, ``clip_norm`` is negative or not finite, a value does not fit an
                integer ``dtype`` (in a graph `tf.errors.InvalidArgumentError`, when it runs), or
                ``out`` has another length, is strided or read-only, or overlaps a gradient.
            RuntimeError: If the gradients' graph is finalized; inside a `tf.function`, if they
                are not its own tensors.
        """
        flatten = self._flatten_gradients
        if not tf.executing_eagerly():
            flatten = unconverted(flatten)
        return flatten(grads, dtype, out, clip_norm)

    def _flatten_gradients(
        self, grads: Any, dtype: Any, out: NDArray[Any] | None, clip_norm: float | None
    ) -> Any:
        target = self._dtype if dtype is None else read_dtype(dtype, "dtype")
        if not (is_floating(target) or is_integer(target) or target.kind == "c"):
            raise TypeError(f"dtype: expected one of numbers, got {target}")
        if out is not None:
            check_out(out, self._layout.size, target)
        self._changes.check()
        return self._gradients.flatten(grads, target, out, clip_norm)

    def prepare_gradients(self, optimizer: Any) -> None:
        """Build what `apply_flat_gradients` runs; otherwise its first call builds it.

        In a graph this adds operations, and variables that the optimizer has not created yet,
        so it has to be called before the graph is finalized.

        Args:
            optimizer: As for `apply_flat_gradients`.

        Raises:
            TypeError: As `apply_flat_gradients`.
            ValueError: If no variable is trainable.
            RuntimeError: If the graph is finalized; if called as `apply_flat_gradients` cannot be.
        """
        self._changes.check()
        self._steps.prepare(optimizer)

    def apply_flat_gradients(self, optimizer: Any, flat: ArrayLike) -> None:
        """Take the optimizer's step along a gradient that is one vector.

        The vector is cast as by `set_flat`, copied once, and handed to TensorFlow as one tensor
        for each dtype. Variables that are not trainable, those of optimizers, and the states of
        recurrent layers are left out; their elements are not read. (A layer that is frozen in
        `tf_keras`, or in a graph after it was built, does not mark its variables: construct with
        ``trainable_only`` for such models.)

        The vector holds the gradients that ``optimizer.apply_gradients`` takes. This matters if
        the loss is scaled: the ``LossScaleOptimizer`` of Keras 3 takes gradients of the scaled
        loss and divides them; that of `tf_keras` takes the result of its
        ``get_unscaled_gradients``. Both skip a step whose gradients are not finite.

        The step is that of a dense gradient, also along a vector of `flatten_gradients` that was
        made of `tf.IndexedSlices`: rows without a gradient have zeros. In a sparse step, TF1's
        momentum, RMSProp and FTRL leave such rows alone; here they change them. FTRL computes each
        weight from the sums of its gradients, so a row that never had one becomes 0.

        The first call with an optimizer builds a `tf.function`, traced once, or operations of
        the graph (see `prepare_gradients`), and keeps them as long as the optimizer lives. Only
        this call reads which variables are trainable, and the optimizer's settings in Python
        rather than in variables. In a graph, slots that the optimizer creates then are
        initialized in the session.

        >>> import keras
        >>> v = keras.Variable([1.0, 2.0])
        >>> TensorFlowVariables(v).apply_flat_gradients(keras.optimizers.SGD(0.5), [2.0, 4.0])
        >>> v.numpy()
        array([0., 0.], dtype=float32)

        Args:
            optimizer: Of Keras 3, `tf_keras` or `tf.compat.v1.train`, or anything with their
                ``apply_gradients``; in a graph, of `tf.compat.v1.train`.
            flat: Vector of `get_flat_size` elements.

        Raises:
            TypeError: If ``optimizer`` is not one, or the vector's dtype cannot be cast.
            ValueError: If the vector has another length, or no variable is trainable.
            RuntimeError: In a graph, if no session is set, it is finalized and this is the first
                call, or a variable is not initialized; if called inside a `tf.function` or within
                the scope of a `tf.distribute` strategy.
        """
        self._changes.check()
        self._steps.apply(optimizer, self._vector(flat, "flat"))

    def value_and_gradient(
        self, loss_fn: Callable[[], Any], *, dtype: DTypeLike = np.float64
    ) -> Callable[..., tuple[float, NDArray[Any]]]:
        """Return a function from a vector of weights to the loss there and its gradient.

        `scipy.optimize.minimize` takes such a function with ``jac=True``, for ``method="L-BFGS-B"``
        (Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound constrained
        optimization", SIAM J. Sci. Comput. 16(5), 1995) and other methods. Each call sets all
        weights and does not restore them. Set the weights of the result afterwards, since the last
        ones tried may not be the best. Elements of variables that are not trainable have the
        gradient 0.

        The weights are rounded to the dtypes of the variables. Where these are float32, the loss
        is flat at distances of 1e-7 of a weight, and a search cannot be more precise.

        >>> import tensorflow as tf
        >>> from scipy.optimize import minimize
        >>> w = tf.Variable([0.0, 0.0], dtype=tf.float64)
        >>> variables = TensorFlowVariables(w)
        >>> fun = variables.value_and_gradient(lambda: tf.reduce_sum((w - [1.0, 2.0]) ** 2))
        >>> result = minimize(fun, variables.get_flat(), jac=True, method="L-BFGS-B")
        >>> variables.set_flat(result.x)
        >>> w.numpy().round(6)
        array([1., 2.])

        Args:
            loss_fn: Returns the loss, a scalar. It is called once, now. In eager mode a
                `tf.function` traces it, so values that it reads from Python are fixed from then
                on: keep data that changes in variables. In a graph, it returns a tensor of
                that graph.
            dtype: Dtype of the gradient, floating.

        Returns:
            The function. Its gradient is a new vector each time. In a graph it takes a
            ``feed_dict`` as well: ``minimize(fun, x0, args=(feed_dict,), ...)``.

        Raises:
            TypeError: If ``dtype`` is not floating, or cannot hold the gradient.
            ValueError: If the loss is not a scalar of a floating dtype, or depends on none of the
                trainable variables.
            RuntimeError: If the graph is finalized; if this or the function is called inside a
                `tf.function` or within the scope of a `tf.distribute` strategy.
        """
        objective = Objective(self._variables, self._layout, self.set_flat, dtype, self._states)
        if self._session is not None:
            return objective.in_session(loss_fn, self._session)
        return objective.eager(loss_fn)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: variables belong to the process that built them."""
        raise TypeError(
            "TensorFlowVariables cannot be pickled: a copy would set a different model. "
            "Build the model inside the actor, and send get_weights() or get_flat()"
        )


@lru_cache
def _lossy_slots(layout: Layout, vector: np.dtype[Any]) -> list[int]:
    """Return the slots whose values a vector of this dtype may not hold."""
    dtypes = [slot.dtype for slot in layout.slots]
    if vector.kind == "c":
        # A caller who passes a complex dtype for real weights intends this.
        is_intended = layout.dtype.kind != "c"
        return [i for i, own in enumerate(dtypes) if own.kind != "c" and not is_intended]
    bits = _bits_of_integers(vector)
    return [i for i, own in enumerate(dtypes) if is_integer(own) and 8 * own.itemsize > bits]


def _bits_of_integers(dtype: np.dtype[Any]) -> int:
    """Return the number of bits up to which ``dtype`` holds all integers exactly."""
    return int(ml_dtypes.finfo(dtype).nmant) + 1 if is_floating(dtype) else 8 * dtype.itemsize


def _holds_integers(values: NDArray[Any]) -> bool:
    """Whether ``values`` are integers that were converted without rounding."""
    largest = 2.0 ** _bits_of_integers(values.dtype)
    return bool((np.abs(values.astype(np.float64)) < largest).all())
