"""Members that lack the state of a training get it, and go on like the others."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from process_groups import LocalProcessGroup, kill

from flatweights import FlatWeights, Layout
from flatweights.ray import CallsDifferError, Member, WorkerError

SIZE = 20_000


class Training:
    """A model with momentum, trained by averaged gradients, as in a user's program.

    Attributes:
        member: The member.
        weights: The model.
        momentum: The state of the optimizer.
        steps: The number of steps that it has seen.
        rounds: The results of its calls.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.weights = np.full(SIZE, float(member.rank), np.float32)  # to be healed, or broadcast
        self.momentum = np.zeros(SIZE)
        self.steps = np.zeros(1, np.int64)
        self.rounds: list[Any] = []
        self.states: dict[int, bytes] = {}  # after so many steps
        self.in_gather: Callable[[], None] = lambda: None
        self.layout = Layout.of(self._parts())

    def _parts(self) -> dict[str, NDArray[Any]]:
        return {"weights": self.weights, "momentum": self.momentum, "steps": self.steps}

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        self.in_gather()
        views = self.layout.packed_views(buffer)
        for view, part in zip(views, self._parts().values(), strict=True):
            view[...] = part

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        views = self.layout.packed_views(buffer)
        for view, part in zip(views, self._parts().values(), strict=True):
            part[...] = view

    def gradient(self) -> NDArray[np.float32]:
        noise = np.random.default_rng([self.member.rank, int(self.steps[0])]).normal(size=SIZE)
        return (self.weights + noise).astype(np.float32)

    def step(self, **options: Any) -> Any:
        gradient = self.gradient()
        options = {"min_results": 1} | options
        result = self.member.average({"g": gradient}, state=self, **options)
        self.momentum[:] = 0.9 * self.momentum + result.weights["g"]
        self.weights[:] = self.weights - 0.01 * self.momentum
        self.steps += 1
        self.rounds.append(result)
        self.states[int(self.steps[0])] = self.bits()
        return result

    def bits(self) -> bytes:
        return b"".join(part.tobytes() for part in self._parts().values())


def begin(group: LocalProcessGroup) -> list[Training]:
    """Return trainings with equal states."""
    trainings = [Training(member) for member in group.join_all()]
    for training in trainings:
        training.weights[:] = 1.0
    return trainings


def together(pool: ThreadPoolExecutor, trainings: Sequence[Training], **options: Any) -> list[Any]:
    return [done.result(60) for done in [pool.submit(one.step, **options) for one in trainings]]


@pytest.fixture
def pool() -> Any:
    made = ThreadPoolExecutor(8)
    yield made
    made.shutdown(wait=False)  # a test that failed may have left some in a call


def replaced(group: LocalProcessGroup, training: Training) -> Training:
    kill(training.member)
    rank = training.member.rank
    group.wait_until(lambda inside: inside.rendezvous.sessions[rank].why is not None)
    return Training(group.join(rank))


def test_a_new_process_is_healed_and_is_no_part_of_that_average(pool: Any) -> None:
    group = LocalProcessGroup(3)
    trainings = begin(group)
    for _ in range(3):
        together(pool, trainings)
    trainings[1] = replaced(group, trainings[1])
    assert [one.member.lacks_state for one in trainings] == [False, True, False]
    own = {k: one.gradient() for k, one in enumerate(trainings)}
    waiting = pool.submit(trainings[1].step)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    results = [*together(pool, [trainings[0], trainings[2]]), waiting.result(60)]
    expected = np.mean([own[0], own[2]], axis=0, dtype=np.float64).astype(np.float32)
    for result in results:
        assert (result.used, result.healed, result.late) == ((0, 2), (1,), ())
        np.testing.assert_array_equal(result.weights["g"], expected)
    assert len({one.bits() for one in trainings}) == 1
    assert trainings[1].steps[0] == 4
    together(pool, trainings)
    assert trainings[0].rounds[-1].used == (0, 1, 2)
    assert len({one.bits() for one in trainings}) == 1
    assert not trainings[1].member.lacks_state


def test_a_donor_that_raises_is_not_waited_for(pool: Any) -> None:
    group = LocalProcessGroup(3)
    trainings = begin(group)
    together(pool, trainings)
    trainings[2] = replaced(group, trainings[2])
    healing = pool.submit(trainings[2].step, timeout=60.0)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)

    def do_not_give() -> None:
        trainings[0].in_gather = lambda: None
        raise KeyError("a bug")

    trainings[0].in_gather = do_not_give
    first = pool.submit(trainings[0].step, timeout=60.0)
    group.until_asked(0)
    second = pool.submit(trainings[1].step, timeout=0.2)  # the shortest of all members' counts
    assert second.result(60).healed == (2,)
    assert isinstance(first.exception(60), KeyError)
    # It has not applied that average, and asks to be healed.
    trainings[0].member.lacks_state = True
    again = pool.submit(trainings[0].step, timeout=0.2)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 2)
    while not (healing.done() and again.done()):  # late requests are healed next time
        trainings[1].step(timeout=0.2)
    assert healing.result().used == (1,)
    for training in trainings:
        assert training.bits() == trainings[1].states[int(training.steps[0])]


def test_only_those_that_need_the_state_are_told_that_there_is_no_memory_for_it(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise MemoryError("no room")

    group = LocalProcessGroup(3)
    trainings = begin(group)
    together(pool, trainings)
    trainings[2] = replaced(group, trainings[2])
    healing = pool.submit(trainings[2].step)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    monkeypatch.setattr(group.group, "_copied", fail)
    together(pool, trainings[:2])
    with pytest.raises(RuntimeError, match="the state could not be copied: MemoryError: no room"):
        healing.result(60)
    monkeypatch.undo()
    healing = pool.submit(trainings[2].step)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    together(pool, trainings[:2])
    assert healing.result(60).healed == (2,)
    assert len({one.bits() for one in trainings}) == 1


def test_a_call_that_fails_for_want_of_members_with_the_state_says_who_waits(pool: Any) -> None:
    group = LocalProcessGroup(3)
    trainings = begin(group)
    together(pool, trainings)
    trainings[1:] = [replaced(group, one) for one in trainings[1:]]
    waiting = [pool.submit(one.step, min_results=2) for one in trainings[1:]]
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 2)
    text = r"expected 2 ranks, got 1: only a call that succeeds gives what \(1, 2\) wait for"
    with pytest.raises(WorkerError, match=text):
        trainings[0].step(min_results=2)
    trainings[0].member.leave()
    for one in waiting:
        with pytest.raises(WorkerError, match="go on from a checkpoint"):
            one.result(60)


class Critic:
    """A model that is its own state, and whose part has a name."""

    def __init__(self, value: float, name: str) -> None:
        self.value = np.full(3, value)
        self.layout = Layout.of({name: self.value})

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        self.layout.packed_views(buffer)[0][...] = self.value

    def scatter(self, buffer: NDArray[np.uint8]) -> None:
        self.value[...] = self.layout.packed_views(buffer)[0]

    def step(self, member: Member, **options: Any) -> Any:
        result = member.average([self.value], state=self, min_results=1, **options)
        self.value += result.weights[0]
        return result


@pytest.mark.parametrize("first", [False, True])
def test_states_in_lists_that_share_a_part_are_told_apart(pool: Any, first: bool) -> None:
    group = LocalProcessGroup(2)
    members = group.join_all()

    class Place:
        saves = 0

        def save(self) -> bytes:
            self.saves += 1
            return b""

        def restore(self, saved: bytes) -> None:
            assert saved == b""

    def states_of(values: tuple[float, float]) -> tuple[Place, list[list[Any]]]:
        place = Place()
        critics = [Critic(value, "w") for value in values]
        return place, [[place, one] if first else [one, place] for one in critics]

    places, states = zip(*(states_of((1.0, 2.0)) for _ in members), strict=True)

    def take_turns(rank: int) -> None:
        for _ in range(3):
            for state in states[rank]:
                members[rank].average({"g": np.zeros(1)}, min_results=1, state=state)

    for calls in [pool.submit(take_turns, rank) for rank in range(2)]:
        calls.result(60)
    assert places[0].saves == 2
    kill(members[1])
    group.wait_until(lambda inside: inside.rendezvous.sessions[1].why is not None)
    new = group.join(1)
    _, (own, _) = states_of((-1.0, -2.0))
    with pytest.raises(RuntimeError, match="several models of one layout take turns in this"):
        new.average({"g": np.zeros(1)}, min_results=1, state=own)


def test_a_member_is_never_healed_with_another_model_of_the_same_layout(pool: Any) -> None:
    group = LocalProcessGroup(2)
    members = group.join_all()
    critics = [[Critic(1.0, "w"), Critic(2.0, "w")] for _ in range(2)]

    def take_turns(rank: int) -> None:
        for _ in range(3):
            for critic in critics[rank]:
                critic.step(members[rank])

    for calls in [pool.submit(take_turns, rank) for rank in range(2)]:
        calls.result(60)
    kill(members[1])
    group.wait_until(lambda inside: inside.rendezvous.sessions[1].why is not None)
    critics[0][0].step(members[0])
    # It would get the state of the second critic.
    with pytest.raises(RuntimeError, match="several models of one layout take turns in this"):
        Critic(-1.0, "w").step(group.join(1))


@pytest.mark.parametrize("requests_first", [0, 1])
def test_a_member_that_got_another_model_before_that_was_noticed_raises(
    pool: Any, requests_first: int
) -> None:
    """It is one call off, so it would mix both models in every second call."""
    group = LocalProcessGroup(2)
    first, late = group.join_all()
    critics = [[Critic(1.0, "w"), Critic(1000.0, "w")] for _ in range(2)]
    for critic in critics[0]:  # the first cycle
        result = first.average_variables(critic, min_results=1, timeout=0.01)
        assert result.late == (1,)
    assert late.average_variables(critics[1][0], min_results=1).number == 2
    calls: dict[int, Future[Any]] = {}
    for rank in (requests_first, 1 - requests_first):
        member, critic = ((first, critics[0][0]), (late, critics[1][1]))[rank]
        calls[rank] = pool.submit(member.average_variables, critic, min_results=1)
        if not calls.keys() - {requests_first}:
            group.until_asked(rank)
    with pytest.raises(RuntimeError, match="rank 1 was late, or has joined again, and could be"):
        calls[1].result(60)
    late.leave()
    assert calls[0].result(60).used == (0,)
    assert critics[0][0].value[0] == 1.0


def test_objects_that_are_made_anew_for_each_call_take_no_turns() -> None:
    [member] = LocalProcessGroup(1).join_all()
    kept = []
    for k in range(6):
        critic = Critic(float(k), "w")
        if k < 3:  # several trainings, one after the other
            kept.append(critic)
        for _ in range(2):
            member.average_variables(critic, min_results=1, state=critic)
    assert not member._twins._twins


def test_variables_are_set_after_the_state_that_they_are_part_of(pool: Any) -> None:
    class Weights:
        def __init__(self, training: Training) -> None:
            self.training = training
            self.layout = Layout.of({"weights": training.weights})

        def gather_into(self, buffer: NDArray[np.uint8]) -> None:
            FlatWeights.wrap(buffer, self.layout)["weights"][...] = self.training.weights

        def scatter(self, buffer: NDArray[np.uint8]) -> None:
            self.training.weights[:] = FlatWeights.wrap(buffer, self.layout)["weights"]

    group = LocalProcessGroup(2)
    trainings = begin(group)
    together(pool, trainings)
    trainings[1] = replaced(group, trainings[1])

    def average(training: Training) -> Any:
        return training.member.average_variables(Weights(training), state=training)

    waiting = pool.submit(average, trainings[1])
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    average(trainings[0])
    assert waiting.result(60).healed == (1,)
    assert trainings[0].bits() == trainings[1].bits()


class Place:
    """A place in the data, whose saved bytes become longer and shorter."""

    def __init__(self, rank: int = 0) -> None:
        self.drawn = [rank]  # of a new process, which is to be healed
        self.saves = self.restores = 0
        self.breaks = False

    def draw(self) -> None:
        self.drawn = [] if len(self.drawn) == 3 else [*self.drawn, len(self.drawn) * 7]

    def save(self) -> bytes:
        self.saves += 1
        return bytes(self.drawn) * 31

    def restore(self, saved: bytes) -> None:
        if self.breaks:
            raise OSError("the data are gone")
        self.restores += 1
        self.drawn = [*saved[: len(saved) // 31]]


class InParts(Training):
    """A training whose state has several parts."""

    def __init__(self, member: Member, order: str) -> None:
        super().__init__(member)
        self.places = [Place(member.rank), Place(member.rank + 1)]
        known = {"training": self, "first": self.places[0], "second": self.places[1]}
        known["half"] = Training(member)
        self.half: Any = known["half"]
        parts = [known[name] for name in order.split()]
        self.state: Any = parts[0] if len(parts) == 1 else parts

    def step(self, **options: Any) -> Any:
        for place in self.places:
            place.draw()
        result = self.member.average({"g": self.gradient()}, state=self.state, min_results=1)
        self.momentum[:] = 0.9 * self.momentum + result.weights["g"]
        self.weights[:] = self.weights - 0.01 * self.momentum
        self.steps += 1
        self.rounds.append(result)
        return result


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("training first", marks=pytest.mark.slow),
        pytest.param("first training second", marks=pytest.mark.slow),
        "second half first training",
        "first",
        pytest.param("half training", marks=pytest.mark.slow),
    ],
)
def test_a_state_in_parts_heals_all_of_them(order: str, pool: Any) -> None:
    group = LocalProcessGroup(3)
    trainings = [InParts(member, order) for member in group.join_all()]
    for training in trainings:
        training.weights[:] = 1.0
        training.half.weights[:] = 2.0
    for _ in range(2):
        for victim in (1, 2):
            together(pool, trainings)
            kill(trainings[victim].member)
            group.wait_until(lambda inside, k=victim: inside.rendezvous.sessions[k].why is not None)
            trainings[victim] = InParts(group.join(victim), order)
            waiting = pool.submit(trainings[victim].step)
            group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
            others = [one for k, one in enumerate(trainings) if k != victim]
            result, *_ = [*together(pool, others), waiting.result(60)]
            assert result.healed == (victim,)
            donor, healed = trainings[0], trainings[victim]
            if "training" in order:
                assert donor.bits() == healed.bits()
            if "half" in order:
                assert donor.half.bits() == healed.half.bits()
            for name, one, other in zip(
                ("first", "second"), donor.places, healed.places, strict=True
            ):
                is_part = name in order
                assert other.restores == is_part, name
                assert not is_part or one.drawn == other.drawn, name
    # Saved once by the first call, and then for each of its two healings of a round.
    assert [one.saves for one in trainings[0].places] == [
        5 * (name in order) for name in ("first", "second")
    ]


def test_a_part_that_cannot_be_restored_is_healed_by_the_next_call(pool: Any) -> None:
    group = LocalProcessGroup(2)
    trainings: list[Any] = [InParts(member, "training first") for member in group.join_all()]
    together(pool, trainings)
    trainings[1].member.lacks_state = True
    trainings[1].places[0].breaks = True
    waiting = pool.submit(trainings[1].step)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    trainings[0].step()
    with pytest.raises(OSError, match="the data are gone"):
        waiting.result(60)
    assert trainings[1].member.lacks_state
    trainings[1].places[0].breaks = False
    waiting = pool.submit(trainings[1].step)
    group.wait_until(lambda inside: len(inside.calls.waiting.recovering) == 1)
    trainings[0].step()
    assert waiting.result(60).healed == (1,)
    assert trainings[0].places[0].drawn == trainings[1].places[0].drawn
    assert trainings[0].bits() == trainings[1].bits()


def test_a_state_of_other_kinds_is_refused_before_anything_is_averaged() -> None:
    (member,) = LocalProcessGroup(1).join_all()

    class OfText:
        def save(self) -> Any:
            return "text"

        def restore(self, saved: bytes) -> None: ...

    class Broken(OfText):
        def save(self) -> Any:
            raise OSError("no disk")

    part = {"x": np.zeros(1)}
    one = Place()
    cases: list[tuple[Any, type[Exception], str]] = [
        ([one, {}], TypeError, "state, part 1: expected an object with layout.* got a dict"),
        ({"place": one}, TypeError, "state: expected an object .* or one with save and restore"),
        ([], TypeError, "state: expected one or several objects, got none"),
        (Place, TypeError, "state: expected an object"),
        (OfText(), TypeError, r"state, part 0: expected bytes of OfText.save\(\), got str"),
        (Broken(), OSError, "no disk"),
    ]
    for state, error, text in cases:
        with pytest.raises(error, match=text):
            member.average(part, state=state)
    assert member.average(part, state=[one]).number == 1
    empty = Empty()
    assert member.average(part, state=[empty]).number == 2
    assert member.average(part, state=[empty, one]).number == 3


class Empty:
    """Variables of a model without weights."""

    layout = Layout([], [], [])

    def gather_into(self, buffer: NDArray[np.uint8]) -> None:
        assert buffer.size == 0

    scatter = gather_into


def test_members_whose_states_have_other_parts_are_told(pool: Any) -> None:
    members = LocalProcessGroup(2).join_all()
    states: list[Any] = [[Place()], [Place(), Place()]]
    calls = [
        pool.submit(member.average, {"x": np.zeros(1)}, state=state)
        for member, state in zip(members, states, strict=True)
    ]
    for call in calls:
        with pytest.raises(CallsDifferError, match="state of layout"):
            call.result(60)
