"""The member that callbacks and optimizers of a process share."""

import numpy as np
import pytest
from process_groups import LocalProcessGroup

from flatweights.keras import _member_handle
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


@pytest.mark.parametrize(("timeout", "waits"), [(None, None), (0.0, 60.0), (90.0, 90.0)])
def test_calls_that_take_long_have_time_for_it(timeout: float | None, waits: float | None) -> None:
    assert MemberHandle("report", None, timeout).timeout_of(60.0) == waits
