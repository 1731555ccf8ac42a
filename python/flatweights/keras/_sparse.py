"""Gradients of tables, of which members exchange the rows that their batches take.

A step makes two calls. In the first, all members gather the numbers of their rows; each computes
the union, in ascending order. The second averages all gradients of the step, as without tables,
but of each table only the rows of the union: zeros, where a member has none. So the mean has the
bits of the dense one, and members, NaN and late members count as in the dense one.

All values of a step are in the second call, also the numbers of the rows. So it does not matter
whether the same members take part in both: a member that dies in between leaves rows of zeros. One
that was late for the first does not count in the second, since rows of its own may be missing
there. One that gets an earlier average, or is healed, gets the numbers of its rows with it.

Both need layouts, so the rows have room for some more than there are, as long as a step needs at
least half of it. Members tell their room in the first call, and the largest one holds.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import Layout
from flatweights._core import CalledTensors, MemberTurn, RepeatedRequest
from flatweights.keras._exchange import Exchange
from flatweights.tensorflow._python_op import Compute, compute_in_python

Sparse: TypeAlias = bool | Literal["auto"]
"""Whether gradients of tables travel as rows."""

_NEAR = 4 << 20  # least bytes of a table of which rows travel, if all members are on one node
_FAR = 1 << 20  # the same between nodes
_LEAST = 16  # rows for which there is room, at least

# The optimizers that compute the same from rows as from a dense gradient, and no slower. RMSprop
# differs by 3e-5. A class that is derived from one of these may update only the rows that it gets.
_TAKE_ROWS = frozenset(
    getattr(keras.optimizers, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Ftrl", "Nadam", "SGD")
)


def check_sparse(sparse: Any, optimizer: Any, rule: Any) -> None:
    """Raise unless ``sparse`` is one of its values, and possible for ``optimizer``."""
    if not (isinstance(sparse, bool) or sparse == "auto"):
        raise ValueError(f"sparse: expected True, False or 'auto', got {sparse!r}")
    if sparse is True and rule is not None:
        raise ValueError(
            f"sparse: expected False or 'auto' with a rule, got True: {rule.name} sees whole "
            "gradients"
        )
    if sparse is True and optimizer.gradient_accumulation_steps:
        raise ValueError(
            "sparse: expected False or 'auto' with gradient_accumulation_steps, got True: Keras "
            "accumulates whole gradients, and these are averaged"
        )


def is_sent_sparse(
    gradient: Any, variable: Any, sparse: Any, *, is_far: bool, on_gpu: bool
) -> bool:
    """Whether only rows of ``gradient`` are to travel; the same in all members.

    Args:
        gradient: The gradient.
        variable: Its variable.
        sparse: True, or "auto".
        is_far: Whether members are known to be on several nodes.
        on_gpu: Whether dense gradients would be averaged in the memory of a GPU.
    """
    if not (isinstance(gradient, tf.IndexedSlices) and tf.as_dtype(gradient.dtype).is_floating):
        return False
    if sparse is True:
        return True
    nbytes = int(np.prod(variable.shape)) * tf.as_dtype(gradient.dtype).size
    return nbytes >= (_FAR if is_far else _NEAR) and (is_far or not on_gpu)


def takes_rows(optimizer: Any) -> bool:
    """Whether ``optimizer`` is given rows; otherwise, they are made dense."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    changes = "clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"
    return (
        type(optimizer) in _TAKE_ROWS
        and optimizer.loss_scale_factor is None
        and not any(getattr(optimizer, name, None) for name in changes)
    )


class SparseExchange(Exchange):
    """The gradients of one step, of tables only some rows: `Exchange` for rooms of one size.

    Attributes:
        weight: 0, if this member's rows are not among these.
        unions: Of each table, the numbers of the rows, in a vector as long as its room: -1 beyond.
    """

    def __init__(self, *args: Any) -> None:
        """Take what `Exchange` takes; the last tensors are the numbers of rows, in float64."""
        super().__init__(*args)
        self.unions: list[NDArray[np.float64]] = []
        self._differs = False

    @property
    def gpu(self) -> bytes | None:
        return None

    def let_repeat(self, request: RepeatedRequest, turn: MemberTurn, seconds: float) -> None:
        """Do nothing: the rows differ from step to step."""

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        if not self.weight:
            buffer.fill(0)  # a NaN would count
            return
        super().gather_into(buffer)
        for view, union in zip(self._numbers(buffer), self.unions, strict=True):
            view[:] = union

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        super().scatter(buffer)
        pairs = zip(self._numbers(buffer), self.unions, strict=True)
        self._differs = not all(np.array_equal(view, union) for view, union in pairs)

    def pass_on(self, grads: CalledTensors) -> None:
        self.weight = 1.0
        with self.of(grads):
            buffer = self.layout.new_buffer()
            self.gather_into(buffer)
            self.scatter(buffer)

    def check(self) -> None:
        if self._differs and self.weight:
            raise RuntimeError(
                f"{self.layout.slots[0].name}: expected the same rows of all members, got others: "
                "some members have repeated a step that had failed. Begin the training again"
            )

    def _numbers(self, buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
        slots = self.layout.slots[len(self.layout.slots) - len(self.unions) :]
        return [
            buffer[slot.offset : slot.offset + 8 * slot.size].view(np.float64) for slot in slots
        ]


class Tables:
    """The gradients of one set of variables, some of which are tables.

    Attributes:
        names: The names of the variables of all gradients, the same in all members.
        variables: These variables.
        rooms: Of each table, the number of rows for which the last step had room.
    """

    def __init__(
        self, tables: Sequence[int], names: Sequence[str], variables: Sequence[Any]
    ) -> None:
        """Take the tables by their position among the gradients, and the variables of all."""
        self.names = names
        self.variables = variables
        self.rooms = [0] * len(tables)
        self._shapes = {i: tuple(variables[i].shape) for i in tables}
        self._unions: list[NDArray[np.int64]] = []
        self._is_among = True  # this member's rows are in the unions
        self._own: list[NDArray[np.int64]] = []
        self._exchanges: dict[tuple[tuple[int, ...], tuple[Any, ...]], SparseExchange] = {}

    def rename(self, names: Sequence[str]) -> None:
        """Give all variables other names."""
        self.names = names
        self._exchanges.clear()

    @property
    def what(self) -> str:
        """What the first call gathers."""
        return f"rows of {', '.join(self.names[i] for i in self._shapes)}"

    def average(
        self,
        grads: Sequence[Any],
        gather: Compute,
        exchange: Compute,
        as_rows: bool,
        kept_in: list[Compute],
    ) -> list[Any]:
        """Return the averages of ``grads``.

        Args:
            grads: The gradients; those of tables are rows.
            gather: Makes the first call, by `read` and `write`.
            exchange: Makes the second one, of an `exchange_of`.
            as_rows: Whether averages of tables are to be rows, too.
            kept_in: What keeps both calls; see `compute_in_python`.
        """
        numbers, rows = [], []
        for i in self._shapes:
            own, which = tf.unique(tf.reshape(grads[i].indices, [-1]))
            numbers.append(tf.cast(own, tf.int64))
            # In the order of the batch, as Keras adds them if it makes a gradient dense.
            values = tf.convert_to_tensor(grads[i].values)
            rows.append(tf.math.unsorted_segment_sum(values, which, tf.size(own)))
        sizes = tf.zeros(len(rows), tf.int64)
        *places, rooms = compute_in_python(gather, [*numbers, sizes], kept_in=kept_in)
        tensors = [
            None if i in self._shapes else tf.convert_to_tensor(grads[i]) for i in range(len(grads))
        ]
        shapes = [
            tf.concat([room[tf.newaxis], tf.constant(whole[1:], tf.int64)], 0)
            for room, whole in zip(tf.unstack(rooms, len(rows)), self._shapes.values(), strict=True)
        ]
        for i, place, row, shape in zip(self._shapes, places, rows, shapes, strict=True):
            tensors[i] = tf.scatter_nd(place[:, tf.newaxis], row, shape)
        empty = [tf.zeros(shape[:1], tf.float64) for shape in shapes]
        averages: list[Any] = compute_in_python(exchange, [*tensors, *empty], kept_in=kept_in)
        for (i, whole), found in zip(self._shapes.items(), averages[len(grads) :], strict=True):
            own = tf.cast(found, tf.int64)
            count = tf.math.count_nonzero(own >= 0)
            mean = tf.ensure_shape(averages[i][:count], [None, *whole[1:]])
            dense = tf.constant(whole, tf.int64)
            averages[i] = tf.IndexedSlices(mean, own[:count], dense)
            if not as_rows:
                averages[i] = tf.scatter_nd(own[:count, tf.newaxis], mean, dense)
        return averages[: len(grads)]

    def read(self, called: CalledTensors) -> bytes:
        """Take the numbers of own rows; return them, and the rooms, as the others get them.

        Raises:
            ValueError: If there are no such rows.
        """
        *sizes, _ = called.sizes
        self._own = self._moved(called, sizes, None)
        sent: list[tuple[int, bytes]] = []
        for own, room, (i, shape) in zip(self._own, self.rooms, self._shapes.items(), strict=True):
            if own.size and not (own.min() >= 0 and own.max() < shape[0]):
                raise ValueError(
                    f"gradient of {self.names[i]}: expected rows 0 to {shape[0] - 1}, got rows "
                    f"{own.min()} to {own.max()}"
                )
            sent.append((room, own.astype(_number_dtype(shape[0])).tobytes()))
        return pickle.dumps(sent)

    def write(self, called: CalledTensors, told: Sequence[bytes], is_among: bool) -> None:
        """Agree with the others; write where own rows are among those of all, and the rooms.

        Args:
            called: The tensors.
            told: What members have sent, in the order of their ranks.
            is_among: Whether this member is one of them.
        """
        by_rank = [pickle.loads(one) for one in told]
        self._is_among, self._unions = is_among, []
        places = []
        for k, (shape, own) in enumerate(zip(self._shapes.values(), self._own, strict=True)):
            dtype = _number_dtype(shape[0])
            every = [np.frombuffer(sent[k][1], dtype) for sent in by_rank]
            union = np.unique(np.concatenate(every)).astype(np.int64)
            self._unions.append(union)
            self.rooms[k] = _room_for(len(union), max(sent[k][0] for sent in by_rank))
            place = np.searchsorted(union, own)
            places.append(place if is_among else np.minimum(place, self.rooms[k] - 1))
        rooms = np.array(self.rooms, np.int64)
        self._moved(called, [len(own) for own in self._own], [*places, rooms])

    def _moved(
        self, called: CalledTensors, sizes: Sequence[int], values: Sequence[Any] | None
    ) -> list[NDArray[np.int64]]:
        """Return the tensors of the first call; or write ``values`` to its results."""
        shapes = [(size,) for size in (*sizes, len(sizes))]
        layout = Layout([*map(str, range(len(shapes)))], shapes, [np.dtype(np.int64)] * len(shapes))
        buffer = layout.new_buffer()
        views = layout.packed_views(buffer)
        if values is None:
            called.gather_into(layout.core, buffer)
            return views[:-1]
        for view, value in zip(views, values, strict=True):
            view[:] = value
        called.scatter(layout.core, buffer)
        return []

    def exchange_of(self, dtypes: Sequence[Any]) -> SparseExchange:
        """Return the form in which the tensors of the second call are averaged."""
        rooms = tuple(self.rooms)
        key = rooms, tuple(dtypes)
        exchange = self._exchanges.get(key)
        if exchange is None:
            exchange = self._exchanges[key] = self._new_exchange(rooms, dtypes)
        exchange.weight = float(self._is_among)
        exchange.unions = []
        for union, room in zip(self._unions, rooms, strict=True):
            numbers = np.full(room, -1.0)
            numbers[: len(union)] = union
            exchange.unions.append(numbers)
        return exchange

    def _new_exchange(self, rooms: Sequence[int], dtypes: Sequence[Any]) -> SparseExchange:
        names = [*self.names]
        sizes = [int(np.prod(one.shape)) for one in self.variables]
        for (i, shape), room in zip(self._shapes.items(), rooms, strict=True):
            names[i] = f"rows of {self.names[i]}"
            sizes[i] = room * int(np.prod(shape[1:]))
        names += [f"numbers of rows of {self.names[i]}" for i in self._shapes]
        shapes = [(size,) for size in (*sizes, *rooms)]
        return SparseExchange(names, shapes, [*dtypes, *[np.float64] * len(rooms)], self.variables)


def _room_for(count: int, room: int) -> int:
    """Return the number of rows to make room for, if ``count`` are needed, and there was ``room``.

    It has three bits that are not zero, so that few layouts occur.
    """
    if max(count, _LEAST) <= room <= 2 * max(count, _LEAST):
        return room
    step = 1 << max(0, count.bit_length() - 3)
    return max(_LEAST, -(-count // step) * step)


def _number_dtype(rows: int) -> np.dtype[Any]:
    """Return the dtype in which numbers of ``rows`` rows travel."""
    return np.dtype(np.int32 if rows <= np.iinfo(np.int32).max else np.int64)
