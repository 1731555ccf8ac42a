"""Moves all variables of a model: bound ones by the core, others by TensorFlow's operations.

Mirrored variables are read from their first replica. A set writes the first, then the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import _core
from flatweights._core import move_parts
from flatweights._dtypes import is_averaged
from flatweights._inplace import axpy_, lerp_
from flatweights._layout import Layout, cast_for_slot, layout_at
from flatweights._locks import TurnLock, nested
from flatweights.tensorflow._binding import Binding, bind, unbound
from flatweights.tensorflow._buckets import Operations, make_buckets
from flatweights.tensorflow._eager import EagerOperations
from flatweights.tensorflow.library._load import Library

_Bound = _core.BoundVariables

# A variable may be destroyed and recreated while it is being bound, but not forever.
_MOST_ATTEMPTS = 3

_replicas_lock = TurnLock()
"""Held while other replicas are set, so that the last call sets all to the first one's value."""


class Update(NamedTuple):
    """An operation that changes weights in place, by other weights and a number.

    Attributes:
        bound: Changes bound variables by a vector of their dtype, or by a packed buffer if the
            first flag is set.
        in_place: Changes one vector by another.
    """

    bound: Callable[[_core.BoundVariables, NDArray[Any], bool, float], None]
    in_place: Callable[[NDArray[Any], NDArray[Any], float], None]


ADD = Update(_Bound.add, lambda y, x, a: axpy_(y, a, x))
LERP = Update(_Bound.lerp, lerp_)


class Mover:
    """Moves the variables of one model.

    A move between all variables and one buffer is first tried directly in the core. If that
    fails, the general path checks, binds again, converts, and uses operations.

    For eager variables that are all bound, `try_get`, `try_set` and those of packed buffers are
    functions of the core, without a Python frame.
    """

    def __init__(
        self,
        operations: Operations,
        layout: Layout,
        library: Library | None,
        replicas: Mapping[str, Sequence[tf.Variable]] | None = None,
    ) -> None:
        """Take the ``operations`` on the variables at the slots of ``layout``.

        Args:
            operations: They move variables that are not bound.
            layout: The slots of the variables.
            library: It binds variables.
            replicas: By name, the other replicas of mirrored variables, which are set after the
                first.
        """
        self._operations = operations
        self._layout = layout
        self._library = library
        self._replicas = _movers_of(replicas or {}, layout, library)
        self._follows = 0
        self._reads, self._writes = TurnLock(), TurnLock()  # held while operations run
        # The core checks eager variables at each call; sessions are checked here.
        self._is_eager = operations.context is not None
        self._averaged = [i for i, slot in enumerate(layout.slots) if is_averaged(slot.dtype)]
        self._averaged_dtypes = {layout.slots[i].dtype for i in self._averaged}
        self.unbind()

    @property
    def reasons(self) -> dict[str, str]:
        """By name, why operations move a variable."""
        others = self._binding.others.items()
        return {name: reason for bucket, reason in others for name in bucket.layout.names}

    def shared(self) -> list[bool]:
        """Return, per slot, whether its variable aliases memory that was shared with it."""
        shared = [False] * len(self._layout.slots)
        binding = self._binding
        if binding.bound is not None and (self._is_eager or self._is_here(binding)):
            for i, aliases in zip(binding.positions, binding.bound.get_shared(), strict=True):
                shared[i] = aliases
        return shared

    def bind(self) -> None:
        """Bind the variables that can be bound now."""
        if self._library is not None:
            self._take(bind(self._operations, self._layout, self._library))

    def unbind(self) -> None:
        """Let go of the variables, and of the session that they were bound in."""
        self._take(
            unbound(self._operations.buckets, "it has not been used yet", may_improve=True)
            if self._library is not None
            else unbound(self._operations.buckets, "the op library is not in use")
        )

    def _take(self, binding: Binding) -> None:
        self._binding = binding
        whole = binding.bound if self._is_eager and not binding.others else None
        own = vars(self)  # these attributes hide the methods
        for name in ("try_get", "try_get_packed", "try_set", "try_set_packed"):
            own.pop(name, None)
            if whole is not None and not (name.startswith("try_set") and self._replicas):
                own[name] = getattr(whole, name)

    def try_get(self, out: Any) -> NDArray[Any] | None:
        """Read all variables into ``out``, or a new vector if it is None.

        Returns:
            The vector; None, with nothing done, if that takes more than moving bytes.
        """
        bound = self._whole()
        return None if bound is None else bound.try_get(out)

    def try_set(self, flat: Any) -> bool:
        """Write all variables from ``flat``; False if that takes more than moving bytes."""
        self._check_replicas()
        bound = self._whole()
        is_set = bound is not None and bound.try_set(flat)
        if is_set:
            self._follow()
        return is_set

    def try_get_packed(self, buffer: Any) -> bool:
        """Read all variables into a packed buffer; False if that takes more than moving bytes."""
        return False

    def try_set_packed(self, buffer: Any) -> bool:
        """Write all variables from a packed buffer; False if that takes more than moving bytes."""
        return False

    def get_vector(self, out: NDArray[Any]) -> None:
        """Read all variables into the vector ``out``, cast to its dtype."""
        if not self._try_bound(_Bound.get_vector, out):
            self._gather(self._layout.vector_views(out))

    def get_packed(self, buffer: NDArray[np.uint8]) -> None:
        """Read all variables into the packed ``buffer``."""
        is_array = isinstance(buffer, np.ndarray)  # `packed_views` refuses anything else by name
        if not (is_array and self._try_bound(_Bound.get_packed, buffer)):
            self._gather(self._layout.packed_views(buffer))

    def set_vector(self, flat: NDArray[Any], *, share: bool = False) -> None:
        """Write all variables from the contiguous vector ``flat``, cast as by `cast_for_slot`."""
        self._check_replicas()
        if not self._try_bound(_Bound.set_vector, flat, share):
            views = enumerate(self._layout.vector_views(flat))
            self._scatter(
                {i: cast_for_slot(self._layout, i, view) for i, view in views}, share=share
            )
        self._follow()

    def set_packed(self, buffer: NDArray[np.uint8], *, share: bool = False) -> None:
        """Write all variables from the packed ``buffer``."""
        self._check_replicas()
        is_array = isinstance(buffer, np.ndarray)
        if not (is_array and self._try_bound(_Bound.set_packed, buffer, share)):
            self._scatter(dict(enumerate(self._layout.packed_views(buffer))), share=share)
        self._follow()

    @property
    def gpu(self) -> bytes | None:
        """The UUID of the GPU by whose memory all variables can be moved; None without one."""
        bound = None if self._replicas else self._whole()
        try:
            return None if bound is None else bound.gpu
        except _core.UnreadyError:
            return None

    def get_segment(self, segment: _core.DeviceSegment) -> None:
        """Read all variables into a segment of their `gpu`, in the packed form."""
        self._bound_whole().get_segment(segment)

    def set_segment(
        self, segment: _core.DeviceSegment | _core.PeerDeviceSegment, positions: Sequence[int]
    ) -> None:
        """Write the variables at these positions from a segment of their `gpu`."""
        self._bound_whole().set_segment(segment, positions)

    def _bound_whole(self) -> _core.BoundVariables:
        bound = self._whole()
        if bound is None:
            raise _core.UnreadyError("the variables have to be bound again")
        return bound

    def set_parts(self, values: Mapping[int, NDArray[Any]], *, share: bool = False) -> None:
        """Write the variables at these positions, from arrays that `cast_for_slot` returned."""
        self._scatter(values, share=share)
        self._follow()

    def update(self, update: Update, flat: NDArray[Any], a: float) -> None:
        """Change all variables of a floating dtype by the contiguous vector ``flat``."""
        self._check_replicas()
        if not (
            self._averaged_dtypes <= {flat.dtype} and self._try_bound(update.bound, flat, False, a)
        ):
            self._update(update, flat, a)
        self._follow()

    def _update(self, update: Update, flat: NDArray[Any], a: float) -> None:
        packed = self._layout.new_buffer()
        parts = self._layout.packed_views(packed)
        views = self._layout.vector_views(flat)
        values = [cast_for_slot(self._layout, i, views[i]) for i in self._averaged]
        move_parts([parts[i] for i in self._averaged], values)

        def move(binding: Binding) -> None:
            buckets = [bucket for bucket in binding.others if is_averaged(bucket.layout.dtype)]
            values = self._operations.read(buckets) if buckets else {}
            for bucket in buckets:
                y = bucket.copy_packed([values[i] for i in bucket.slots])
                x = bucket.copy_packed([parts[i] for i in bucket.slots])
                update.in_place(y, x, a)
                changed = bucket.layout.packed_views(y.view(np.uint8))
                values.update(zip(bucket.slots, changed, strict=True))
            if binding.bound is not None:
                update.bound(binding.bound, packed, True, a)
            if values:
                self._operations.write(values)

        self._with_binding(move, writes=True)

    def _try_bound(self, move: Callable[..., None], *args: Any) -> bool:
        """Call ``move`` with all variables; return False, without a call, unless all are bound."""
        bound = self._whole()
        if bound is None:
            return False
        try:
            move(bound, *args)
        except _core.UnreadyError:
            return False
        return True

    def _whole(self) -> _core.BoundVariables | None:
        """Return the bound variables if all are bound and the binding is valid; else None."""
        binding = self._binding
        if binding.others or not (self._is_eager or self._is_here(binding)):
            return None
        return binding.bound

    def _is_here(self, binding: Binding) -> bool:
        return binding.session is not None and self._operations.raw_session() is binding.session

    def _with_binding(self, move: Callable[[Binding], None], *, writes: bool) -> None:
        """Call ``move`` with a binding that is valid here and now."""
        self._check_interrupted(writes=writes)
        lock = self._writes if writes else self._reads
        for _ in range(_MOST_ATTEMPTS):
            self._operations.check()
            binding = self._binding
            if binding.may_improve or binding.session is not self._operations.raw_session():
                self.bind()
                binding = self._binding
            try:
                self._alone(move, binding, lock)
                return
            except _core.UnreadyError:
                self._take(binding._replace(may_improve=True))
        # Operations give uninitialized variables their first values, and name them in errors.
        reason = "it, or one beside it, is not initialized"
        self._take(unbound(self._operations.buckets, reason, may_improve=True))
        self._alone(move, self._binding, lock)

    def _alone(self, move: Callable[[Binding], None], binding: Binding, lock: TurnLock) -> None:
        """Call ``move``, under ``lock`` and that of all variables if it runs operations."""
        if not binding.others:
            move(binding)
            return
        with self._operations.lock.ready(), lock.ready():
            move(binding)

    def _check_replicas(self) -> None:
        """Raise before the first replica is set, if others could not be set then."""
        if self._replicas:
            self._check_interrupted(writes=True)

    def _check_interrupted(self, *, writes: bool) -> None:
        """Raise if this thread writes the variables already, or reads what is to be written.

        A signal handler runs in the thread that it interrupts, which no lock stops.
        """
        for mover in (self, *(mover for _, mover in self._replicas)):
            if mover._writes.is_mine() or (writes and mover._reads.is_mine()):
                raise nested("these variables")

    def _gather(self, targets: Sequence[NDArray[Any]]) -> None:
        """Read every variable into its target, one array per slot, cast to its dtype."""

        def move(binding: Binding) -> None:
            if binding.bound is not None:
                binding.bound.get_parts([targets[i] for i in binding.positions])
            if binding.others:
                values = self._operations.read(list(binding.others))
                move_parts([targets[i] for i in values], list(values.values()))

        self._with_binding(move, writes=False)

    def _scatter(self, values: Mapping[int, NDArray[Any]], *, share: bool) -> None:
        """Write the variables at these positions, each from its array."""

        def move(binding: Binding) -> None:
            positions = [i for i in binding.positions if i in values]
            if binding.bound is not None and positions:
                binding.bound.set_parts(positions, [values[i] for i in positions], share)
            others = {
                i: values[i] for bucket in binding.others for i in bucket.slots if i in values
            }
            if others:
                self._operations.write(others)

        self._with_binding(move, writes=True)

    def _follow(self) -> None:
        """Give all replicas the values of the first."""
        if not self._replicas:
            return
        with _replicas_lock.ready():
            self._follows += 1
            follows = None
            while follows != self._follows:  # again, if a signal handler set other values meanwhile
                follows = self._follows
                packed = self._layout.new_buffer()
                self.get_packed(packed)
                parts = self._layout.packed_views(packed)
                for positions, mover in self._replicas:
                    mover.set_parts({j: parts[i] for j, i in enumerate(positions)})


def _movers_of(
    replicas: Mapping[str, Sequence[tf.Variable]], layout: Layout, library: Library | None
) -> list[tuple[list[int], Mover]]:
    """Return one mover for each set of further replicas, and the slots of their variables."""
    movers = []
    # Variables of different strategies may differ in their number of replicas.
    for k in range(max(map(len, replicas.values()), default=0)):
        names = [name for name, others in replicas.items() if len(others) > k]
        positions = [layout.index(name) for name in names]
        own = layout_at(layout, positions)
        operations = EagerOperations(make_buckets([replicas[n][k] for n in names], own), library)
        movers.append((positions, Mover(operations, own, library)))
    return movers
