"""The member that callbacks and optimizers of a process share."""

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
from interrupts import handlers_end
from process_groups import LocalProcessGroup

from flatweights.keras import AverageLogs, _member_handle, average_gradients
from flatweights.keras._member_handle import MemberHandle


def test_a_shared_member_leaves_with_the_last_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    (member,) = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(_member_handle, "join", lambda: member)
    first, second = MemberHandle("first", None), MemberHandle("second", None)
    assert first.take() is member
    assert second.take() is member
    first.end()
    assert member.average(np.ones(2)).used == (0,)
    second.end()
    with pytest.raises(RuntimeError, match="left"):
        member.average(np.ones(2))


def test_a_shared_member_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    members = iter(LocalProcessGroup(2).join_all())
    monkeypatch.setattr(_member_handle, "join", lambda: next(members))
    handle = MemberHandle("first", None)
    first = handle.take()
    assert handle.take() is first
    first.leave()  # as it would have ended by an error in a call, after which `fit` raises
    second = handle.take()
    assert second is not first
    assert second.average(np.ones(2)).used == (1,)
    handle.end()
    with pytest.raises(RuntimeError, match="left"):
        second.average(np.ones(2))


def test_a_signal_handler_does_not_wait_for_the_call_that_it_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (member,) = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(_member_handle, "join", lambda: member)
    first, second = MemberHandle("first", None), MemberHandle("second", None)

    def take_again() -> None:
        with contextlib.suppress(RuntimeError):
            second.take()

    assert handlers_end(first.take, take_again)
    assert first.take() is member
    first.end()
    second.end()


def fit(function: Callable[[], object]) -> None:
    """Fit a new model, and call ``function`` at the end of its epoch."""
    optimizer = average_gradients(keras.optimizers.SGD())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", run_eagerly=True)
    at_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: function())
    callbacks = [AverageLogs(), at_end]
    model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=callbacks)


def test_a_shared_member_leaves_whatever_is_left_of_a_fit_that_has_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (member,) = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(_member_handle, "join", lambda: member)
    with pytest.raises(ZeroDivisionError) as caught:  # its frames have the callbacks
        fit(lambda: 1 / 0)
    was_over = member.is_over
    fit(lambda: None)
    assert (was_over, member.is_over) == (False, True)
    assert caught.tb is not None


def test_a_fit_within_another_leaves_it_the_shared_member(monkeypatch: pytest.MonkeyPatch) -> None:
    (member,) = LocalProcessGroup(1).join_all()
    monkeypatch.setattr(_member_handle, "join", lambda: member)

    def begin_another() -> None:
        fit(lambda: None)
        assert not member.is_over

    fit(begin_another)
    assert member.is_over


@pytest.mark.parametrize(("timeout", "waits"), [(None, None), (0.0, 60.0), (90.0, 90.0)])
def test_calls_that_take_long_have_time_for_it(timeout: float | None, waits: float | None) -> None:
    assert MemberHandle("report", None, timeout).timeout_of(60.0) == waits
