"""What must hold in a `fit`, besides what holds in a process group (`oracle`).

- Members average at one place: the same epoch and batch, with equal weights and equal states.
- No step is left out, and none is made twice: the number of steps in a state follows from the place
  in the training, in every call and at the end.
- All members end with the same weights, whenever they came.
- A replacement begins with the epoch that the others begin; with none, if they have ended.
- Callbacks that decide have seen the same epochs as those of the others.
- Members that wait for late ones at the end leave together.
- A member whose own callback ends the training begins no other epoch.
- A member that lacks the state, and is told that the others are elsewhere, next meets them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.sim.oracle import Noted, Oracle, Record, Sent
from tests.sim.world import Process, World

from flatweights.ray.channels._protocol import REQUEST
from flatweights.ray.core._requests import OutOfSyncError, Response
from flatweights.ray.results._round import Round


class FitOracle(Oracle):
    """The notes, and the checks."""

    def __init__(self, world: World, plan: dict[str, Any], state_layout: Any) -> None:
        super().__init__(world, plan, state_layout)
        self._elsewhere: set[bytes] = set()  # tokens of members whose others are elsewhere

    def asked(
        self, process: Process, token: bytes, body: bytes, kind: int = REQUEST, call: Any = None
    ) -> None:
        super().asked(process, token, body, kind, call)
        sent = self.members[token].open
        if sent is None or sent.request.state is None:
            return
        if token in self._elsewhere and sent.request.name != "place":
            self._fail(f"{process.name} asks {sent.request}, and the others are elsewhere")
        self._elsewhere.discard(token)

    def _check_other_answer(
        self, record: Record, error: Exception | None, member: Noted, sent: Sent
    ) -> None:
        super()._check_other_answer(record, error, member, sent)
        if isinstance(error, OutOfSyncError) and sent.request.state is not None:
            self._elsewhere.add(member.token)

    def _check_average(
        self, record: Record, number: int, result: Round, parts: dict[int, Sent], buffer: Any
    ) -> None:
        super()._check_average(record, number, result, parts, buffer)
        self._check_places(number, parts)

    def _check_gathered(
        self, number: int, result: Round, parts: dict[int, Sent], response: Response
    ) -> None:
        super()._check_gathered(number, result, parts, response)
        self._check_places(number, parts)

    def _check_places(self, number: int, parts: dict[int, Sent]) -> None:
        """Check that the members of a call are at one place of their training."""
        steps = self._plan["steps"]
        calls = [sent.call for _, sent in sorted(parts.items())]
        if calls[0].place is None:  # the start
            return
        places = {(call.place.epoch, call.place.steps) for call in calls}
        if len(places) > 1:
            self._fail(f"{number}: members average at several places: {sorted(places)}")
            return
        ((epoch, done),) = places
        for rank, sent in parts.items():
            # Batches of one execution are finished together.
            since = sent.call.steps - epoch * steps - done
            if not (since == 0 or 0 < since < self._plan["execution"]):
                made = f"{sent.call.steps:g} steps, in epoch {epoch} after batch {done}"
                self._fail(f"{number}: rank {rank} has made {made}")
        states = [call.state for call in calls if call.state is not None]
        names = "weights", "iterations", "position"
        differ = [
            name
            for name, parts_of_all in zip(names, zip(*states, strict=True), strict=False)
            if len({*parts_of_all}) > 1
        ]
        if not self._plan["gradients"] and "weights" in differ:
            differ.remove("weights")  # between two averages of weights
        if differ:
            self._fail(f"{number}: members at one place differ in {differ}")

    def _state_in(self, content: bytes | None) -> Any:
        from tests.sim.fit_programs import State  # imports this

        assert content is not None
        return State.of(np.frombuffer(content, np.uint8).copy()).bytes()

    # What programs tell.

    def has_seen(self, member: Any, epoch: int, callback: Any) -> None:
        """Check that a callback which decides is in the same state as those of other members."""
        self.counts["epochs seen"] += 1
        best = callback.best_weights
        state = (
            callback.wait,
            float(callback.best),
            callback.best_epoch,
            callback.stopped_epoch,
            None if best is None else tuple(one.tobytes() for one in best),
        )
        self._agree(member, f"EarlyStopping in epoch {epoch}", state)

    @property
    def _ends_itself(self) -> bool:
        """Whether a callback may end the training."""
        return any(map(self._plan.get, ("patience", "stops", "halts")))

    def joins(self, member: Any, first: int | None, met: list[Any]) -> None:
        """Check that a replacement begins with the epoch of those that it has met, if they do."""
        epochs, have_ended, _ = zip(*met, strict=True)
        expected = self._plan["epochs"] if any(have_ended) else epochs[0]
        if first != expected:
            name = self.of(member).process.name
            self._fail(f"{name} begins with epoch {first}, and the others with epoch {expected}")

    def begins(self, member: Any, epoch: int, stopped: int | None) -> None:
        """Check that a member begins no epoch after one in which its own callback has stopped."""
        if stopped is not None and epoch > stopped:
            name = self.of(member).process.name
            self._fail(f"{name} begins epoch {epoch}, although it has stopped in epoch {stopped}")

    def breaks(self, member: Any, *, are_over: bool) -> None:
        """Check that no `fit` ends early, unless a callback or the others have ended theirs."""
        if not (self._ends_itself or are_over):
            self._fail(f"{self.of(member).process.name} has ended its training early")

    def ended(
        self, member: Any, steps: Any, weights: Any, told: int | None, *, is_alone: bool
    ) -> None:
        """Check the end of a `fit`.

        Args:
            member: The member.
            steps: The steps that it has made.
            weights: Its weights.
            told: Its last epoch, if its own callback has ended it: then all members end with that
                epoch, or with the next one.
            is_alone: Whether it has ended without the others. If weights are averaged, they average
                theirs once more.
        """
        self.counts["ended"] += 1
        plan = self._plan
        made = int(steps[0])
        may_stop = self._ends_itself
        is_whole = made % plan["steps"] == 0 if may_stop else made == plan["epochs"] * plan["steps"]
        if not is_whole:
            self._fail(f"{self.of(member).process.name} ends with {made} steps")
        if told is not None and made > (told + 2) * plan["steps"]:
            name = self.of(member).process.name
            self._fail(f"{name} ends in epoch {told}, and the others have made {made} steps")
        if not (is_alone and not plan["gradients"]):
            self._agree(member, "the end", (made, weights.tobytes()))

    def leaves(self, member: Any, last: int | None) -> None:
        """Check that members that have met at the end have done so equally often."""
        if last is not None:
            self._agree(member, "the last meeting", last)

    def averages_last(self, member: Any, trained: bool) -> None:
        """Check that all members average once more at the end of their `fit`, or none does."""
        self._agree(member, "whether weights are averaged at the end", trained)

    def has_best(self, member: Any, weights: Any) -> None:
        """Check that all members end with the same best weights."""
        self._agree(member, "the best weights", weights.tobytes())

    def _agree(self, member: Any, what: str, state: Any) -> None:
        """Check that all members of a process group have the same ``state``."""
        noted = self.of(member)
        key = id(self._record_of(noted)), what
        if self._states.setdefault(key, state) != state:
            self._fail(f"{noted.process.name}: {what} differs: {state}, not {self._states[key]}")
