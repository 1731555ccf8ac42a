"""`AverageWeights`: members train by themselves, and average their weights now and then."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Literal

import keras
import numpy as np

from flatweights import FlatWeights
from flatweights._average import Nonfinite, check_nonfinite
from flatweights._choice import Choice, Which
from flatweights._numbers import check_count, real_number
from flatweights._sources import first_difference
from flatweights.keras._callback import MemberCallback
from flatweights.keras._hooks import call_after_begin, callbacks_beside, callbacks_of_fit
from flatweights.keras._member_handle import MemberHandle, calls_are_equal
from flatweights.keras._names import inner_variable, named_variables, state_names, with_slots
from flatweights.keras._progress import (
    SAVING,
    AnyState,
    HasCounts,
    Progress,
    check_before,
    keeps_best_weights,
)
from flatweights.keras._report import Report
from flatweights.keras._samples import TrainedSamples
from flatweights.keras._settings import check_alike
from flatweights.keras._start import take_from_lowest_rank
from flatweights.ray import Member, Round
from flatweights.robust import AnyRule, Rule
from flatweights.server import ServerOptimizer
from flatweights.tensorflow import TensorFlowVariables

Outer = ServerOptimizer[FlatWeights] | Callable[[FlatWeights], ServerOptimizer[FlatWeights]]

Unit = Literal["epoch", "batch"]
Weight = Literal["samples"] | float

_log = logging.getLogger("flatweights")


class AverageWeights(MemberCallback, HasCounts):
    """Averages the model's weights over a process group's members, every few epochs or batches.

    All members start from the weights of rank 0, or of the lowest rank that is there. Each then
    trains by itself. After ``every`` epochs or batches, and at the end of training, all continue
    from the average. An average after an epoch is taken before its validation, so the validation
    tests the weights that are saved. Put this callback before callbacks that save the model or keep
    its best weights.

    With ``outer``, the members do not continue from the average itself: an optimizer of
    `flatweights.server` takes a step with it. Each member steps its own copy of the optimizer, all
    with the same bits. With ``partial(FedAvgM, momentum=0.9, learning_rate=0.7, nesterov=True)``
    this is DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023), which averages after hundreds of batches. The optimizer updates the trainable
    variables; others, such as moving statistics, become the average.

    >>> import keras
    >>> import flatweights.ray
    >>> member = flatweights.ray.join("weights", rank=0, size=1)  # in Ray Train: AverageWeights()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> averaging = AverageWeights(every=2, unit="batch", member=member)
    >>> history = model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=[averaging])
    >>> averaging.round
    <Round ...: 1 of 1 ranks (0), ... s>
    >>> member.leave()

    Attributes:
        round: The last `flatweights.ray.Round`; None before the first.
        outer: The outer optimizer, from the start of training on; None without one. Its ``save``
            saves the state needed to resume.
    """

    counted = frozenset(("_steps", "_trained"))
    makes_progress = True
    round: Round | None
    outer: ServerOptimizer[FlatWeights] | None

    def __init__(
        self,
        every: int = 1,
        unit: Unit = "epoch",
        *,
        member: Member | None = None,
        weight: Weight = "samples",
        include_optimizer: bool = False,
        outer: Outer | None = None,
        timeout: float | None = None,
        min_results: int | None = None,
        nonfinite: Nonfinite = "raise",
        rule: AnyRule | None = None,
        exclude: Which | None = None,
        only: Which | None = None,
    ) -> None:
        """Average in a process group.

        Args:
            every: The number of epochs or batches between two averages. With the
                ``steps_per_execution`` of ``compile``, batches count by whole executions.
            unit: ``"epoch"`` or ``"batch"``.
            member: This process's member. If None, that of the worker of Ray Train, shared with
                the other callbacks and optimizers, which leaves at the end of the training.
            weight: This member's weight in the average: the ``"samples"`` that it was trained
                with since the last one, or a number. Samples of a callback's ``evaluate`` do not
                count.
            include_optimizer: Whether the optimizer's slots are averaged, too. Needed for
                `keras.optimizers.ScheduleFreeAdamW`, whose slots are weights.
            outer: An optimizer of `flatweights.server` for the trainable variables, as
                ``TensorFlowVariables(model, trainable_only=True)`` names them, such as one that was
                loaded: the members start from its weights, which are rank 0's. Or a function that
                makes such an optimizer from the first weights, with the same settings in all
                members.
            timeout: Seconds that other members may be late; for ever, if None. If one callback or
                optimizer of a training gets a value, it applies to all of them. Among members,
                the shortest counts.
            min_results: The number of members that an average needs; all, if None. A member that
                was late, or a process in place of one that has died, gets the state of the others
                and goes on where they are: what is averaged, with the optimizer's slots, and their
                epoch. The model is built before ``fit``. It applies to all callbacks and
                optimizers, too.
            nonfinite: What to do about NaN and infinity; see `flatweights.average`.
            rule: A rule that replaces the mean, such as ``flatweights.robust.Median()``; see
                `flatweights.ray.Member.average`. If it has no weights, all members count equally.
            exclude: Variables that stay each member's own, from the first weights on; with
                ``include_optimizer``, with their slots. As of
                `flatweights.tensorflow.TensorFlowVariables`, for the model's variables and
                ``[model, model.optimizer]``; the same in all members.
            only: The variables to average, instead of those to leave out.

        Raises:
            TypeError: If ``member`` is not a `Member`, ``every`` is not an integer, ``outer`` is
                neither a function nor an optimizer of `flatweights.server`, ``rule`` is not a rule,
                or it has no weights and ``weight`` is a number other than 1; or ``exclude`` or
                ``only`` is neither texts nor a function.
            ValueError: If ``every`` is below 1, ``unit`` or ``weight`` is something else, or
                ``min_results`` is given with ``outer``, whose copies must all get every average;
                or ``exclude`` and ``only`` are both given.
        """
        if unit not in ("epoch", "batch"):
            raise ValueError(f"unit: expected 'epoch' or 'batch', got {unit!r}")
        every = check_count(every, "every")
        is_samples = isinstance(weight, str) and weight == "samples"
        if not (is_samples or _is_positive(weight)):
            raise ValueError(f"weight: expected 'samples' or a positive number, got {weight!r}")
        check_nonfinite(nonfinite)
        if rule is not None and not Rule.of(rule).takes_weights:
            if not is_samples and weight != 1:
                name = Rule.of(rule).name
                raise TypeError(f"weight: {name} has no weights, all members count alike")
            weight = 1.0
        if not (outer is None or callable(outer) or isinstance(outer, ServerOptimizer)):
            raise TypeError(
                "outer: expected a function of the first weights, such as functools.partial("
                "FedAvgM, ...), or an optimizer of flatweights.server, got "
                f"{type(outer).__module__}.{type(outer).__name__}"
            )
        if outer is not None and min_results is not None:
            raise ValueError("min_results: expected None with outer, whose step needs all members")
        self._choice: dict[str, Any] = Choice(exclude, only).arguments
        needs_all = "" if outer is None else "AverageWeights(outer=...)"
        super().__init__(
            MemberHandle("AverageWeights", member, timeout, min_results, needs_all=needs_all)
        )
        self._every = every
        self._unit = unit
        self._weight = weight
        self._includes_optimizer = include_optimizer
        self._given_outer = outer
        self._stepped: Any = None  # the model that `outer` has stepped
        self._options: dict[str, Any] = {"nonfinite": nonfinite, "rule": rule}
        self.round = None
        self.outer = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Make all members start from the weights of one member.

        Raises:
            ValueError: If a callback before this one saves the model, keeps its best weights, or
                swaps them: it would keep this member's own weights. Or if there is a
                `BackupAndRestore`, and an outer optimizer, which it would not restore. Or if there
                is ``min_results``, and the model is not built. Or if slots of the optimizer are
                weights, and not averaged.
            TimeoutError: If all members are needed, and this one has missed calls of the others.
        """
        callbacks = callbacks_beside(self)
        check_before(self, callbacks, _keeps, "keep the weights of its own member")
        restores = any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks)
        if restores and self._given_outer is not None:
            raise ValueError(
                "AverageWeights(outer=...): expected no BackupAndRestore in the list of callbacks, "
                "got one: it does not save the outer optimizer, which would undo what it restores. "
                "Save AverageWeights.outer, and the weights and slots of each member, instead"
            )
        self._samples = TrainedSamples(self.model) if self._weight == "samples" else None
        self._counted = 0.0  # samples that are in `_since`, or were in it
        self._begun = 0.0  # samples before this epoch
        self._since = 0.0  # samples since the last average
        self._steps = 0  # epochs or batches since the last average
        self._trained = False  # whether there were batches since then
        self._last_weight = 0.0  # in the last average, if samples are counted
        self._batch = -1  # the number of the last batch
        super().on_train_begin()
        averages_slots = bool(self._includes_optimizer or self._averagings)
        if not averages_slots:
            _check_slots(self.model.optimizer)
        # Other callbacks, perhaps of some members only, swap in moving averages at an epoch's end.
        are_own = _ends_with_own_averages(self.model.optimizer) and not averages_slots
        keepers = [*filter(keeps_best_weights, callbacks)]
        ends_epochs = self._every == 1 and self._unit == "epoch"
        self._best_weight_callbacks = [] if ends_epochs and not are_own else keepers
        self._is_complete = False
        self._found = -1  # variables of the model when it was started; -1 before
        if self.model.built:
            self._start()
        elif self._handle.min_results is not None:
            raise ValueError("min_results: expected a model that is built before fit")
        if self._heals:
            call_after_begin(self, self._make_progress)

    def _make_progress(self) -> None:
        """Bring members that were late to the place of the others, as `average_gradients` does.

        They get what any `AverageWeights` of this `fit` averages, and the slots of that.
        """
        if self._progress is not None:  # another one has made it
            return
        of_this_fit = self._of_this_fit()
        healed: dict[str, Any] = {}
        for one in of_this_fit:
            if isinstance(one, AverageWeights):
                healed |= one._healed
        state = TensorFlowVariables(dict(sorted(healed.items())))
        ids = {id(inner_variable(one)) for one in healed.values()}
        weights = map(inner_variable, self.model.weights)
        own = {k for k, one in enumerate(weights) if id(one) not in ids}
        callbacks = callbacks_of_fit(self)
        progress = Progress(self._handle, self, callbacks, state, own=own)
        for one in of_this_fit:
            one._progress = progress
        if progress.has_joined:
            progress.join()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the epoch's samples."""
        super().on_epoch_begin(epoch)
        self._begun = self._counted = self._read()
        self._batch = -1
        self._is_epoch_over = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Average, if it is due."""
        super().on_train_batch_end(batch)
        if self._is_apart:
            return
        self._trained = True
        if not self._is_complete:  # the first batch may have built the model, or layers in it
            self._is_complete = True
            if self._count_variables() != self._found:
                if self._progress is not None and not self._averagings:
                    raise ValueError(
                        "min_results: expected a model and an optimizer that are built before fit, "
                        "but the first batch has made variables: a member that comes back would "
                        "not get them"
                    )
                self._start()
        if self._unit == "batch":
            self._steps += batch - self._batch  # several, with steps_per_execution
            self._batch = batch
            if self._steps >= self._every:
                self._average("batch")
                if self._progress is not None:  # it may have been healed
                    self._progress.end_batch(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Average before the validation, if it is due."""
        if self._is_in_fit:
            self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, if it is due and there was no validation."""
        super().on_epoch_end(epoch)
        self._end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        """Average once more, if a member has trained since; leave, if no member was given."""
        self._meet_at_end()
        if self._progress is not None and self._progress.has_ended_alone:
            super().on_train_end()  # the others may be in an epoch
            return
        self._count()
        # Keras has then just set the weights to this member's own moving averages, whose mean is no
        # step of an outer optimizer.
        ends = _ends_with_own_averages(self.model.optimizer)
        if ends and self._found >= 0 and not self._trained:
            self._trained, self._since = True, self._last_weight
        trained, handle = self._trained, self._handle
        # Members that have been late are not at the same call as the others.
        if not handle.may_be_late:
            trained = any(handle.gather(trained, "the end of training", at="end").weights.values())
        if trained:
            self._progress = None  # all members that are still there have the state
            self._average("epoch", steps=not ends)
        for keeper in self._best_weight_callbacks:
            self._average_best(keeper)
        super().on_train_end()

    def forget_own(self) -> None:
        """Do not count the samples of a training that was given up for that of another member."""
        self._since, self._counted = 0.0, self._read()

    def _average_best(self, keeper: Any) -> None:
        """Average the best weights that ``keeper`` is about to set: no average ended that epoch."""
        handle, best = self._handle, keeper.best_weights
        weight = self._weight
        if weight == "samples":
            weight = self._read() - self._begun or 1.0
        has_best = handle.gather(best is not None, "best weights", at="end").weights.values()
        if best is not None and all(has_best):
            chosen = [*compress(best, self._averaged)]
            with calls_are_equal(self._member, "end"):
                result = self._member.average(chosen, weight, **handle.terms, **self._options)
            averages = iter(result.weights)
            pairs = zip(best, self._averaged, strict=True)
            keeper.best_weights = [next(averages) if averaged else own for own, averaged in pairs]
        elif any(has_best):
            _log.warning(
                "AverageWeights: some members have no best weights, so the others set their own"
            )

    def _end_epoch(self) -> None:
        if self._is_epoch_over or self._is_apart:
            return
        self._is_epoch_over = True
        self._count()
        if self._unit == "epoch":
            self._steps += 1
            if self._steps >= self._every:
                self._average("epoch")

    def _read(self) -> float:
        """Return the number of samples so far, if they are the weights of averages."""
        return 0.0 if self._samples is None else self._samples.read()

    def _count(self) -> None:
        read = self._read()
        self._since += read - self._counted
        self._counted = read

    def _start(self) -> None:
        """Find the variables; give all members those of one member."""
        model = self.model
        has_joined = self._progress is not None and self._progress.has_joined
        needs_all = self._handle.min_results is None
        if self._includes_slots and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        outer, self._learned = self._given_outer, None
        if isinstance(outer, ServerOptimizer) and self._stepped is model:
            outer = self.outer  # it has stepped since: the given one has the weights of the start
        # Seeds stay each member's own, or all would drop the same units.
        named = named_variables(model.weights, model)
        self._found = self._count_variables()
        plain: dict[str, Any] = {}
        if self._includes_optimizer:
            plain |= with_slots(named, model.optimizer, **self._choice).variables
        elif named:
            plain |= TensorFlowVariables(named, **self._choice).variables
        self._healed = plain
        if self._heals and model.optimizer is not None:
            # Of the optimizer, slots stay with their variable; counts belong to all.
            left_out = named.keys() - plain.keys()
            choice: dict[str, Any] = {}
            if left_out:
                choice["exclude"] = lambda slot: slot.name in left_out
            self._healed = plain | with_slots(named, model.optimizer, **choice).variables
        self._averaged = [name in plain for name in named]
        if outer is not None:
            trained = {id(inner_variable(one)) for one in model.trainable_variables}
            learned = {n: one for n, one in plain.items() if id(inner_variable(one)) in trained}
            if not learned:
                raise ValueError(
                    "AverageWeights(outer=...): expected trainable variables to average, got "
                    f"{list(plain)}"
                )
            self._learned = TensorFlowVariables(learned)
            plain = {name: one for name, one in plain.items() if name not in learned}
        self._plain = TensorFlowVariables(plain) if plain else None
        if self._learned is not None and isinstance(outer, ServerOptimizer):
            _check_outer(outer, self._learned)
        if not has_joined and (needs_all or not self._member.lacks_state):
            self._broadcast(outer)
        if self.outer is not None:
            numbers = {n: f"{one:g}" for n, one in self.outer.state.items() if "/" not in n}
            settings = {"outer": type(self.outer).__name__, **numbers}
            expected = "outer: expected an optimizer with the same settings in all members"
            check_alike(expected, self._handle.gather(settings, "outer", at="start").weights)
            self._stepped = model

    @property
    def _heals(self) -> bool:
        """Whether members that were late get what this one averages, and the slots of that."""
        return self._handle.min_results is not None and not self._averagings

    @property
    def _includes_slots(self) -> bool:
        """Whether the optimizer's slots are averaged, or heal members that were late."""
        heals = self._heals and self.model.optimizer is not None
        return self._includes_optimizer or heals

    def _count_variables(self) -> int:
        slots = state_names(self.model.optimizer) if self._includes_slots else ()
        return len(self.model.weights) + len(slots)

    def _broadcast(self, outer: Outer | None) -> None:
        """Give all the variables, and the outer optimizer, of the lowest rank that takes part."""
        take_from_lowest_rank(
            self._handle,
            "the first weights",
            lambda: self._handle.gather(None, "the first weights", at="start"),
            lambda given: functools.partial(self._take_from, min(given.used), outer),
        )

    def _take_from(self, root: int, outer: Outer | None) -> None:
        """Give all the variables, and the outer optimizer, of ``root``."""
        member, timeout = self._member, self._handle.timeout
        if self._plain is not None:
            member.broadcast_variables(self._plain, root, timeout=timeout)
        if self._learned is None or outer is None:
            return
        if isinstance(outer, ServerOptimizer):
            state = member.broadcast(outer.state, root, timeout=timeout)
            self.outer = type(outer).from_state(state)
            self._learned.set_weights(self.outer.weights)
        else:
            member.broadcast_variables(self._learned, root, timeout=timeout)
            self.outer = outer(self._learned.get_weights())
            _check_outer(self.outer, self._learned)

    def _average(self, at: Literal["batch", "epoch"], *, steps: bool = True) -> None:
        self._count()
        weight = self._weight
        if weight == "samples":
            weight = self._since or float(self._trained)
        with calls_are_equal(self._member, "weights"):
            if self._learned is not None and self.outer is not None:
                weights = self._learned.get_weights()
                self.round = self._member.average(
                    weights, weight, timeout=self._handle.timeout, **self._options
                )
                mean = self.round.weights
                self._learned.set_weights(self.outer.step(mean) if steps else mean)
            if self._plain is not None:
                plain = functools.partial(self._average_plain, self._plain, weight)
                result = self._average_at(plain, at=at)
                self.round = self.round if result is None else result
        self._last_weight = self._since
        self._since, self._steps, self._trained = 0.0, 0, False

    def _average_plain(
        self, plain: TensorFlowVariables, weight: float, member: Member, state: AnyState | None
    ) -> Round:
        return member.average_variables(
            plain,
            weight,
            state=state,
            **self._handle.terms,
            **self._options,
        )


def _is_positive(weight: Any) -> bool:
    try:
        return 0 < real_number(weight, "weight") < np.inf
    except TypeError:
        return False


def _check_outer(outer: Any, learned: TensorFlowVariables) -> None:
    """Raise unless ``outer`` is an optimizer of the ``learned`` variables."""
    if not isinstance(outer, ServerOptimizer):
        raise TypeError(
            "outer: expected a function that returns an optimizer of flatweights.server, got one "
            f"that returned {type(outer).__name__}"
        )
    weights = outer.weights
    difference: str | None = f"expected FlatWeights, got {type(weights).__name__}"
    if isinstance(weights, FlatWeights):
        difference = first_difference(learned.layout, weights.layout)
    if difference is not None:
        raise ValueError(
            "outer: expected an optimizer of the model's trainable variables, such as FedAvgM("
            "TensorFlowVariables(model, trainable_only=True).get_weights()), got one of other "
            f"weights: {difference}"
        )


def _check_slots(optimizer: Any) -> None:
    """Raise if slots of ``optimizer`` are weights, too: from them, each member would go on."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", ())  # in newer versions of Keras
    if any(isinstance(one, kind) for one in _parts_of(optimizer)):
        raise ValueError(
            "AverageWeights: expected include_optimizer=True with ScheduleFreeAdamW, got False: "
            "its slots are weights, too, from which each member would go on"
        )


def _parts_of(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers in ``optimizer``, which may scale the loss or consist of several."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts: Sequence[Any] = getattr(inner, "optimizers", [inner])
    return parts


def _ends_with_own_averages(optimizer: Any) -> bool:
    """Whether Keras sets the weights to moving averages of ``optimizer`` at the end of `fit`."""
    return any(getattr(one, "use_ema", False) for one in _parts_of(optimizer))


def _keeps(callback: Any) -> bool:
    """Whether ``callback`` keeps weights: in a file, to set them at the end, or to swap them."""
    kinds = *SAVING, keras.callbacks.BackupAndRestore, Report
    swaps = isinstance(callback, keras.callbacks.SwapEMAWeights)
    return swaps or isinstance(callback, kinds) or keeps_best_weights(callback)
