"""An agent to which workers owe answers to commands that are over."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from flatweights._sources import Template
from flatweights.ray.nodes._connections import StreamError
from flatweights.ray.nodes._node_reducer import Endpoints
from flatweights.ray.nodes._plan import Plan
from flatweights.ray.peers._agent import Agent, Command
from flatweights.ray.peers._transport import Call, PendingResult

pytestmark = pytest.mark.ray


class Owed(PendingResult):
    """An answer that arrives when the test says so."""

    waiting: ClassVar[Callable[[], object]] = lambda: None

    def __init__(self) -> None:
        self.is_there = self.is_let_go = False

    @classmethod
    def wait(cls, answers: Sequence[Any], timeout: float | None, enough: int = 1) -> list[Any]:
        assert not any(answer.is_let_go for answer in answers)
        there = [answer for answer in answers if answer.is_there]
        if not there:
            cls.waiting()
        return there

    def result(self) -> Any:
        return "value"

    def release(self) -> None:
        self.is_let_go = True


class Caller:
    """A stand-in for the object that calls a worker."""

    handle = "the worker"

    def __init__(self) -> None:
        self.answers: list[Owed] = []

    def call(self, call: Call) -> Owed:
        self.answers.append(Owed())
        return self.answers[-1]


def test_an_answer_that_came_while_another_did_not_is_not_waited_for_again() -> None:
    agent, callers = Agent(), [Caller(), Caller()]
    agent._workers = dict(enumerate(callers))  # type: ignore[arg-type]
    ranks: Any = {rank: (caller.handle, ()) for rank, caller in enumerate(callers)}

    def work(number: int) -> dict[int, Any]:
        return agent.work(
            Command(number, Call((("group", number), None, None), "train"), ranks, None, (), None)
        )

    def end(number: int) -> None:
        thread = threading.Thread(target=agent.finish, args=[number])
        thread.start()
        finishing.append(thread)
        while agent._is_on(number):
            pass

    finishing: list[threading.Thread] = []
    Owed.waiting = lambda: end(1)
    assert work(1) == {}
    finishing[-1].join()
    callers[0].answers[0].is_there = True  # the other worker is stopped
    Owed.waiting = lambda: end(2)
    assert work(2) == {}
    finishing[-1].join()
    callers[1].answers[0].is_there = True

    def answer() -> None:
        for caller in callers:
            caller.answers[-1].is_there = True

    Owed.waiting = answer
    assert work(3) == {0: "value", 1: "value"}
    assert [len(caller.answers) for caller in callers] == [2, 2]


def test_a_command_that_a_slow_thread_runs_too_late_drops_no_newer_results() -> None:
    agent, caller = Agent(), Caller()
    agent._workers = {0: caller}  # type: ignore[dict-item]

    def answer() -> None:
        caller.answers[-1].is_there = True

    def work(number: int) -> dict[int, Any]:
        call, ranks = Call((("group", number), None, None), "train"), {0: (caller.handle, ())}
        return agent.work(Command(number, call, ranks, None, (), None))

    Owed.waiting = answer
    assert work(2) == {0: "value"}
    assert work(1) == {}
    assert not caller.answers[-1].is_let_go
    assert agent.give(0) == "value"
    agent.finish(2)
    assert caller.answers[-1].is_let_go


def test_an_exchange_of_a_round_that_is_over_is_an_answer_and_no_error_of_ray() -> None:
    agent = Agent()
    address = agent.address()
    assert not isinstance(address, str)
    plan = Plan(
        1, Template.of({"w": np.zeros(3)}), ((0, 1), (2,)), dict.fromkeys(range(3), 1.0), "float64"
    )
    answer = agent.stream(plan, 0, Endpoints((address, address), bytes(16), 1.0))
    assert isinstance(answer, StreamError)
    assert "the round is over" in str(answer)
    agent.end.close()
