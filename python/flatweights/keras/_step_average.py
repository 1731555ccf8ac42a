"""The average of the gradients of one step, and of tensors of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from flatweights._core import CalledTensors
from flatweights.keras._exchange import Exchange
from flatweights.keras._exchanges import Exchanges, own_slots
from flatweights.keras._hooks import running_fit
from flatweights.keras._member_handle import MemberHandle, check_in_time, out_of_sync_is_error
from flatweights.keras._names import inner_variable
from flatweights.keras._progress import AnyState
from flatweights.keras._sparse import SparseExchange, Tables, takes_rows
from flatweights.keras._training import Training
from flatweights.ray import Member, OutOfSyncError, Round
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow._python_op import Compute, compute_in_python, device_of, unconverted


class StepAverage:
    """Averages the gradients of a step of one optimizer.

    Attributes:
        rule: The rule that replaces the mean of gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        handle: MemberHandle,
        options: dict[str, Any],
        exchanges: Exchanges,
        more: Sequence[Any],
        training: Training,
    ) -> None:
        """Average for ``optimizer``.

        Args:
            optimizer: The optimizer.
            handle: The member, and the time and the number of members that its calls wait for.
            options: Those of each average.
            exchanges: What the optimizer exchanges with other members.
            more: Parts of the state that heals members, besides variables and slots.
            training: The training in which its steps are made.
        """
        self.rule = options["rule"]
        self._optimizer = optimizer
        self._handle = handle
        self._options = options
        self._exchanges = exchanges
        self._more = more
        self._training = training
        self._computations: list[Compute] = []  # of the steps that were traced

    @unconverted
    def average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the averages of ``grads``; of a graph inside a `tf.function`.

        They are dense, except those of tables in an optimizer that takes rows.
        """
        if not grads:
            return []
        state = self._state_of_step(variables)
        with tf.control_dependencies(_in_order(state)):
            averages = self._averages(grads, variables)
        if state:
            with tf.control_dependencies([tf.group(*computed(averages))]):
                _in_order(state)
        return averages

    def _state_of_step(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that the average of a graph may set, since it heals members."""
        if self._handle.min_results is None or tf.executing_eagerly():
            return []
        fit, own = running_fit(), {id(slot) for slot in own_slots(self._optimizer)}
        slots = [slot for slot in self._optimizer.variables if id(slot) not in own]
        of_user = [one for one in self._more if isinstance(one, TensorFlowVariables)]
        more = [one for some in of_user for one in some.variables.values()]
        state = [*(variables if fit is None else fit.model.weights), *slots, *more]
        return [*{id(one): one for one in map(inner_variable, state)}.values()]

    def _averages(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        device = device_of([*map(inner_variable, variables)])
        tables = None
        if self.rule is None:
            tables = self._exchanges.tables_of(grads, variables, device)
        if tables is not None:
            gather = functools.partial(self._gather_rows, tables)
            dtypes = [tf.as_dtype(grad.dtype).as_numpy_dtype for grad in grads]
            average = functools.partial(
                self._exchange, functools.partial(tables.exchange_of, dtypes)
            )
            as_rows = takes_rows(self._optimizer)
            return tables.average(grads, gather, average, as_rows, self._computations)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        dtypes = [grad.dtype.as_numpy_dtype for grad in dense]
        make = functools.partial(self._exchanges.of_gradients, dtypes, variables)
        compute = functools.partial(self._exchange, make)
        averages: list[tf.Tensor] = compute_in_python(
            compute, dense, device, kept_in=self._computations
        )
        return averages

    def mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the mean of ``tensor`` over members; its gradient is the mean of the gradients.

        Args:
            tensor: A tensor whose shape is known.
            name: What it is. It tells this call from others, as variables tell gradients.
        """
        checked_graph(f"mean over members of the {name}")
        weak = weakref.ref(self)  # TensorFlow keeps for ever what is below

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def averaged(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(grad: tf.Tensor) -> tf.Tensor:
                return _there(weak).mean(grad, f"gradient of {name}")

            return _there(weak)._mean(own, name), back

        mean: tf.Tensor = averaged(tensor)
        return mean

    def _mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        exchange = self._exchanges.of_tensor(tensor, name)
        compute = functools.partial(self._exchange_mean, exchange)
        mean: tf.Tensor = compute_in_python(compute, [tensor], kept_in=self._computations)[0]
        mean.set_shape(tensor.shape)
        return mean

    def _exchange_mean(self, exchange: Exchange, tensors: CalledTensors) -> None:
        """Average a tensor of a step, whose gradients are averaged later.

        It sends no state: members are healed with the gradients, since their variables must not
        change before that. A member that is to be healed meets the others there.
        """
        is_whole = self._handle.min_results is None
        is_apart = self._training.progress is not None and self._training.progress.is_apart
        if not (self._training.is_started or is_apart) and self._optimizer.built:
            with self._training.errors_noted():
                self._training.start_in_step()
        if is_apart or (not is_whole and self._handle.take().lacks_state):
            exchange.pass_on(tensors)
            return
        with self._training.errors_noted(), exchange.of(tensors):
            result = self._handle.take().average_variables(
                exchange, nonfinite=self._options["nonfinite"], **self._handle.terms
            )
            if is_whole:
                check_in_time(result, exchange.layout.slots[0].name)

    def _gather_rows(self, tables: Tables, called: CalledTensors) -> None:
        """Gather the numbers of the rows of tables; their values are averaged later.

        It sends no state, as other calls of a step before its gradients. A member that lacks the
        state takes part nevertheless, to learn how many rows there are. In a `fit`, it goes on to
        where it is healed: the others may be at the end of an epoch.
        """
        progress, is_whole = self._training.progress, self._handle.min_results is None
        if progress is not None and (progress.is_apart or self._handle.take().lacks_state):
            tables.write(called, [tables.read(called)], is_among=True)
            return
        with self._training.errors_noted():
            self._training.start_in_step()
            member, terms = self._handle.take(), self._handle.terms
            if member.lacks_state:
                terms["timeout"] = None  # as in all calls in which it waits for the others
            result = member.all_gather(tables.read(called), tables.what, **terms)
            if is_whole:
                check_in_time(result, tables.what)
            told = [result.weights[rank] for rank in sorted(result.weights)]
            tables.write(called, told, is_among=member.rank not in result.late)

    def _exchange(self, make: Callable[[], Exchange], grads: CalledTensors) -> None:
        """Average ``grads``, by the names that are in use now: those of what ``make`` returns."""
        exchange = make()
        progress = self._training.progress
        if progress is not None and progress.is_apart:
            exchange.pass_on(grads)
            return
        with self._training.errors_noted(), exchange.of(grads):
            self._training.start_in_step()
            result: Round | None
            if progress is not None:
                result = progress.average(functools.partial(self._call, exchange), in_step=True)
            elif self._handle.min_results is not None:
                state = [self._exchanges.state_of(exchange.variables), *self._more]
                result = self._call_or_pass(exchange, state)
            else:
                result = self._call(exchange, self._handle.take(), None)
                check_in_time(result, "gradients")
            if result is not None:
                rank = self._handle.take().rank
                if rank in result.used and rank not in (*result.late, *result.healed):
                    exchange.check()
                return
        exchange.pass_on(grads)

    def _call_or_pass(self, exchange: Exchange, state: AnyState) -> Round | None:
        """Return the result of a call in a loop of the user's own; None, if it has none.

        That is so if the member lacks the state, and the others average another number of rows: it
        cannot learn that number here. Its next step can, which heals it.
        """
        member = self._handle.take()
        try:
            with out_of_sync_is_error(member, isinstance(exchange, SparseExchange)):
                return self._call(exchange, member, state)
        except OutOfSyncError:
            return None

    def _call(self, exchange: Exchange, member: Member, state: AnyState | None) -> Round:
        return member.average_variables(
            exchange,
            exchange.weight,
            state=state,
            **self._handle.terms,
            **self._options,
        )


def _in_order(variables: Sequence[Any]) -> list[tf.Operation]:
    """Return operations after those on ``variables`` so far; later ones come after them.

    TensorFlow orders the operations of a function by the variables that they use, and does not know
    that an average writes to these. These operations use them, and move no memory.
    """
    used = [tf.raw_ops.VarIsInitializedOp(resource=one.handle) for one in variables]
    return [tf.group(*used)] if used else []


def computed(averages: Sequence[Any]) -> list[tf.Tensor]:
    return [getattr(average, "values", average) for average in averages]


def _there(weak: weakref.ref[StepAverage]) -> StepAverage:
    found = weak()
    assert found is not None
    return found


def checked_graph(who: str, jit: str = "") -> Any:
    """Return the graph that is traced, in which members can meet; None without one.

    Args:
        who: Whose calls the members make, for errors.
        jit: Another remedy for a step that XLA compiles.

    Raises:
        RuntimeError: If members cannot meet in this graph.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    if not tf.inside_function():
        raise RuntimeError(f"{who}: expected eager TensorFlow, got a TF1 graph")
    if GraphOrParentsInXlaContext(graph):
        raise RuntimeError(
            f"{who}: XLA compiles this step, and cannot wait for other members. Use "
            f"model.compile(..., jit_compile=False){jit}"
        )
    return graph
