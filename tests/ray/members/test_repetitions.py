"""Calls that members repeat, which are made in C++, and what breaks a series of them off.

No Ray is started: the coordinator and the members are threads, with channels between them.
"""

import contextlib
import logging
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from held import Held
from process_groups import LocalProcessGroup, kill
from python_calls import functions_in
from reference import same_bits

import flatweights as fw
from flatweights import _core
from flatweights.ray import MemberError, WorkerError
from flatweights.ray.members._client import ChannelClient
from flatweights.ray.members._member import Member
from flatweights.ray.members._repetitions import Ending, Series
from flatweights.ray.results._report import METRICS
from flatweights.ray.results._round import Round

PATIENCE = 60.0

Act = Callable[[Member], Any]


class Watched(LocalProcessGroup):
    """A process group that counts calls that were made in C++, and notes why series have ended."""

    all: ClassVar[list["Watched"]] = []

    def __init__(self, size: int, **config: Any) -> None:
        super().__init__(size, **config)
        self._made = 0
        self.endings: set[str] = set()
        self.watch_series(self._note)
        self.members = self.join_all()
        self.all.append(self)

    def _note(self, series: Series) -> None:
        self._made += series.calls
        self.endings.add(series.ending.name)

    def end(self) -> None:
        """Drop the members, with which the coordinator ends."""
        for member in self.members:
            member._break_off("the test is over")
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    @property
    def made(self) -> int:
        """The calls that were made in C++, with those of a series that is not over."""
        self.wait_until(lambda _: True)
        return self._made


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End the process groups of a test: their threads would look around in other tests, too."""
    yield
    while Watched.all:
        Watched.all.pop().end()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def all_of(threads: ThreadPoolExecutor, members: list[Member], act: Act) -> list[Any]:
    calls: list[Future[Any]] = [threads.submit(act, member) for member in members]
    return [call.result(PATIENCE) for call in calls]


def models_of(rank: int, step: int) -> dict[str, Any]:
    """Return the parts of a model that no other rank has at another step."""
    drawn = np.random.default_rng([rank, step])
    return {
        "double": drawn.normal(size=(5, 3)),
        "single": drawn.normal(size=70).astype(np.float32),
        "half": drawn.normal(size=9).astype(np.float16),
        "steps": np.array([step + 100 * rank]),
        "complex": (drawn.normal(size=4) + 1j).astype(np.complex64),
    }


def weight_of(rank: int, step: int) -> float:
    return 1.0 if step % 3 else 1.0 + rank


@pytest.mark.parametrize(
    ("options", "is_in_place"),
    [({"timeout": 30.0, "min_results": 2}, False), ({}, True)],
)
def test_series_of_calls_have_the_bits_of_an_average(
    threads: ThreadPoolExecutor, options: dict[str, Any], is_in_place: bool
) -> None:
    group = Watched(3)

    def train(member: Member) -> list[tuple[Any, Round]]:
        variables = Held(**models_of(0, 0))
        rounds: list[tuple[Any, Round]] = []
        for step in range(40):
            model, weight = models_of(member.rank, step), weight_of(member.rank, step)
            if is_in_place:
                for name, array in variables.arrays.items():
                    array[...] = model[name]
                result = member.average_variables(variables, weight, **options)
                mean = {name: array.copy() for name, array in variables.arrays.items()}
            else:
                result = member.average(model, weight, **options)
                mean = result.weights
            rounds.append((mean, result))
        return rounds

    told = all_of(threads, group.members, train)
    for step in range(40):
        models = [models_of(rank, step) for rank in range(3)]
        expected = fw.average(models, [weight_of(rank, step) for rank in range(3)])
        for rounds in told:
            mean, result = rounds[step]
            assert all(same_bits(mean[name], expected[name]) for name in expected)
            assert result.number == step + 1
            assert result.used == (0, 1, 2)
            assert result.transports == dict.fromkeys(range(3), "shm")
            assert [*result.seconds] == ["wait", "average"]
            assert min(result.seconds.values()) >= 0.0
            assert result.nbytes == 3 * fw.Layout.of(expected).nbytes
    assert group.made >= 30


def test_kinds_of_calls_take_turns(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)

    def act(member: Member) -> list[Any]:
        actor, critic = Held(actor=np.zeros(50)), Held(critic=np.zeros(7))
        got: list[Any] = []
        for step in range(24):
            actor.arrays["actor"][:] = step + member.rank
            critic.arrays["critic"][:] = 10.0 * step + member.rank
            first = member.average_variables(actor).number
            sent = Held(sent=np.full(3, float(step + member.rank)))
            member.broadcast_variables(sent, 1)
            if step % 8 == 5:
                member.all_gather(step)
            last = member.average_variables(critic).number
            values = [actor.arrays["actor"][0], sent.arrays["sent"][0], critic.arrays["critic"][0]]
            got.append((first, last, *values))
        return got

    first, second = all_of(threads, group.members, act)
    assert first == second
    number = 0
    for step, (before, after, *values) in enumerate(first):
        assert before == number + 1
        number += 4 if step % 8 == 5 else 3
        assert after == number
        assert values == [step + 0.5, step + 1.0, 10.0 * step + 0.5]
    assert group.made >= 40


def test_a_call_that_is_repeated_enters_few_functions_of_python(
    threads: ThreadPoolExecutor,
) -> None:
    group = Watched(2)

    def act(member: Member) -> list[list[str]]:
        variables = Held(weights=np.full(50, float(member.rank)))
        return [functions_in(lambda: member.average_variables(variables)) for _ in range(20)]

    for entered in all_of(threads, group.members, act):
        own = [name for name in entered[-1] if not name.startswith(("Held.", "Layout."))]
        assert len(own) <= 7, own  # eight more for a `TensorFlowVariables`


def average_in_turns(member: Member, kinds: list[Held], steps: int) -> None:
    """Average each of ``kinds`` in each step, with another member, and check the means."""
    for step in range(steps):
        for kind, variables in enumerate(kinds):
            (array,) = variables.arrays.values()
            array[:] = 100.0 * kind + step + member.rank
            member.average_variables(variables)
            assert (array == 100.0 * kind + step + 0.5).all()


def test_many_small_kinds_of_calls_share_segments(threads: ThreadPoolExecutor) -> None:
    """As the moments of many layers, and of a few large models, in each step."""
    group = Watched(2)
    sizes = [*range(3, 43), *range(40_000, 40_012)]

    def act(member: Member) -> None:
        kinds = [Held(**{f"of {size}": np.zeros(size)}) for size in sizes]
        average_in_turns(member, kinds, 5)

    all_of(threads, group.members, act)
    assert group.made >= 2 * 48


def test_models_with_nan_break_a_series_off(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)

    def act(member: Member) -> list[str]:
        told = []
        for step in range(20):
            not_finite = step in (9, 10) and member.rank == 1
            model = [np.array([np.nan if not_finite else float(step)])]
            try:
                told.append(str(member.average(model).weights[0][0]))
            except ValueError as error:
                told.append(str(error))
            skipped = member.average(model, nonfinite="skip", min_results=1)
            assert skipped.used == ((0,) if step in (9, 10) else (0, 1))
            assert skipped.weights[0][0] == step
        return told

    first, second = all_of(threads, group.members, act)
    assert first == second
    assert [text for text in first if "rank 1, slot 0" in text] == first[9:11]
    assert first[11:] == [str(float(step)) for step in range(11, 20)]


@pytest.mark.parametrize("min_results", [None, 1])
def test_a_member_that_dies_in_a_series_is_left_out(
    threads: ThreadPoolExecutor, min_results: int | None
) -> None:
    group = Watched(3)

    def average(member: Member, times: int = 10) -> list[tuple[int, ...]]:
        model = {"w": np.full(20, float(member.rank))}
        rounds = [member.average(model, min_results=min_results) for _ in range(times)]
        assert all(round.weights["w"][0] == np.mean(round.used) for round in rounds)
        return [round.used for round in rounds]

    assert all_of(threads, group.members, average) == [[(0, 1, 2)] * 10] * 3
    kill(group.members[2])
    if min_results is None:
        for call in [threads.submit(average, member) for member in group.members[:2]]:
            with pytest.raises(WorkerError, match="rank 2"):
                call.result(PATIENCE)
    else:
        assert all_of(threads, group.members[:2], average) == [[(0, 1)] * 10] * 2
    made = group.made
    assert made >= 7
    replacement = group.join(2)

    def go_on(member: Member) -> list[tuple[int, ...]]:
        used: list[tuple[int, ...]] = []
        while member is replacement or not used or 2 in member.ranks:
            used += average(member, 1)
            if member is replacement and used.count((0, 1, 2)) == 20:
                member.leave()
                break
        return used

    for used in all_of(threads, [*group.members[:2], replacement], go_on):
        assert used.count((0, 1, 2)) >= 19  # the first may have been made without the newcomer
    assert group.made >= made + 10


@pytest.mark.parametrize("min_results", [None, 1])
def test_a_member_that_joins_and_dies_between_two_repetitions_is_named(
    threads: ThreadPoolExecutor, min_results: int | None
) -> None:
    """Its only call gets an earlier average, so the other's calls are never made with it."""
    group = LocalProcessGroup(2, min_size=1, grace=0.0)
    made: list[Series] = []
    group.watch_series(made.append)
    first = group.join(0)
    options: dict[str, Any] = {"min_results": min_results, "timeout": PATIENCE}
    first.average({"other": np.ones(5)}, **options)
    for _ in range(9):
        first.average({"w": np.ones(3)}, **options)
    group.last_call()
    assert sum(series.calls for series in made) > 0
    second = group.join(1)
    assert second.average({"other": np.ones(5)}, **options).number == 1
    kill(second)
    group.wait_until(lambda own: len(own.rendezvous.present) == 1)
    call = threads.submit(lambda: first.average({"w": np.ones(3)}, **options))
    if min_results is None:
        with pytest.raises(WorkerError, match="rank 1"):
            call.result(PATIENCE)
    else:
        assert [*call.result(PATIENCE).failed] == [1]
    first._break_off("the test is over")
    group.thread.join(PATIENCE)


def test_a_late_member_in_a_series_is_told_so(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)
    is_late, may_go_on = threading.Event(), threading.Event()

    def act(member: Member) -> list[Round]:
        rounds = []
        for step in range(20):
            if member.rank == 1 and step == 10:
                is_late.set()
                assert may_go_on.wait(PATIENCE)
            model = Held(w=np.full(4, float(member.rank)))
            rounds.append(member.average_variables(model, timeout=0.2, min_results=1))
            if member.rank == 0 and step == 10:
                may_go_on.set()
        return rounds

    begin = time.monotonic()
    first, second = all_of(threads, group.members, act)
    assert is_late.is_set()
    assert first[10].late == second[10].late == (1,)
    assert first[10].used == (0,)
    assert first[10].seconds["wait"] == pytest.approx(0.2, abs=0.1)
    assert [round.used for round in first[:10]] == [(0, 1)] * 10
    assert "LATE" in group.endings
    assert time.monotonic() - begin < PATIENCE


def test_a_call_of_its_own_is_found_in_a_series(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)

    def act(member: Member) -> str:
        for _ in range(8):
            member.average(np.zeros(3))
        if member.rank == 0:
            member.average(np.zeros(3))
            return "averaged"
        member.average(np.zeros(4))
        return "averaged"

    calls = [threads.submit(act, member) for member in group.members]
    for call in calls:
        with pytest.raises(fw.ray.CallsDifferError, match="expected the same call"):
            call.result(PATIENCE)

    def go_on(member: Member) -> float:
        model = np.full(3, 2.0 * member.rank)
        return float([member.average(model) for _ in range(5)][-1].weights[0])

    assert all_of(threads, group.members, go_on) == [1.0, 1.0]


def test_a_coordinator_that_does_not_know_a_number_requests_for_the_whole(
    threads: ThreadPoolExecutor,
) -> None:
    """As after an interrupt that kept the member from learning a later number."""
    group = Watched(2)

    def act(member: Member) -> list[float]:
        coordinator = member._coordinator
        assert isinstance(coordinator, ChannelClient)
        means = []
        for step in range(12):
            if member.rank == 1 and step == 6:
                for known in coordinator._prepared.values():
                    known.response = known.response._replace(prepared=123456)
            mean = member.average(np.array([float(step + member.rank)])).weights
            means.append(float(mean[0]))
        return means

    assert all_of(threads, group.members, act) == [[step + 0.5 for step in range(12)]] * 2


def test_a_segment_that_is_held_is_not_written(threads: ThreadPoolExecutor) -> None:
    """A member that keeps the other's segment, or whose segment that keeps, gets another."""
    group = Watched(2)

    def act(member: Member) -> None:
        coordinator = member._coordinator
        assert isinstance(coordinator, ChannelClient)
        variables = Held(w=np.zeros(30))
        for step in range(30):
            variables.arrays["w"][:] = step + member.rank
            if step in (10, 20):
                coordinator._channel.mailbox.add_hold(step == 10, 0)
                coordinator._channel.mailbox.add_hold(step == 10, 1)
            member.average_variables(variables)
            assert variables.arrays["w"][0] == step + 0.5
            if step in (14, 24):
                coordinator._channel.mailbox.drop_hold(step == 14, 0)
                coordinator._channel.mailbox.drop_hold(step == 14, 1)

    all_of(threads, group.members, act)


def test_the_memory_that_a_coordinator_still_reads_is_left_alone() -> None:
    """As that of a state that it copies for a healed member, while the donor goes on."""
    (member,) = Watched(1).members
    variables = Held(w=np.full(30, 1.0))
    for _ in range(6):
        member.average_variables(variables)
    (again,) = member._again.values()
    assert again is not None
    memory, held = again.shortcut.memory, [(side, k) for side in (False, True) for k in range(2)]
    assert memory is not None
    before = memory.tobytes()
    variables.arrays["w"][:] = 7.0
    coordinator = member._coordinator
    assert isinstance(coordinator, ChannelClient)
    mailbox = coordinator._channel.mailbox
    for one in held:
        mailbox.add_hold(*one)
    member.average_variables(variables)
    assert memory.tobytes() == before
    assert (variables.arrays["w"] == 7.0).all()
    for one in held:
        mailbox.drop_hold(*one)


def test_an_interrupt_in_a_repeated_call_ends_the_member(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)
    variables = [Held(w=np.full(5, float(rank))) for rank in range(2)]

    def average(member: Member) -> None:
        for _ in range(8):
            member.average_variables(variables[member.rank], min_results=1)

    all_of(threads, group.members, average)
    assert group.made >= 5
    other, member = group.members
    main = threading.main_thread().ident or 0

    def interrupt() -> None:
        group.until_asked(1)
        signal.pthread_kill(main, signal.SIGINT)

    interrupted = threads.submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        member.average_variables(variables[1], min_results=1)
    with pytest.raises(MemberError, match="broken off by KeyboardInterrupt"):
        member.average_variables(variables[1], min_results=1)
    interrupted.result(PATIENCE)
    # What was sent counts if the coordinator takes it before it hears of the end.
    assert other.average_variables(variables[0], min_results=1).used in ((0,), (0, 1))
    assert other.average_variables(variables[0], min_results=1).used == (0,)


def test_a_member_is_healed_in_a_series(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)

    def act(member: Member) -> list[Round]:
        state, gradient = Held(state=np.zeros(4)), Held(gradient=np.zeros(6))
        rounds = []
        for step in range(20):
            if step == 10 and member.rank == 1:
                member.lacks_state = True
                state.arrays["state"][:] = -1.0
            gradient.arrays["gradient"][:] = step + member.rank
            rounds.append(member.average_variables(gradient, state=state))
            state.arrays["state"] += gradient.arrays["gradient"][0]
            mean = step if step == 10 else step + 0.5
            assert gradient.arrays["gradient"][0] == mean
        assert state.arrays["state"][0] == sum(step + 0.5 for step in range(20)) - 0.5
        return rounds

    for rounds in all_of(threads, group.members, act):
        assert [round.healed for round in rounds] == [() if k != 10 else (1,) for k in range(20)]
        assert rounds[10].used == (0,)


def test_models_of_one_layout_that_take_turns_are_noticed(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    group = Watched(2)

    def act(member: Member) -> None:
        models = [Held(w=np.full(3, float(member.rank + k))) for k in range(2)]
        for step in range(16):
            model = models[step % 2 if step >= 8 else 0]
            member.average_variables(model)

    all_of(threads, group.members, act)
    assert "several models of one layout take turns" in caplog.text


def test_time_begins_with_the_first_request_after_a_death(threads: ThreadPoolExecutor) -> None:
    """In a series members ring no bell, and the coordinator has just stopped to look by itself."""
    group = Watched(4)
    may_call = threading.Event()

    def average(member: Member) -> Round:
        model = np.full(3, float(member.rank))
        return [member.average(model, timeout=0.1, min_results=1) for _ in range(8)][-1]

    all_of(threads, group.members, average)
    assert group.made >= 5
    kill(group.members[3])
    group.wait_until(lambda group: len(group.rendezvous.present) == 3)

    def call(member: Member) -> Round:
        if member.rank:
            assert may_call.wait(PATIENCE)
        result = member.average(np.full(3, float(member.rank)), timeout=0.1, min_results=1)
        may_call.set()
        return result

    first, *_ = all_of(threads, group.members[:3], call)
    assert first.used == (0,)
    assert first.late == (1, 2)
    assert first.seconds["wait"] < 0.9  # the coordinator looks every second in any case


def test_a_series_is_logged_and_counted(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(METRICS, "add", lambda *args: counted.append(args))
    group = Watched(2)
    with caplog.at_level(logging.INFO, "flatweights"):
        for _ in range(20):
            all_of(threads, group.members, lambda member: member.average(np.zeros(8)))
        averages = group.made
        assert averages >= 15
        for _ in range(20):  # not counted, as broadcasts that are not repeated
            all_of(threads, group.members, lambda member: member.broadcast(np.zeros(8)))
        assert group.made >= averages + 15
    lines = [record.getMessage() for record in caplog.records if "as before" in record.message]
    assert sum(int(line.split()[3]) for line in lines) == averages
    rounds = sum(args[0].get(("rounds", "", ""), 0) for args in counted if len(args) == 4)
    assert rounds == averages
    nbytes = sum(args[0].get(("bytes", "direction", "in"), 0) for args in counted if len(args) == 4)
    assert nbytes == averages * 2 * 64


@pytest.mark.parametrize(("is_model", "most"), [(False, 28), (True, 66)])
def test_a_repeated_call_enters_few_functions(
    threads: ThreadPoolExecutor, is_model: bool, most: int
) -> None:
    """Ten of the functions are those of `Held` itself."""
    group = Watched(2)

    def act(member: Member) -> int:
        variables, model = Held(w=np.zeros(8)), fw.FlatWeights({"w": np.zeros(8)})

        def average() -> None:
            if is_model:
                member.average(model, out=model)
            else:
                member.average_variables(variables)

        for _ in range(10):
            average()
        entered: list[str] = []

        def note(_frame: Any, event: str, _arg: Any) -> None:
            if event in ("call", "c_call"):
                entered.append(event)

        sys.setprofile(note)
        try:
            average()
        finally:
            sys.setprofile(None)
        return len(entered)

    counts = all_of(threads, group.members, act)
    assert max(counts) <= most, counts


@pytest.mark.parametrize("is_model", [False, True])
def test_broadcasts_from_any_root_are_repeated(threads: ThreadPoolExecutor, is_model: bool) -> None:
    group = Watched(3)

    def act(member: Member) -> int:
        variables = Held(w=np.zeros(5), steps=np.zeros(2, np.int64))
        entered: list[str] = []

        def note(_frame: Any, event: str, _arg: Any) -> None:
            if event == "call":
                entered.append(event)

        for step in range(60):
            root = step // 3 % 3 if step < 30 else 1
            own = 100.0 * step + member.rank
            variables.arrays["w"][:] = own
            variables.arrays["steps"][:] = own
            sys.setprofile(note if step == 59 else None)
            try:
                if is_model:
                    result = member.broadcast(variables.arrays, root)
                else:
                    told = member.broadcast_variables(variables, root)
                    result = variables.arrays
                    assert told.used == (root,)
                    assert told.number == step + 1
            finally:
                sys.setprofile(None)
            for name, array in result.items():
                assert (array == 100 * step + root).all(), (step, name)
            assert not is_model or variables.arrays["w"][0] == own
        return len(entered)

    counts = all_of(threads, group.members, act)
    assert group.made >= 50
    if not is_model:
        assert max(counts) <= 25, counts


def test_a_root_that_is_late_for_a_repeated_broadcast_sends_it(
    threads: ThreadPoolExecutor,
) -> None:
    group = Watched(2)
    is_waiting = threading.Event()

    def act(member: Member) -> list[float]:
        variables, told = Held(w=np.zeros(4)), []
        for step in range(20):
            variables.arrays["w"][:] = 10.0 * step + member.rank
            if member.rank == 1 and step == 10:
                assert is_waiting.wait(PATIENCE)
                time.sleep(0.4)  # longer than a member waits in C++
            elif step == 10:
                is_waiting.set()
            member.broadcast_variables(variables, 1)
            told.append(float(variables.arrays["w"][0]))
        return told

    assert all_of(threads, group.members, act) == [[10.0 * step + 1 for step in range(20)]] * 2


def test_models_of_any_kind_and_their_results_take_turns(threads: ThreadPoolExecutor) -> None:
    """A call is recognised by its layout, which several models and results share."""
    group = Watched(2)

    def act(member: Member) -> None:
        flat = fw.FlatWeights({"w": np.zeros(3), "b": np.zeros(2)})
        others = [fw.FlatWeights.empty(flat.layout) for _ in range(2)]
        for step in range(48):
            mean = step + 0.5
            flat.buffer.view(np.float64)[:] = step + member.rank
            out = [None, flat, *others][step % 4]
            result = member.average(flat, out=out).weights
            assert out is None or result is out
            assert out is flat or (flat["w"] == step + member.rank).all()
            assert (result["w"] == mean).all()
            assert (result["b"] == mean).all()
            assert result["w"].flags.writeable == (out is not None)
            parts = {name: array.copy() for name, array in flat.items()}
            again = member.average(parts).weights
            assert type(again) is dict
            assert all(same_bits(again[name], parts[name]) for name in parts) == (out is flat)
            vector = np.full(5, mean)
            assert member.average(vector, out=vector).weights is vector
            strided = np.full(10, 1.0 + step + 2 * member.rank)[::2]
            assert (member.average(strided).weights == 2.0 + step).all()

    all_of(threads, group.members, act)
    assert group.made >= 4 * 40


def test_a_weight_that_changes_in_place_counts(threads: ThreadPoolExecutor) -> None:
    group = Watched(2)

    def act(member: Member) -> list[float]:
        variables, weight, means = Held(w=np.zeros(4)), np.array(1.0), []
        for step in range(8):
            weight[...] = 1.0 + step * member.rank
            variables.arrays["w"][:] = member.rank
            member.average_variables(variables, weight)  # type: ignore[arg-type]
            means.append(float(variables.arrays["w"][0]))
        return means

    expected = [float(fw.average([[0.0], [1.0]], [1.0, 1.0 + step])[0]) for step in range(8)]
    assert all_of(threads, group.members, act) == [expected] * 2


def test_a_weight_that_is_no_number_is_refused_in_a_repeated_call_too() -> None:
    (member,) = Watched(1).members
    variables = Held(w=np.zeros(4))
    for _ in range(4):
        member.average_variables(variables, np.float32(2.5))
    with pytest.raises(TypeError, match="weight"):
        member.average_variables(variables, np.ones(3))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        member.average_variables(variables, 1e300)


def test_a_call_that_waits_is_repeated_after_many_others(threads: ThreadPoolExecutor) -> None:
    """So many that the member has forgotten the number of the call, except in its shortcut."""
    group = Watched(2)
    is_alone = threading.Event()

    def act(member: Member) -> list[tuple[float, tuple[int, ...]]]:
        variables, told = Held(w=np.zeros(4)), []
        for step in range(8):
            if step == 6:
                for kind in range(300):
                    member.average({f"kind {kind}": np.zeros(3)})
            if step == 7 and member.rank:
                assert is_alone.wait(PATIENCE)
            elif step == 7:
                channel: Any = member._coordinator._channel  # type: ignore[attr-defined]
                response = channel.response

                def waits(*args: Any, response: Any = response) -> Any:  # after the shortcut
                    is_alone.set()
                    return response(*args)

                channel.response = waits
            variables.arrays["w"][:] = step + member.rank
            used = member.average_variables(variables).used
            told.append((float(variables.arrays["w"][0]), used))
        return told

    expected = [(step + 0.5, (0, 1)) for step in range(8)]
    assert all_of(threads, group.members, act) == [expected] * 2


class Signalling(Held):
    """Variables that send this process a signal while they are looked at."""

    is_due = False

    def __getattribute__(self, name: str) -> Any:
        if name == "layout" and self.is_due:
            self.is_due = False
            signal.raise_signal(signal.SIGUSR1)
        return super().__getattribute__(name)


def test_a_signal_handler_in_a_repeated_call_cannot_make_another(
    threads: ThreadPoolExecutor,
) -> None:
    group = Watched(1)
    (member,) = group.members
    variables = Signalling(w=np.zeros(3))
    for _ in range(8):
        member.average_variables(variables)
    assert group.made >= 5
    told: list[str] = []

    def handle(*_: Any) -> None:
        try:
            member.average_variables(variables)
        except RuntimeError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        variables.is_due = True
        assert member.average_variables(variables).used == (0,)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ["this thread is in a call of the member already" in text for text in told] == [True]


def test_small_kinds_beyond_the_shared_segments_leave_segments_to_others(
    threads: ThreadPoolExecutor,
) -> None:
    """As in a program whose phases have layers of their own."""
    group = Watched(2)

    def act(member: Member) -> None:
        for phase in range(6):
            names = [f"phase {phase}, layer {k}" for k in range(20)]
            kinds = [Held(**{name: np.zeros(2040)}) for name in names]
            for step in range(4):
                for variables in kinds:
                    (array,) = variables.arrays.values()
                    array[:] = step + member.rank
                    member.average_variables(variables)
                    assert (array == step + 0.5).all()

    all_of(threads, group.members, act)


def test_a_step_may_repeat_more_than_a_hundred_kinds(threads: ThreadPoolExecutor) -> None:
    """As the moments, and their gradients, of a ResNet's layers."""
    group = Watched(2)

    def act(member: Member) -> None:
        kinds = [Held(**{f"layer {k}": np.zeros(8)}) for k in range(110)]
        average_in_turns(member, kinds, 4)

    all_of(threads, group.members, act)
    assert group.made >= 110


def test_a_call_is_late_by_the_timeout_of_a_member_that_has_asked() -> None:
    layout = fw.Layout(["w"], [(4,)], [np.float32])
    boxes, bell, poll = [_core.Mailbox() for _ in range(3)], _core.Doorbell(), select.epoll()
    results = [(k, 1, 0, layout.new_buffer()) for k in range(2)]
    for box in boxes:
        box.post(b"", 0)
    for box in boxes[:2]:  # the third member does not ask
        box.enter(1)
        assert box.wait(0.0, 1)
        asks = _core.RepeatedRequest(box, bell, {}, 1, 64, None, None)
        assert asks.exchange(1.0, 0.0) is False
    calls = _core.RepeatedCalls(boxes, [{}, {}, {}])
    calls.prepare(1, layout.core, results, None, False, [None, 0.01, None])
    with contextlib.closing(poll):
        poll.register(bell.fileno(), select.EPOLLIN)
        ending, made, *_ = calls.run(0, 5.0, bell, poll.fileno(), [0.0, 0.0, 0.0])
    assert (Ending(ending), made) == (Ending.LATE, 0)
