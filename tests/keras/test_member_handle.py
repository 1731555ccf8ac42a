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
