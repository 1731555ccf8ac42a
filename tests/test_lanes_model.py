"""All that can happen to a driver and two workers, by a model of the protocol in mailbox.hpp.

Every interleaving of their steps and deaths is explored. The steps are those of mailbox.hpp: each
compare-and-swap is one step, and between two of them anything else may happen. BrokenError variants
show that the exploration finds what it looks for.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

# States of the word; states of a worker: not in a call, looking at the word, running a command
# and writing its window, about to leave (its time is up, or it was dismissed), dead.
AWAY, WAITING, COMMAND, BUSY = "AWAY", "WAITING", "COMMAND", "BUSY"
OUT, LOOKS, RUNS, LEAVES, GOES, DEAD = "out", "looks", "runs", "leaves", "goes", "dead"
# What the driver does with a worker: nothing, posted to an AWAY worker and about to look whether a
# call has not ended, about to call it, waits for it, reads its window.
IDLE, ASKS, CALLS, WAITS, READS = "idle", "asks", "calls", "waits", "reads"

MOST_CALLS = 2


class Lane(NamedTuple):
    word: str = AWAY
    worker: str = OUT
    driver: str = IDLE
    calls: int = 0  # of Ray's, that the worker has not begun
    ends: bool = True  # the worker has said that its present call ends, or is in none
    owed: int = 0  # commands that were posted and not run
    ended: bool = False  # the driver knows that the worker is dead
    holds: bool = False  # whether the worker may read the driver's window


class State(NamedTuple):
    lanes: tuple[Lane, Lane] = (Lane(), Lane())
    writes: bool = False  # whether the driver writes its window


class BrokenError(AssertionError):
    """Something that must not happen can."""


def steps(state: State, variant: str) -> Iterator[State]:
    """Yield the states after each step that can be taken."""
    can_write = not any(lane.holds and lane.worker != DEAD for lane in state.lanes)
    if state.writes:
        yield state._replace(writes=False)
    elif can_write or variant == "holds are not looked at":
        yield state._replace(writes=True)
    for k, lane in enumerate(state.lanes):
        for after in lane_steps(lane, state.writes, variant):
            # Workers are alike: the order of the two makes no other state.
            first, second = sorted((after, state.lanes[1 - k]))
            yield state._replace(lanes=(first, second))


def lane_steps(lane: Lane, writes: bool, variant: str) -> Iterator[Lane]:
    yield from driver_steps(lane, writes, variant)
    if lane.worker != DEAD:
        yield from worker_steps(lane, variant)
        yield lane._replace(worker=DEAD)


def driver_steps(lane: Lane, writes: bool, variant: str) -> Iterator[Lane]:
    settled = lane.word in (AWAY, WAITING)
    if variant == "posts while one is late":
        settled = True
        if lane.driver == WAITS:
            yield lane._replace(driver=IDLE)
    if lane.driver == IDLE and settled and not lane.ended and not writes:
        # The command mentions the driver's window: held from before it is posted.
        posted = lane._replace(word=COMMAND, owed=lane.owed + 1, holds=True)
        if lane.word == AWAY and variant != "never calls":
            yield posted._replace(driver=ASKS)
        else:
            yield posted._replace(driver=WAITS)
    if lane.driver == ASKS:
        has_ended = lane.ends and not lane.calls
        yield lane._replace(driver=CALLS if has_ended else WAITS)
    if lane.driver == IDLE and lane.word == WAITING:  # dismiss
        yield lane._replace(word=AWAY)
    if lane.driver == CALLS:
        yield lane._replace(driver=WAITS, calls=min(lane.calls + 1, MOST_CALLS))
    if lane.driver == IDLE and lane.calls < 1:  # a call ahead of time
        yield lane._replace(calls=lane.calls + 1)
    if lane.driver == WAITS and lane.word == COMMAND:  # withdraw
        yield lane._replace(word=AWAY, driver=IDLE, owed=lane.owed - 1, holds=False)
    if lane.driver == WAITS and lane.word in (AWAY, WAITING):
        yield lane._replace(driver=READS)
    if lane.driver == WAITS and variant == "reads when it is late":
        yield lane._replace(driver=READS)
    if lane.driver == WAITS and lane.worker == DEAD:  # the end of the socket
        yield lane._replace(driver=IDLE, ended=True)
    if lane.driver == READS:
        yield lane._replace(driver=IDLE)


def worker_steps(lane: Lane, variant: str) -> Iterator[Lane]:
    if lane.worker == OUT and lane.calls:
        entered = WAITING if lane.word == AWAY else lane.word
        yield lane._replace(worker=LOOKS, calls=lane.calls - 1, ends=False, word=entered)
    says_so = variant != "leaves and says so later"
    if lane.worker == LOOKS:
        if lane.word == COMMAND:
            yield lane._replace(worker=RUNS, word=BUSY, owed=lane.owed - 1)
        if lane.word == WAITING:  # its time is up
            yield lane._replace(worker=LEAVES, ends=says_so or lane.ends)
        if lane.word == AWAY:
            yield lane._replace(worker=GOES)
    if lane.worker == LEAVES:
        if lane.word == WAITING or variant == "leaves by a plain store":
            yield lane._replace(worker=OUT if says_so else GOES, word=AWAY)
        else:
            yield lane._replace(worker=LOOKS)
    if lane.worker == GOES and not lane.ends:
        yield lane._replace(ends=True)
    if lane.worker == GOES and lane.ends:
        looks_again = says_so and variant != "is dismissed and does not look again"
        yield lane._replace(worker=LOOKS if looks_again and lane.word == COMMAND else OUT)
    if lane.worker == RUNS and variant == "answers before it writes":
        yield lane._replace(word=WAITING)
    if lane.worker == RUNS:
        if not lane.ends:
            yield lane._replace(ends=True)
        for word, worker in ((WAITING, LOOKS), (AWAY, OUT)):
            if word == WAITING or lane.ends:
                yield lane._replace(word=word, worker=worker, holds=False)
                yield lane._replace(word=word, worker=worker)  # it keeps a view
    if lane.worker in (OUT, LOOKS, LEAVES, GOES) and lane.holds and lane.word in (AWAY, WAITING):
        yield lane._replace(holds=False)


def check(state: State) -> None:
    for lane in state.lanes:
        if lane.driver == READS and lane.worker == RUNS:
            raise BrokenError("a window is read while it is written")
        if lane.driver == READS and lane.word in (COMMAND, BUSY):
            raise BrokenError("a window is read that may be half written")
        if state.writes and lane.holds and lane.worker != DEAD:
            raise BrokenError("the driver writes what a worker may read")
        is_called = lane.calls or lane.driver in (ASKS, CALLS)
        if lane.word == COMMAND and lane.worker == OUT and not is_called:
            raise BrokenError("a command is lost")
        is_answered = lane.word in (AWAY, WAITING)
        if lane.driver in (WAITS, READS) and is_answered and lane.owed:
            raise BrokenError("a command is answered that was not run")
        if lane.owed not in (0, 1):
            raise BrokenError("a command is posted over another, or run twice")


def explore(variant: str = "") -> set[State]:
    """Return all states that can be reached."""
    begin = State()
    seen, left = {begin}, [begin]
    graph: dict[State, list[State]] = {}
    while left:
        state = left.pop()
        check(state)
        graph[state] = list(steps(state, variant))
        for after in graph[state]:
            if after not in seen:
                seen.add(after)
                left.append(after)
    _check_progress(graph)
    return seen


def _check_progress(graph: dict[State, list[State]]) -> None:
    """Raise if some state has no way to one in which the driver waits for nobody."""
    before: dict[State, list[State]] = {}
    for state, after in graph.items():
        for one in after:
            before.setdefault(one, []).append(state)
    left = [s for s in graph if all(lane.driver == IDLE for lane in s.lanes)]
    good = set(left)
    while left:
        for state in before.get(left.pop(), ()):
            if state not in good:
                good.add(state)
                left.append(state)
    if len(good) < len(graph):
        raise BrokenError("a deadlock")


def test_nothing_is_torn_lost_or_stuck_in_any_interleaving() -> None:
    states = explore()
    words = {lane.word for state in states for lane in state.lanes}
    workers = {lane.worker for state in states for lane in state.lanes}
    assert words == {AWAY, WAITING, COMMAND, BUSY}
    assert workers == {OUT, LOOKS, RUNS, LEAVES, GOES, DEAD}


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("leaves by a plain store", "lost|not run"),
        ("never calls", "lost"),
        ("leaves and says so later", "lost"),
        ("is dismissed and does not look again", "lost"),
        ("reads when it is late", "half written"),
        ("answers before it writes", "while it is written"),
        ("holds are not looked at", "the driver writes"),
        ("posts while one is late", "posted over another"),
    ],
)
def test_a_broken_protocol_is_found(variant: str, found: str) -> None:
    with pytest.raises(BrokenError, match=found):
        explore(variant)
