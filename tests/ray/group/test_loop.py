"""The core of loops of results as they arrive: its order, in thousands of orders of answers."""

import random
from dataclasses import dataclass

import pytest

from flatweights.ray.core._loop import Loop, LoopCall


@dataclass
class Record:
    """A worker, as a loop sees it."""

    why: Exception | None = None
    has_left: bool = False


def call_of(loop: Loop[Record], rank: int, end: float | None = None, **options: int) -> int:
    """Call a rank; return the answer, a number."""
    call_of.count += 1  # type: ignore[attr-defined]
    answer: int = call_of.count  # type: ignore[attr-defined]
    publication = options.get("publication", 0)
    loop.call(LoopCall(rank, Record(), answer, "work", None, publication, loop.rounds, end))
    return answer


call_of.count = 0  # type: ignore[attr-defined]


def test_the_oldest_call_that_has_answered_is_next() -> None:
    for seed in range(500):
        chance, loop = random.Random(seed), Loop[Record](None)
        size, slow, now, waited = chance.randint(1, 5), chance.randint(0, 4), 0.0, 0.0
        most = 0
        for rank in range(size):
            call_of(loop, rank)
        for _ in range(60):
            quick = [one for one in loop.out.values() if one.rank != slow or size == 1]
            for one in chance.sample(quick, chance.randint(1, len(quick))) if quick else ():
                loop.there.append(loop.out.pop(one.answer))
            while (oldest := loop.passed_over()) is not None:
                assert oldest.rounds == min(one.rounds for one in loop.out.values())
                patience = loop.patience(oldest, now)
                if patience is None:
                    break
                assert 0 < patience < 0.11
                now, waited = now + patience, waited + patience
                most = max(most, loop.rounds - oldest.rounds)
            there = [one.rounds for one in loop.there]
            result = loop.next_result(())
            if result is None:
                assert not there
                continue
            assert result.rounds == min(there)
            assert sorted([result.rounds, *(one.rounds for one in loop.there)]) == sorted(there)
            loop.rounds += 1
            call_of(loop, result.rank)
        # A slow worker is waited for again only once twice as many rounds have passed it.
        assert waited < 0.11 * 6
        assert most >= 2 * size - 1 or not waited


def test_a_slow_worker_that_gets_faster_is_waited_for_again() -> None:
    loop = Loop[Record](None)
    slow = call_of(loop, 0)

    def round_of_others() -> None:
        loop.there.append(loop.out.pop(call_of(loop, 1)))
        while (oldest := loop.passed_over()) is not None and loop.patience(oldest, 1e9) is not None:
            loop.patience(oldest, 2e9)
        assert loop.next_result(()) is not None
        loop.rounds += 1

    passed = []
    for pause in (20, 1, 1, 1, 1, 1):
        for _ in range(pause):
            round_of_others()
        loop.there.append(loop.out.pop(slow))
        assert loop.next_result(()) is not None
        passed.append(loop._patience.get(0, 0))
        loop.rounds += 1
        slow = call_of(loop, 0)
    assert passed[0] >= 2 * 3
    assert passed == sorted(passed, reverse=True)
    assert passed[-1] < passed[0] / 4


@pytest.mark.parametrize("most", [None, 0, 2])
def test_results_are_stale_by_publications(most: int | None) -> None:
    loop = Loop[Record](most)
    call = loop.out.pop(call_of(loop, 0, publication=5))
    found = [loop.is_stale(call, 5 + more) for more in range(4)]
    assert found == [most is not None and more > most for more in range(4)]


def test_late_calls_and_those_that_may_answer() -> None:
    loop = Loop[Record](None)
    assert loop.deadline() is None
    for rank, end in enumerate((None, 7.0, 5.0)):
        call_of(loop, rank, end)
    assert loop.deadline() == 5.0
    assert [call.rank for call in loop.overdue(6.0)] == [2]
    assert loop.is_anyone_at_work({1})
    for call in loop.out.values():
        call.record.why = RuntimeError() if call.rank else None
        call.record.has_left = call.rank == 0
    assert not loop.is_anyone_at_work(())
    (answer, *_) = loop.out
    assert loop.take_out(answer) is not None
    assert loop.take_out(answer) is None
