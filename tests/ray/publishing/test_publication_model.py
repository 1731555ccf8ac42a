"""The protocol of a publication in all orders of its steps: no slot is written while it is read.

A model in Python of `csrc/flatweights/publication.cpp`: each step touches one word that processes
share. Every order of the steps of one writer and two readers is explored. This includes readers
that stop for ever, since a process may stop in any state.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

SLOTS = 4  # two readers and two more
PUBLICATIONS = 4
READS = 2


class Reader(NamedTuple):
    step: str = "idle"
    number: int = 0  # of the publication that it reads, or is about to read
    slot: int = 0
    hold: int = -1
    seen: int = 0
    reads: int = 0


class Writer(NamedTuple):
    step: str = "choose"
    number: int = 1  # of the next publication
    slot: int = 0
    stamp: int = 0  # that the slot had


class State(NamedTuple):
    word: tuple[int, int]  # number and slot
    stamps: tuple[int, ...]
    data: tuple[int, ...]  # the content of each slot; -1 while it is written
    writer: Writer
    readers: tuple[Reader, ...]


def changed(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def write(state: State, rechecks: bool) -> Iterator[State]:
    """Take a step of the writer."""
    writer = state.writer
    number, slot = writer.number, writer.slot
    is_held = any(reader.hold == slot for reader in state.readers)
    if writer.step == "choose" and number <= PUBLICATIONS:
        if (state.word[0] > 0 and state.word[1] == slot) or is_held:
            yield state._replace(writer=writer._replace(slot=(slot + 1) % SLOTS))
        else:
            yield state._replace(writer=writer._replace(step="mark", stamp=state.stamps[slot]))
    elif writer.step == "mark":
        stamps = changed(state.stamps, slot, 0)
        yield state._replace(stamps=stamps, writer=writer._replace(step="look"))
    elif writer.step == "look":
        if rechecks and is_held:
            stamps = changed(state.stamps, slot, writer.stamp)
            after = writer._replace(step="choose", slot=(slot + 1) % SLOTS)
            yield state._replace(stamps=stamps, writer=after)
        else:
            data = changed(state.data, slot, -1)
            yield state._replace(data=data, writer=writer._replace(step="fill"))
    elif writer.step == "fill":
        data = changed(state.data, slot, number)
        yield state._replace(data=data, writer=writer._replace(step="stamp"))
    elif writer.step == "stamp":
        stamps = changed(state.stamps, slot, number)
        yield state._replace(stamps=stamps, writer=writer._replace(step="publish"))
    elif writer.step == "publish":
        yield state._replace(word=(number, slot), writer=Writer(number=number + 1))


def read(state: State, k: int, checks: bool) -> Iterator[State]:
    """Take a step of reader ``k``."""
    reader = state.readers[k]

    def after(**fields: object) -> State:
        readers = [*state.readers]
        readers[k] = reader._replace(**fields)  # type: ignore[arg-type]
        return state._replace(readers=tuple(readers))

    if reader.step == "idle" and reader.reads < READS and state.word[0] > reader.seen:
        yield after(step="hold", number=state.word[0], slot=state.word[1])
    elif reader.step == "hold":
        yield after(step="check", hold=reader.slot)
    elif reader.step == "check":
        if checks and state.stamps[reader.slot] != reader.number:
            yield after(step="idle", hold=-1)
        else:
            yield after(step="read")
    elif reader.step == "read":
        # Checked in every state until it is released: a read slot must be whole all the time.
        yield after(step="idle", hold=-1, seen=reader.number, reads=reader.reads + 1)


def torn(rechecks: bool = True, checks: bool = True) -> bool:
    """Explore all states; return whether a reader reads another publication than it chose."""
    start = State((0, 0), (0,) * SLOTS, (0,) * SLOTS, Writer(), (Reader(), Reader()))
    found, waiting = {start}, [start]
    steps: list[Callable[[State], Iterator[State]]] = [
        lambda state: write(state, rechecks),
        lambda state: read(state, 0, checks),
        lambda state: read(state, 1, checks),
    ]
    while waiting:
        state = waiting.pop()
        for reader in state.readers:
            if reader.step == "read" and state.data[reader.slot] != reader.number:
                return True
        # The writer never waits: it always finds a free slot.
        free = {*range(SLOTS)} - {reader.hold for reader in state.readers} - {state.word[1]}
        assert free or state.word[0] == 0
        for step in steps:
            for following in step(state):
                if following not in found:
                    found.add(following)
                    waiting.append(following)
    assert len(found) > 1000
    return False


def test_no_order_of_steps_tears_a_read() -> None:
    assert not torn()


@pytest.mark.parametrize("left_out", ["rechecks", "checks"])
def test_each_check_is_needed(left_out: str) -> None:
    assert torn(**{left_out: False})
