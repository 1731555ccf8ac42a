"""All possible histories of a driver and a worker, in a model of the protocol in mailbox.hpp.

Every interleaving of their steps and deaths is explored. The steps are those of mailbox.hpp: each
compare-and-swap is one step, and between two of them anything else may happen. Other workers only
delay the moment at which the driver may write its segment, so one worker stands for all. A member
needs no calls: its time is up after each slice of a wait, and it waits again. Broken variants of
the protocol show that the exploration finds such errors.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

# States of the word; states of a worker: not in a call, about to wait, looking at the word, running
# a command and writing its segment, about to leave (its time is up, or it was dismissed), dead.
AWAY, WAITING, COMMAND, BUSY = "AWAY", "WAITING", "COMMAND", "BUSY"
OUT, ENTERS, LOOKS, RUNS, LEAVES, GOES, DEAD = (
    "out", "enters", "looks", "runs", "leaves", "goes", "dead"
)  # fmt: skip
# The driver's states towards a worker: idle, about to end a wait, has posted to an AWAY worker and
# is about to look whether a call has not ended, about to call it, waits for it, reads its segment.
IDLE, DISMISSES, REQUESTS, CALLS, WAITS, READS = (
    "idle", "dismisses", "asks", "calls", "waits", "reads"
)  # fmt: skip
# Calls of Ray's that the worker has not begun: one that serves commands, one that was dismissed,
# and one of the user's on the actor's handle.
SERVE, DISMISSED, RAW = "s", "d", "r"

MOST_CALLS = 3


class Channel(NamedTuple):
    word: str = AWAY
    worker: str = OUT
    driver: str = IDLE
    queue: str = ""  # of Ray's calls
    is_dismissed: bool = False  # whether the worker's present call takes no command any more
    ends: bool = True  # the worker has announced the end of its call, or is in none
    in_flight: int = 0  # commands that were posted and not run
    ended: bool = False  # the driver knows that the worker is dead
    holds: bool = False  # whether the worker may read the driver's segment
    is_behind: bool = False  # a raw call was made after the last dismissal
    is_member: bool = False  # the worker returns to its mailbox by itself


class State(NamedTuple):
    channel: Channel = Channel()
    writes: bool = False  # whether the driver writes its segment


class ViolationError(AssertionError):
    """Something can happen that must not."""


def steps(state: State, variant: str) -> Iterator[State]:
    """Yield the states after each step that can be taken."""
    channel = state.channel
    if state.writes:
        yield state._replace(writes=False)
    elif not channel.holds or channel.worker == DEAD or variant == "holds are not looked at":
        yield state._replace(writes=True)
    for after in channel_steps(channel, state.writes, variant):
        yield state._replace(channel=after)


def channel_steps(channel: Channel, writes: bool, variant: str) -> Iterator[Channel]:
    yield from driver_steps(channel, writes, variant)
    if channel.worker != DEAD:
        yield from worker_steps(channel, variant)
        yield channel._replace(worker=DEAD, queue="", is_dismissed=False, ends=True)


def driver_steps(channel: Channel, writes: bool, variant: str) -> Iterator[Channel]:
    is_answered = channel.word in (AWAY, WAITING) or variant == "posts while one is late"
    if channel.driver == IDLE and is_answered:
        yield from _idle_steps(channel, writes, variant)
    elif channel.driver == DISMISSES:
        yield channel._replace(driver=IDLE, word=AWAY if channel.word == WAITING else channel.word)
    elif channel.driver == REQUESTS:
        has_ended = channel.ends and SERVE not in channel.queue and DISMISSED not in channel.queue
        needs_call = has_ended or not _may_serve(channel)
        if variant == "counts on a call that was dismissed":
            needs_call = has_ended
        yield channel._replace(driver=CALLS if needs_call else WAITS)
    elif channel.driver == CALLS:
        yield _called(channel, SERVE)._replace(driver=WAITS)
    elif channel.driver == WAITS:
        yield from _waiting_steps(channel, variant)
    elif channel.driver == READS:
        yield channel._replace(driver=IDLE)


def _idle_steps(channel: Channel, writes: bool, variant: str) -> Iterator[Channel]:
    """Yield the states after the driver's steps while no answer is missing."""
    in_order = not channel.is_behind or variant == "does not dismiss after a raw call"
    has_room = len(channel.queue) < MOST_CALLS
    if in_order and has_room and not (channel.ended or writes):
        # The command mentions the driver's segment: held from before it is posted.
        posted = channel._replace(word=COMMAND, in_flight=channel.in_flight + 1, holds=True)
        if channel.is_member or variant == "never calls":
            yield posted._replace(driver=WAITS)
        elif channel.word == AWAY or not _may_serve(channel):
            yield posted._replace(driver=REQUESTS)
        else:
            yield posted._replace(driver=WAITS)
    if channel.is_member or channel.worker == DEAD:
        return  # the driver does not call or dismiss it
    # dismiss: a store, then a swap
    queue = channel.queue.replace(SERVE, DISMISSED)
    in_call = channel.worker != OUT
    yield channel._replace(driver=DISMISSES, queue=queue, is_dismissed=in_call, is_behind=False)
    if has_room:
        yield _called(channel, SERVE)  # ahead of time
        yield _called(channel, RAW)


def _waiting_steps(channel: Channel, variant: str) -> Iterator[Channel]:
    """Yield the states after the driver's steps while it waits for the answer."""
    if variant == "posts while one is late":
        yield channel._replace(driver=IDLE)
    if channel.word == COMMAND:  # withdraw
        yield channel._replace(word=AWAY, driver=IDLE, in_flight=channel.in_flight - 1, holds=False)
    if channel.word in (AWAY, WAITING) or variant == "reads when it is late":
        yield channel._replace(driver=READS)
    if channel.worker == DEAD:  # the end of the socket
        yield channel._replace(driver=IDLE, ended=True)


def _may_serve(channel: Channel) -> bool:
    """Whether a call of the driver was not dismissed, even if it has ended."""
    in_call = channel.worker not in (OUT, DEAD)
    return SERVE in channel.queue or (in_call and not channel.is_dismissed)


def _called(channel: Channel, call: str) -> Channel:
    queue = channel.queue if channel.worker == DEAD else channel.queue + call
    return channel._replace(queue=queue, is_behind=channel.is_behind or call == RAW)


def worker_steps(channel: Channel, variant: str) -> Iterator[Channel]:
    if channel.worker == OUT:
        yield from _begun_calls(channel)
    elif channel.worker == ENTERS:
        yield channel._replace(worker=LOOKS, word=WAITING if channel.word == AWAY else channel.word)
    elif channel.worker == LOOKS:
        yield from _looking_steps(channel, variant)
    elif channel.worker in (LEAVES, GOES):
        yield from _leaving_steps(channel, variant)
    elif channel.worker == RUNS:
        yield from _running_steps(channel, variant)
    if channel.worker not in (RUNS, DEAD) and channel.holds and channel.word in (AWAY, WAITING):
        yield channel._replace(holds=False)


def _begun_calls(channel: Channel) -> Iterator[Channel]:
    """Yield the states after the worker has begun its next call, or returned by itself."""
    if channel.queue:
        left = channel._replace(queue=channel.queue[1:])
        if channel.queue[0] == RAW:
            yield left
        else:
            is_dismissed = channel.queue[0] == DISMISSED
            enters = LOOKS if is_dismissed else ENTERS
            yield left._replace(worker=enters, ends=False, is_dismissed=is_dismissed)
    if channel.is_member:
        yield channel._replace(worker=ENTERS, ends=False)


def _looking_steps(channel: Channel, variant: str) -> Iterator[Channel]:
    """Yield the state after the worker has looked at the word."""
    if channel.word == COMMAND:
        if channel.is_dismissed and variant != "takes it though dismissed":
            yield channel._replace(worker=OUT, is_dismissed=False, ends=True)
        else:
            yield channel._replace(worker=RUNS, word=BUSY, in_flight=channel.in_flight - 1)
    elif channel.word == WAITING:  # its time is up
        ends = variant != "leaves and says so later" or channel.ends
        yield channel._replace(worker=LEAVES, ends=ends)
    elif channel.word == AWAY:
        yield channel._replace(worker=GOES)


def _leaving_steps(channel: Channel, variant: str) -> Iterator[Channel]:
    """Yield the state after the worker has left its mailbox, or found that it has to look again."""
    says_so = variant != "leaves and says so later"
    out = channel._replace(worker=OUT, is_dismissed=False)
    if channel.worker == LEAVES:
        if channel.word != WAITING and variant != "leaves by a plain store":
            yield channel._replace(worker=LOOKS)
        elif says_so:
            yield out._replace(word=AWAY)
        else:
            yield channel._replace(worker=GOES, word=AWAY)
    elif not channel.ends:
        yield channel._replace(ends=True)
    else:
        looks_again = says_so and variant != "is dismissed and does not look again"
        yield channel._replace(worker=LOOKS) if looks_again and channel.word == COMMAND else out


def _running_steps(channel: Channel, variant: str) -> Iterator[Channel]:
    """Yield the states after a worker that runs a command has announced its end, or answered."""
    if variant == "answers before it writes":
        yield channel._replace(word=WAITING)
    if not channel.ends:
        yield channel._replace(ends=True)
    out = channel._replace(worker=OUT, is_dismissed=False)
    for after in (channel._replace(word=WAITING, worker=LOOKS), out._replace(word=AWAY)):
        if after.worker == LOOKS or channel.ends:
            yield after._replace(holds=False)
            yield after  # it keeps a view


def check(state: State) -> None:
    channel = state.channel
    if channel.driver == READS and channel.worker == RUNS:
        raise ViolationError("a segment is read while it is written")
    if channel.driver == READS and channel.word in (COMMAND, BUSY):
        raise ViolationError("a segment is read that may be half written")
    if state.writes and channel.holds and channel.worker != DEAD:
        raise ViolationError("the driver writes what a worker may read")
    if channel.worker == RUNS and RAW in channel.queue and channel.in_flight == 0:
        raise ViolationError("a raw call is overtaken")
    is_called = channel.is_member or SERVE in channel.queue or channel.driver in (REQUESTS, CALLS)
    if channel.word == COMMAND and channel.worker == OUT and not is_called:
        raise ViolationError("a command is lost")
    is_answered = channel.word in (AWAY, WAITING)
    if channel.driver in (WAITS, READS) and is_answered and channel.in_flight:
        raise ViolationError("a command is answered that was not run")
    if channel.in_flight not in (0, 1):
        raise ViolationError("a command is posted over another, or run twice")


def explore(variant: str = "", *, is_member: bool = False) -> set[State]:
    """Return all states that can be reached."""
    begin = State(Channel(is_member=is_member))
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
    """Raise if a state has no path to one in which the driver waits for nobody."""
    before: dict[State, list[State]] = {}
    for state, after in graph.items():
        for one in after:
            before.setdefault(one, []).append(state)
    left = [s for s in graph if s.channel.driver == IDLE]
    good = set(left)
    while left:
        for state in before.get(left.pop(), ()):
            if state not in good:
                good.add(state)
                left.append(state)
    if len(good) < len(graph):
        raise ViolationError("a deadlock")


def test_nothing_is_torn_lost_or_stuck_in_any_interleaving() -> None:
    states = explore()
    words = {state.channel.word for state in states}
    workers = {state.channel.worker for state in states}
    assert words == {AWAY, WAITING, COMMAND, BUSY}
    assert workers == {OUT, ENTERS, LOOKS, RUNS, LEAVES, GOES, DEAD}


def test_nothing_is_torn_lost_or_stuck_between_a_host_and_a_member() -> None:
    assert {state.channel.word for state in explore(is_member=True)} == {
        AWAY,
        WAITING,
        COMMAND,
        BUSY,
    }
    for variant, found in (
        ("leaves by a plain store", "not run|posted over"),
        ("posts while one is late", "posted over another"),
        ("holds are not looked at", "the driver writes"),
    ):
        with pytest.raises(ViolationError, match=found):
            explore(variant, is_member=True)


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
        ("does not dismiss after a raw call", "overtaken"),
        ("takes it though dismissed", "overtaken"),
        ("counts on a call that was dismissed", "lost"),
    ],
)
def test_a_broken_protocol_is_found(variant: str, found: str) -> None:
    with pytest.raises(ViolationError, match=found):
        explore(variant)
