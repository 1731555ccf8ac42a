"""`TensorFlowVariables`: get and set the weights of a model."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from flatweights._cast import is_settable, settable_at
from flatweights._dtypes import is_averaged, is_floating, is_integer
from flatweights._flatten import new_vector
from flatweights._inplace import finite
from flatweights._layout import Layout, place_of
from flatweights._safetensors import read
from flatweights._trees import as_array
from flatweights._weights import FlatWeights
from flatweights.tensorflow._apply import Steps
from flatweights.tensorflow._discover import discover
from flatweights.tensorflow._eager import EagerOperations
from flatweights.tensorflow._frozen import check_frozen
from flatweights.tensorflow._gradients import Gradients
from flatweights.tensorflow._groups import make_groups
from flatweights.tensorflow._library import load_library
from flatweights.tensorflow._match import match_slots
from flatweights.tensorflow._mover import ADD, LERP, Mover, Update
from flatweights.tensorflow._objective import EagerObjective, SessionObjective
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
      values of a dict their key; in ``[model, optimizer]`` the model's names stay, and slots
      are named after their variable (``optimizer/dense/kernel/momentums``). Repeats are
      numbered in order.

    The vector has the dtype that `numpy.concatenate` would promote the variables to.

    Variables are bound, where they can be (`unbound` names the others): read and written
    where they are, all of them locked meanwhile, as TensorFlow's optimizers lock theirs. A
    wrong call changes nothing. A read sees all or nothing of another thread's set or
    update; beside a training step it may see some variables updated and some not, but
    each one whole. Values that were read before, and variables that were assigned from
    these, never change. Any number of threads may call.

    Calls that move unbound variables exclude each other by a lock, so all of this holds between
    them; but of an update by TensorFlow beside `add_flat` or `lerp_flat` one of both may be
    lost. The replicas of mirrored variables follow one after the other: once all calls have
    returned they are equal, and beside a running one they may differ.

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
        discovered = discover(output, input_variables, sess, trainable_only=trainable_only)
        self._variables = discovered.wrappers
        self._layout = Layout(
            list(discovered.variables),
            [v.shape.as_list() for v in discovered.variables.values()],
            [v.dtype.base_dtype.as_numpy_dtype for v in discovered.variables.values()],
        )
        self._dtype = self._layout.dtype
        self._has_warned = False
        self._lossy: dict[np.dtype[Any], list[int]] = {}
        self._not_computed_with = [
            str(slot)
            for slot in self._layout.slots
            if is_floating(slot.dtype) and not is_averaged(slot.dtype)
        ]
        library = None if _runs_elsewhere(sess) else load_library()
        variables = list(discovered.variables.values())
        groups = make_groups(variables, self._layout)
        self._session: SessionOperations | None = None
        if discovered.graph is None:
            eager = EagerOperations(variables, groups, library)
            self._mover = Mover(eager, self._layout, library)
            if tf.executing_eagerly():
                self._mover.bind()
            self._replicas = Replicas(self._mover, self._layout, discovered.replicas, library)
        else:
            self._session = SessionOperations(
                discovered.variables, discovered.graph, groups, library
            )
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
    def shared(self) -> dict[str, bool]:
        """By name, whether a variable's value aliases memory that was shared with it.

        True after ``share=True``, until the variable gets another value; False where that
        copied: see `set_flat`.

        >>> import tensorflow as tf
        >>> TensorFlowVariables(tf.Variable(3.0, name="b")).shared
        {'b': False}
        """
        return dict(zip(self._layout.names, self._mover.shared(), strict=True))

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

        A vector of floating numbers rounds integers beyond its precision (2**53 for float64:
        the state of a `tf.random.Generator`), and `set_flat` takes no complex vector for real
        variables. Where either occurs, the first call warns and names the variable:
        `get_weights` and `set_weights` keep each dtype.

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
            vector = (self._mover.get_all or self._mover.try_get)(out)
            if vector is not None:
                return vector
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
        self._warn_of_loss(out)
        return out

    def _warn_of_loss(self, flat: NDArray[Any]) -> None:
        """Warn, once, of slots that `set_flat` cannot set from ``flat`` to what they hold."""
        for i in self._may_lose(flat.dtype):
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

    def _may_lose(self, dtype: np.dtype[Any]) -> list[int]:
        """Return the positions whose values a vector of ``dtype`` may not hold; none once told."""
        if self._has_warned:
            return []
        if dtype not in self._lossy:
            slots = list(enumerate(self._layout.slots))
            if dtype.kind == "c":
                # Asked for by name, a complex vector of real weights is meant.
                is_mixed = self._dtype.kind == "c"
                lossy = [i for i, slot in slots if is_mixed and slot.dtype.kind != "c"]
            else:
                bits = _bits_of_integers(dtype)
                lossy = [i for i, s in slots if is_integer(s.dtype) and 8 * s.dtype.itemsize > bits]
            self._lossy[dtype] = lossy
        return self._lossy[dtype]

    def _check_out(self, out: NDArray[Any], dtype: np.dtype[Any]) -> None:
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}")
        size = self._layout.size
        if out.dtype != dtype:
            raise TypeError(f"out: expected {dtype} ({size},), got {out.dtype} {out.shape}")
        if out.shape != (size,) or not out.flags.c_contiguous:
            raise ValueError(
                f"out: expected contiguous {dtype} ({size},), got {out.dtype} {out.shape} with "
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
        alive (`shared` tells which). TensorFlow copies such a value, and every slice of it,
        before it writes to it, so a training step ends the sharing and changes nothing in the
        vector. For actors that use a model and do not train it: all of one node then hold one
        copy of the weights, that in Ray's object store. (The slots of a packed buffer all lie
        at such boundaries: see `set_weights`.) Variables that TensorFlow writes to in place, as
        after a `tf.gather` from them, are always copied to, and so are unbound ones.

        Code that breaks TensorFlow's rule that tensors do not change writes to the vector, as it
        would write to a variable that shares nothing: a `tf.numpy_function` that
        changes its argument, and `tf.raw_ops.InplaceUpdate` with its kin. Do not share with
        models that contain any.

        Args:
            new_weights: Vector of `get_flat_size` elements.
            share: Alias the vector, which must be read-only: its owner could change the
                model behind its back otherwise. So must be everything that it is a view of, down
                to an array that owns its memory or something that exports a read-only buffer
                (what Ray returns, `bytes`, a read-only `mmap`). Their flags are trusted:
                views that were writable before an array was frozen, other maps of a file are not
                found. What only claims to be read-only, as arrays of `numpy.from_dlpack` and
                of an ``__array_interface__`` do, is refused.

        Raises:
            ValueError: If it has another length, a value does not fit an integer variable,
                or it is to be shared and can be written to, or does not tell.
            TypeError: If its dtype cannot be cast.
            RuntimeError: In a graph, if no session is set; if called inside a `tf.function`.
        """
        if share or not (self._mover.set_all or self._mover.try_set)(new_weights):
            flat = self._vector(new_weights, "new_weights")
            if share:
                check_frozen(np.asarray(new_weights), "new_weights")
            self._mover.set_vector(flat, share=share)
        self._replicas.follow()

    def _vector(self, value: ArrayLike, argument: str) -> NDArray[Any]:
        flat = as_array(value)
        if flat.shape != (self._layout.size,):
            raise ValueError(f"{argument}: expected shape ({self._layout.size},), got {flat.shape}")
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

    def _update(self, update: Update, value: ArrayLike, argument: str, a: float) -> None:
        flat = self._vector(value, argument)
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
        renamed scope, shifted automatic numbers), unless the names tell that they are in
        another order. Else, if some names are known, those, with a warning that lists the
        others. Values are cast as by `set_flat`. Everything is checked before anything is
        set.

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
                self._check_frozen(dict(enumerate(new_weights.values())))
            self._mover.set_packed(new_weights.buffer, share=share)
            return self._replicas.follow()
        keys = match_slots(new_weights, self._layout, strict=strict, rename=rename)
        if share:
            self._check_frozen({i: new_weights[key] for i, key in keys.items()})
        values = {i: settable_at(self._layout, i, new_weights[key]) for i, key in keys.items()}
        self._mover.set_parts(values, share=share)
        return self._replicas.follow()

    def _check_frozen(self, values: Mapping[int, ArrayLike]) -> None:
        for i, value in values.items():
            check_frozen(np.asarray(value), place_of(i, self._layout.slots[i]))

    def _fits(self, weights: FlatWeights) -> bool:
        return weights.layout is self._layout or weights.layout == self._layout

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file, in place of what was there.

        As ``get_weights().save(path)``: at once and whole, or not at all, with layout and
        checksum; see `FlatWeights.save`. `load` reads it in either mode of TensorFlow, and other
        programs read it too.

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
            path: Where. What a symbolic link points to is replaced, not the link.

        Raises:
            OSError: If it cannot be written; the old file is untouched then.
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
        """Set weights from a safetensors file: that of `save`, or of another program.

        The file is mapped into memory, and checked, and each byte is copied once, to its
        variable. Which weights are meant for which variables is decided as in `set_weights`, so
        a file of some of them is enough, and one of more will do; but the files of other
        programs set by name alone, since the order of their tensors has no meaning. If
        anything is wrong, nothing is set.

        Args:
            path: The file.
            strict: Accept nothing but all names of the model, each known.
            rename: Names in the file to names of the model.

        Raises:
            OSError: If it cannot be opened.
            ValueError: If it is not a whole safetensors file, is not as `save` wrote it, or
                as in `set_weights`.
            AssertionError: If nothing in it matches.
            TypeError: If a dtype cannot be cast.
            RuntimeError: As `set_flat`.
        """
        layout, parts = read(path)
        try:
            keys = match_slots(parts, self._layout, strict=strict, rename=rename)
            names = {i: (rename or {}).get(key, key) for i, key in keys.items()}
            if layout is None and any(self._layout.names[i] != name for i, name in names.items()):
                raise ValueError(
                    f"expected names of the model, got {list(names.values())}, and no layout that "
                    "tells their order; rename= can map them"
                )
            values = {i: settable_at(self._layout, i, parts[key]) for i, key in keys.items()}
        except (AssertionError, TypeError, ValueError) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error
        self._mover.set_parts(values)
        self._replicas.follow()

    def flatten_gradients(
        self,
        grads: Any,
        *,
        out: NDArray[Any] | None = None,
        dtype: DTypeLike | None = None,
        clip_norm: float | None = None,
    ) -> Any:
        """Return gradients as one vector: element for element those of `get_flat`.

        Gradients in memory are read where they are, each byte once; their sum over repeated
        indices is taken, in float32 at least, where they are `tf.IndexedSlices`. What is None,
        or not given, counts as zeros.

        Gradients of a graph (inside a `tf.function`, or of `tf.gradients` and
        `tf.compat.v1.train.Optimizer.compute_gradients`) give a tensor of it, for one fetch
        instead of one for each variable. In a TF1 graph its operations are added at the
        first call; later ones with the same gradients return the same tensor.

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
                gradient. A gradient is a tensor, an array, `tf.IndexedSlices`, what a session
                returned for these, or None.
            out: Where to write: contiguous, of `get_flat_size` elements. A new vector, if None.
            dtype: Dtype of the result; that of the layout, if None.
            clip_norm: Scale the vector so that its Euclidean norm is at most this (Pascanu,
                Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
                ICML 2013), as `tf.clip_by_global_norm` does: if the norm is not finite, all of
                the vector becomes NaN. It applies to what is given, so that of a scaled loss
                has to be scaled too.

        Returns:
            ``out``, or the new vector; for gradients of a graph, a tensor.

        Raises:
            TypeError: If a dtype cannot be cast, or ``out`` is not of ``dtype``.
            ValueError: If there are too many or too few gradients, a shape differs from the
                variable's, an index is out of range, a name or variable is unknown or
                occurs twice, ``clip_norm`` is negative or not finite, or ``out`` has another
                length, is strided or read-only, or overlaps a gradient.
            RuntimeError: If the gradients' graph is finalized; inside a `tf.function`, if they are
                not of it.
        """
        target = self._dtype if dtype is None else np.dtype(dtype)
        if out is not None:
            self._check_out(out, target)
        return self._gradients.flatten(grads, target, out, clip_norm)

    def prepare_gradients(self, optimizer: Any) -> None:
        """Build what `apply_flat_gradients` runs, which its first call does otherwise.

        In a graph this adds operations, and variables that the optimizer has not made yet, so
        it has to be called before the graph is finalized.

        Args:
            optimizer: As for `apply_flat_gradients`.

        Raises:
            TypeError: As `apply_flat_gradients`.
            ValueError: If no variable is trainable.
            RuntimeError: If the graph is finalized; if called inside a `tf.function`.
        """
        self._steps.prepare(optimizer)

    def apply_flat_gradients(self, optimizer: Any, flat: ArrayLike) -> None:
        """Take the optimizer's step along a gradient that is one vector.

        The vector is cast as by `set_flat`, copied once, and handed to TensorFlow as one tensor
        for each dtype. Variables that are not trainable are left out; their elements are
        not read. (Layers that are frozen in `tf_keras`, or in a graph after they were built, do not
        tell their variables: construct with ``trainable_only`` where there are any.)

        The vector holds what ``optimizer.apply_gradients`` takes. Mind that where the loss
        is scaled: the ``LossScaleOptimizer`` of Keras 3 takes gradients of the scaled loss and
        divides them; that of `tf_keras` takes what its ``get_unscaled_gradients`` returns. Both
        leave out a step whose gradients are not finite.

        What runs is built at the first call with an optimizer and kept as long as that lives:
        a `tf.function`, traced once, or operations of the graph (see `prepare_gradients`).
        Which variables are trainable, and what the optimizer keeps in Python rather than in
        variables, is read then. In a graph, slots that the optimizer makes then are
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
            TypeError: If ``optimizer`` is none, or the vector's dtype cannot be cast.
            ValueError: If the vector has another length, or no variable is trainable.
            RuntimeError: In a graph, if no session is set, it is finalized and this is the first
                call, or a variable is not initialized; if called inside a `tf.function`.
        """
        self._steps.apply(optimizer, self._vector(flat, "flat"))

    def value_and_gradient(
        self, loss_fn: Callable[[], Any], *, dtype: DTypeLike = np.float64
    ) -> Callable[..., tuple[float, NDArray[Any]]]:
        """Return a function from a vector of weights to the loss there and its gradient.

        It is what `scipy.optimize.minimize` takes with ``jac=True``, for ``method="L-BFGS-B"``
        (Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound constrained
        optimization", SIAM J. Sci. Comput. 16(5), 1995) and others. Each call sets the weights,
        all of them, and leaves them so: set those of the result afterwards, for the last
        ones tried need not be the best. Elements of variables that are not trainable
        have the gradient 0.

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
            loss_fn: Returns the loss, a scalar. It is called here, once: eagerly in a
                `tf.function`, which is traced now and never again (so what it reads from Python
                stays as it is now: hand over data that changes in variables); in a graph,
                to return a tensor of it.
            dtype: Dtype of the gradient, floating.

        Returns:
            The function. Its gradient is a new vector each time. In a graph it takes a
            ``feed_dict`` as well: ``minimize(fun, x0, args=(feed_dict,), ...)``.

        Raises:
            TypeError: If ``dtype`` is not floating, or cannot hold the gradient.
            ValueError: If the loss is no scalar of a floating dtype, or depends on none of the
                trainable variables.
            RuntimeError: If the graph is finalized; if called inside a `tf.function`.
        """
        model = (self._variables, self._layout, self.set_flat, dtype)
        if self._session is not None:
            return SessionObjective(loss_fn, self._session, *model)
        return EagerObjective(loss_fn, *model)

    @functools.cached_property
    def _gradients(self) -> Gradients:
        return Gradients(self._variables, self._layout)

    @functools.cached_property
    def _steps(self) -> Steps:
        return Steps(self._variables, self._layout, self._session)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: variables belong to the process that built them."""
        raise TypeError(
            "TensorFlowVariables cannot be pickled: a copy would set another model than yours. "
            "Build the model inside the actor, and send get_weights() or get_flat()"
        )


def _bits_of_integers(dtype: np.dtype[Any]) -> int:
    """Return how many bits an integer may have that ``dtype`` holds exactly."""
    return int(ml_dtypes.finfo(dtype).nmant) + 1 if is_floating(dtype) else 8 * dtype.itemsize


def _holds_integers(values: NDArray[Any]) -> bool:
    """Whether integers were not rounded when they became these ``values``."""
    largest = 2.0 ** _bits_of_integers(values.dtype)
    return bool((np.abs(values.astype(np.float64)) < largest).all())


def _runs_elsewhere(session: Any) -> bool:
    # A server that does not know the op refuses the whole graph.
    target = getattr(session, "sess_str", "")
    return bool(target)
