"""The member that a callback or an optimizer averages with: one of its own, or a shared one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flatweights.ray import Member, join

_lock = threading.Lock()
_shared: Member | None = None
_leases = 0  # of the shared member


@contextmanager
def calls_are_equal(what: str) -> Iterator[None]:
    """Enclose a call of ``what``: if members have called different things, say what to do.

    Raises:
        ValueError: If they have.
    """
    try:
        yield
    except ValueError as error:
        if "the same call of all members" not in str(error):
            raise
        raise ValueError(
            f"{what}: {error}. All members need the same model, the same callbacks in the same "
            "order, validation data in all of them or in none, and as many batches in an epoch: "
            "give fit the same steps_per_epoch, and repeat the data"
        ) from error


class MemberLease:
    """A callback's or an optimizer's use of a member.

    Those that are given no member share one, which joins with the first lease and leaves when the
    last one ends.
    """

    def __init__(self, member: Member | None) -> None:
        """Use ``member``, or the shared one if None."""
        if not isinstance(member, Member | None):
            raise TypeError(f"member: expected a Member, got {type(member).__name__}")
        self._given = member
        self._is_taken = False

    def take(self) -> Member:
        """Return the member; join, if it is shared and nobody has yet.

        Raises:
            RuntimeError: If there is nothing that says which meeting to join.
        """
        global _shared, _leases
        if self._given is not None:
            return self._given
        with _lock:
            if _shared is None:
                try:
                    _shared = join()
                except TypeError as error:
                    raise RuntimeError(
                        "member: outside of Ray Train expected flatweights.ray.join(name, "
                        "rank=..., size=...), got None"
                    ) from error
            if not self._is_taken:
                self._is_taken = True
                _leases += 1
            return _shared

    def end(self) -> None:
        """End the lease; with the last one, the shared member leaves. One that was given stays."""
        global _shared, _leases
        with _lock:
            if not self._is_taken:
                return
            self._is_taken = False
            _leases -= 1
            if _leases == 0 and _shared is not None:
                _shared.leave()
                _shared = None
