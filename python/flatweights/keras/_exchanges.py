"""The exchanges of one optimizer, each made once for the same variables."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from flatweights.keras._exchange import Exchange
from flatweights.keras._hooks import variables_of
from flatweights.keras._names import inner_variable, named_variables, with_slots
from flatweights.keras._sparse import Sparse, Tables, is_sent_sparse
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._python_op import HOST

_log = logging.getLogger("flatweights")

_Key = tuple[int, ...]  # the `id` of each variable


class Exchanges:
    """What an optimizer exchanges with other members, and the names by which they compare it.

    Attributes:
        is_far: Whether members are known to be on several nodes.
    """

    def __init__(self, optimizer: Any, sparse: Sparse) -> None:
        """Begin without a model.

        Args:
            optimizer: The optimizer.
            sparse: Whether rows of tables travel, or "auto".
        """
        self.is_far = False
        self._optimizer = optimizer
        self._sparse = sparse
        # Not weakly: whether it is there must not depend on when garbage is collected.
        self._model: Any = None
        self._of_gradients: dict[tuple[_Key, tuple[Any, ...]], Exchange] = {}
        self._of_tensors: dict[tuple[Any, ...], Exchange] = {}
        self._tables: dict[tuple[_Key, tuple[bool, ...]], Tables | None] = {}
        self._states: dict[_Key, TensorFlowVariables] = {}
        self._names: dict[int, str] = {}  # of layers' variables
        self._is_named = False  # whether names are in use

    def know(self, model: Any, *, at_first: bool = False) -> None:
        """Name variables by the structure of ``model`` from now on; by their paths, if None.

        Members change names at the same calls. To trace a step again, which only some of them may
        do, changes none: with ``at_first``, this has an effect only before names are in use.
        """
        if self._model is not model and not (at_first and self._is_named):
            self._model = model
            self._of_gradients.clear()
            self._states.clear()
            self._names.clear()
            for tables in filter(None, self._tables.values()):  # steps that were traced have them
                tables.rename([slot.name for slot in self._slots_of(tables.variables)[1]])

    def of_gradients(self, dtypes: Sequence[Any], variables: Sequence[Any]) -> Exchange:
        """Return the exchange of dense gradients of ``variables``, of these ``dtypes``."""
        key = _key_of(variables), tuple(dtypes)
        exchange = self._of_gradients.get(key)
        if exchange is None:
            named, slots = self._slots_of(variables)
            names, shapes = [slot.name for slot in slots], [(slot.size,) for slot in slots]
            exchange = self._of_gradients[key] = Exchange(names, shapes, dtypes, named)
        return exchange

    def of_tensor(self, tensor: tf.Tensor, name: str) -> Exchange:
        """Return the exchange of a tensor whose shape is known, and that is called ``name``."""
        key = name, tensor.dtype, *tensor.shape
        exchange = self._of_tensors.get(key)
        if exchange is None:
            shape, dtype = tuple(tensor.shape), tensor.dtype.as_numpy_dtype
            exchange = self._of_tensors[key] = Exchange([name], [shape], [dtype])
        return exchange

    def tables_of(
        self, grads: Sequence[Any], variables: Sequence[Any], device: str
    ) -> Tables | None:
        """Return the tables of which rows travel; None, if there are none.

        It is decided when gradients of these variables are first averaged. With ``min_results``, it
        depends on the variables alone, since a process that joins later must decide the same.
        """
        which = tuple(isinstance(grad, tf.IndexedSlices) for grad in grads)
        if self._sparse is False or not any(which):
            return None
        key = _key_of(variables), which
        if key in self._tables:
            return self._tables[key]
        found = [
            i
            for i, pair in enumerate(zip(grads, variables, strict=True))
            if is_sent_sparse(*pair, self._sparse, is_far=self.is_far, on_gpu=device != HOST)
        ]
        tables = None
        if found:
            named, slots = self._slots_of(variables)
            names = [slot.name for slot in slots]
            tables = Tables(found, names, named)
            where = "several nodes" if self.is_far else "one node, or not known"
            for i in found:
                text = (
                    "average_gradients: of the gradient of %s, %d bytes, rows travel; members: %s"
                )
                _log.info(text, names[i], slots[i].nbytes, where)
        self._tables[key] = tables
        return tables

    def state_of(self, variables: Sequence[Any]) -> TensorFlowVariables:
        """Return what heals a member of a training of ``variables``.

        An optimizer's own name is part of the names: it tells its state from that of another one
        with variables of the same names.
        """
        key = _key_of(variables)
        if key not in self._states:
            name = _own_name(self._optimizer)
            self._states[key] = self.with_slots(variables, f"{name}/" if name else "")
        return self._states[key]

    def with_slots(
        self, variables: Sequence[Any], prefix: str = "", *, without: Sequence[Any] = ()
    ) -> TensorFlowVariables:
        """Return ``variables`` and the optimizer's slots, in the same order in all members.

        Left out are those ``without``, and the sums of a member's own gradients.
        """
        left_out = [*own_slots(self._optimizer), *without]
        return with_slots(self._named(variables), self._optimizer, prefix, without=left_out)

    def name_of(self, variable: Any) -> str:
        """Return the name of a layer's variable, equal in all members."""
        key = id(inner_variable(variable))
        if key not in self._names:
            with tf.init_scope():
                self._names[key] = next(iter(self._named([variable])))
        return self._names[key]

    def _slots_of(self, variables: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """Return ``variables`` and their slots."""
        with tf.init_scope():
            named = self._named(variables)
            return [*named.values()], TensorFlowVariables(named).layout.slots

    def _named(self, variables: Sequence[Any]) -> dict[str, Any]:
        """Return ``variables`` by name: by the model's structure, if a `fit` has told the model.

        A step may have only some of the optimizer's variables; these keep the names that they have
        among all.
        """
        self._is_named = True
        every = {id(one): one for one in variables_of(self._optimizer)}
        every |= {id(one): one for one in variables}
        names = named_variables([*every.values()], self._model)
        by_id = dict(zip(every, names, strict=True))
        return {by_id[id(one)]: one for one in variables}


def adds_up_own(optimizer: Any) -> bool:
    """Whether ``optimizer`` adds up gradients of its member alone, whose sums are averaged.

    What a wrapper's optimizer adds up are averages: the wrapper decides whether to pass them on.
    """
    is_wrapper = hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "optimizers")
    return bool(optimizer.gradient_accumulation_steps) and not is_wrapper


def own_slots(optimizer: Any) -> list[Any]:
    """Return the slots of ``optimizer`` that differ among members: sums of their own gradients."""
    if not adds_up_own(optimizer):
        return []
    return [one for one in optimizer.variables if str(one.name).endswith("gradient_accumulator")]


def takes_next_value(variable: Any) -> bool:
    """Whether Keras passes the next value of ``variable`` as its gradient: each member has its own.

    So it does with the scales of `quantize("float8")`, which it computes from the batches.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _key_of(variables: Sequence[Any]) -> _Key:
    return tuple(id(inner_variable(variable)) for variable in variables)


def _own_name(optimizer: Any) -> str:
    """Return the name that a user gave to ``optimizer``; empty, if Keras has named it."""
    name, kind = str(optimizer.name), type(optimizer).__name__
    is_own = re.sub(r"_\d+$", "", name).replace("_", "").lower() != kind.lower()
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if is_own else "" if inner is None else _own_name(inner)
