"""Averages that stay on a GPU, by a stand-in for NVIDIA's driver, and on a GPU where there is one.

What only the stand-in has tried is not known to work on a GPU.
"""

import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import pytest
from gpu_members import Members, weights_of
from gpu_processes import REAL, GPUProcess, shared_stand_in
from gpus import shown_gpus
from reference import same_bits

import flatweights
from flatweights.ray.channels._gpu_segments import MOST

CALL = "called = member.average_variables(held{}); result = called.used, called.transports"
HOLD = "held = Holder(weights_of(10 * {call} + rank), uuid)\n"
READ = "result = {name: np.array(part) for name, part in held.weights.items()}"

Start = Callable[..., Members]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shared_stand_in(tmp_path_factory)


@pytest.fixture(scope="module")
def idle() -> Iterator[dict[str, list[GPUProcess]]]:
    """Processes of earlier tests, by library: new ones take longer than most tests."""
    processes: dict[str, list[GPUProcess]] = {}
    yield processes
    for one in itertools.chain(*processes.values()):
        one.close()


@pytest.fixture(params=["stand-in", "GPU"])
def start(request: pytest.FixtureRequest, idle: dict[str, list[GPUProcess]]) -> Iterator[Start]:
    """Start members of a process group."""
    if request.param == "stand-in":
        library = request.getfixturevalue("stand_in")
    elif shown_gpus() == 0:
        pytest.skip("there is no GPU, or it is hidden")
    else:
        library = REAL
    started: list[Members] = []

    free = idle.setdefault(library, [])

    def begin(size: int) -> Members:
        started.append(Members(library, size, free))
        return started[-1]

    try:
        yield begin
        for members in started:
            free += members.release()
    except BaseException:
        for members in started:
            members.close()
        raise


def expect(
    members: Members, call: int, used: tuple[int, ...], way: str, arguments: str = ""
) -> None:
    """Make a call of all members, and fail unless they have the mean of the ranks ``used``."""
    responses = members.run(HOLD.format(call=call) + CALL.format(arguments))
    for rank, (got, ways) in responses.items():
        assert got == used, (rank, got)
        assert {ways[k] for k in used} == {way}, (rank, ways)
    check_mean(members, call, used)


def test_weights_stay_after_the_first_call_and_have_the_bits_of_the_host(
    start: Start,
) -> None:
    members = start(3)
    expect(members, 0, (0, 1, 2), "shm")
    for call in range(1, 6):
        expect(members, call, (0, 1, 2), "gpu")
    weighted = ", weight=0.25 * 2.0**rank"
    members.run(HOLD.format(call=7) + CALL.format(weighted))
    mean = flatweights.average([weights_of(70 + rank) for rank in range(3)], [0.25, 0.5, 1.0])
    for weights in members.run(READ).values():
        assert all(same_bits(weights[name], np.asarray(part)) for name, part in mean.items())


def test_weights_of_a_root_are_read_where_they_are(start: Start) -> None:
    members = start(3)
    for call, way in enumerate(["shm", "gpu", "gpu", "gpu", "gpu", "gpu"]):
        program = "called = member.broadcast_variables(held, root=1); result = called.transports"
        ways = members.run(HOLD.format(call=call) + program)
        assert {one[1] for one in ways.values()} == {way}
        for weights in members.run(READ).values():
            root = weights_of(10 * call + 1)
            assert all(same_bits(weights[name], np.asarray(root[name])) for name in root)


def test_models_take_turns(start: Start) -> None:
    members = start(2)
    for call in range(4):
        for large, name in ((9_001, "a"), (5, "b"), (200, "c"), (1_500, "d")):
            program = (
                f"held = Holder(weights_of(10 * {call} + rank, {large}), uuid)\n"
                f"named = {{'{name}' + k: v for k, v in held.weights.items()}}\n"
                "held.weights = FlatWeights(named)\n"
                "held.layout = held.weights.layout\n"
            )
            ways = members.run(program + CALL.format("") + "\n")
            assert {one[1][0] for one in ways.values()} == {"gpu" if call else "shm"}
            mean = flatweights.average([weights_of(10 * call + k, large) for k in range(2)])
            for weights in members.run(READ).values():
                assert all(same_bits(weights[name + k], np.asarray(mean[k])) for k in mean)


def test_nan_is_named_or_left_out_as_on_the_host(start: Start) -> None:
    members = start(3)
    spoil = "if rank == 1: held.weights['float32'][3] = np.nan\n"
    for call in range(3):
        expect(members, call, (0, 1, 2), "gpu" if call else "shm")
        program = HOLD.format(call=call) + spoil
        program += (
            "try: member.average_variables(held)\nexcept ValueError as error: result = str(error)"
        )
        for text in members.run(program).values():
            assert "rank 1, slot 0 'float32'" in text
    expect(members, 3, (0, 1, 2), "gpu")
    skip = ", nonfinite='skip'"
    for call in range(2):
        responses = members.run(HOLD.format(call=call) + spoil + CALL.format(skip))
        assert {used for used, _ in responses.values()} == {(0, 2)}
    propagate = ", nonfinite='propagate'"
    for way in ("shm", "gpu"):
        responses = members.run(HOLD.format(call=5) + spoil + CALL.format(propagate))
        assert {ways[0] for _, ways in responses.values()} <= {way, "gpu"}
        for weights in members.run(READ).values():
            assert np.isnan(weights["float32"][3])
            assert np.isfinite(weights["float32"][4:]).all()


def check_mean(members: Members, call: int, used: tuple[int, ...], *ranks: int) -> None:
    """Fail unless ``ranks``, or all, have the mean of the ranks ``used``."""
    mean = flatweights.average([weights_of(10 * call + rank) for rank in used])
    for rank, weights in members.run(READ, *ranks).items():
        for name, part in mean.items():
            assert same_bits(weights[name], np.asarray(part)), (rank, name)


@pytest.mark.parametrize(
    "point",
    [
        "told",
        "reducing",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("asking", "asked", "reduced")),
    ],
)
def test_a_member_that_is_killed_leaves_the_others_right(start: Start, point: str) -> None:
    members = start(3)
    few = ", min_results=1"
    for call in range(3):
        expect(members, call, (0, 1, 2), "gpu" if call else "shm", few)
    if point in ("reducing", "reduced"):  # whoever averages
        members.run(f"die_at({point!r})")
    else:
        members.run(f"die_at({point!r})", 1)
    running = members.begin(HOLD.format(call=4) + CALL.format(few))
    responses = {}
    for rank, future in running.items():
        try:
            responses[rank] = future.result()
        except EOFError:
            killed = members.processes.pop(rank)
            killed.kill()
            killed.close()
    rest = tuple(responses)
    assert len(rest) == 2
    members.run("die_at('nowhere')")
    (used,) = {used for used, _ in responses.values()}
    assert used in (rest, (0, 1, 2))  # its request may have been there
    check_mean(members, 4, used)
    expect(members, 5, rest, "gpu", few)
    (rank,) = {0, 1, 2} - {*rest}
    members.join(rank)
    response = members.run(HOLD.format(call=6) + CALL.format(few), rank)[rank]
    assert rank not in response[0]  # it gets the latest average, on the GPU
    check_mean(members, 5, rest, rank)
    for call in range(7, 11):
        members.run(HOLD.format(call=call) + CALL.format(few))
    expect(members, 11, (0, 1, 2), "gpu", few)


def test_a_rank_that_stops_while_it_averages_costs_its_patience_alone(start: Start) -> None:
    members = start(3)
    few = ", min_results=1, timeout=1.0"
    for call in range(2):
        expect(members, call, (0, 1, 2), "gpu" if call else "shm", few)
    members.run("stop_at('reducing')")
    running = members.begin(HOLD.format(call=2) + CALL.format(few))
    done, _ = wait(running.values(), return_when=FIRST_COMPLETED)
    rest = next(iter(done)).result()[0]
    assert len(rest) == 2
    (stopped,) = {0, 1, 2} - {*rest}
    assert {running[rank].result()[0] for rank in rest} == {rest}
    check_mean(members, 2, rest, *rest)
    os.kill(members.processes[stopped].process.pid, signal.SIGCONT)
    assert running[stopped].result()[0] == rest  # late: the response of the others
    check_mean(members, 2, rest)
    members.run("die_at('nowhere')")
    for call in range(3, 6):
        members.run(HOLD.format(call=call) + CALL.format(few))
    expect(members, 6, (0, 1, 2), "gpu", few)


def test_a_late_member_reads_the_average_that_it_missed(start: Start) -> None:
    members = start(2)
    few = ", min_results=1, timeout=0.2"
    for call in range(2):
        expect(members, call, (0, 1), "gpu" if call else "shm", few)
    for call in range(2, 9):  # more calls than rank 0 has segments
        assert members.run(HOLD.format(call=call) + CALL.format(few), 0)[0][0] == (0,)
    assert members.run(HOLD.format(call=9) + CALL.format(few), 1)[1][0] == (0,)
    check_mean(members, 8, (0,), 1)
    expect(members, 10, (0, 1), "gpu", few)


def test_what_a_setting_forbids_or_a_member_lacks_goes_through_the_host(
    start: Start,
) -> None:
    members = start(2)
    for call in range(3):
        expect(members, call, (0, 1), "gpu" if call else "shm")
    away = HOLD.format(call=4) + "held.gpu = uuid if rank else None\n" + CALL.format("")
    for _ in range(2):
        assert {w for _, ways in members.run(away).values() for w in ways.values()} == {"shm"}
    expect(members, 5, (0, 1), "shm")
    expect(members, 6, (0, 1), "gpu")
    members.run("os.environ['FLATWEIGHTS_GPU'] = 'host'", 1)
    expect(members, 7, (0, 1), "shm")
    members.run("del os.environ['FLATWEIGHTS_GPU']")  # so few bytes go through the host
    expect(members, 8, (0, 1), "shm")
    expect(members, 9, (0, 1), "shm")
    members.run("os.environ['FLATWEIGHTS_GPU'] = 'gpu'", 1)
    program = "try: member.average_variables(held)\nexcept ValueError as error: result = str(error)"
    assert members.run(program, 1)[1] == "FLATWEIGHTS_GPU: expected host or device, got 'gpu'"


def test_a_rule_takes_the_weights_through_the_host(start: Start) -> None:
    members = start(3)
    for call in range(2):
        expect(members, call, (0, 1, 2), "gpu" if call else "shm")
    program = HOLD.format(call=3) + "def first(models): return models[0]\n"
    responses = members.run(program + CALL.format(", rule=first"))
    assert {w for _, ways in responses.values() for w in ways.values()} == {"shm"}


@pytest.mark.parametrize("function", ["cuMemCreate", "cuLaunchKernel", "cuEventSynchronize"])
def test_a_gpu_that_fails_one_member_is_used_no_more(
    stand_in: str, idle: dict[str, list[GPUProcess]], function: str
) -> None:
    free = idle.setdefault(stand_in, [])
    members = Members(stand_in, 2, free)
    failing = f"driver.stand_in_cuda_fail(b{function!r}, {{}}, 1)"
    try:
        for call in range(2):
            expect(members, call, (0, 1), "gpu" if call else "shm")
        members.run(failing.format(700))
        for call in range(2, 6):
            expect(members, call, (0, 1), "shm")
        members.run(failing.format(0))
        free += members.release()
    except BaseException:
        members.close()
        raise


def test_memory_that_is_short_on_the_gpu_is_taken_from_the_host(
    stand_in: str, idle: dict[str, list[GPUProcess]]
) -> None:
    free = idle.setdefault(stand_in, [])
    members = Members(stand_in, 2, free)
    try:
        members.run(f"os.environ['STAND_IN_CUDA_MEMORY'] = '{3 << 20}'")
        for call in range(4):
            expect(members, call, (0, 1), "shm")
        members.run("del os.environ['STAND_IN_CUDA_MEMORY']")
        free += members.release()
    except BaseException:
        members.close()
        raise


@pytest.fixture
def alone(stand_in: str, idle: dict[str, list[GPUProcess]]) -> Iterator[GPUProcess]:
    """A process without a group."""
    free = idle.setdefault(stand_in, [])
    process = free.pop() if free else GPUProcess(stand_in)
    try:
        yield process
        process.run("segments = placed = held = None; os.environ.pop('STAND_IN_CUDA_MEMORY', None)")
    except BaseException:
        process.close()
        raise
    free.append(process)


def test_segments_are_let_go(start: Start) -> None:
    members = start(3)
    count = "result = len(os.listdir('/proc/self/fd'))"
    before = members.run(count)
    for call in range(3):
        program = f"held = Holder(weights_of({call}), uuid); {CALL.format('')}\n"
        members.run("for k in range(30):\n    " + program.replace("; ", "\n    ") + count)
        for rank, descriptors in members.run(count).items():  # one for each segment of each member
            assert descriptors - before[rank] <= 3 * MOST + 1
    group = members.group.group
    held: int = group.queue.call(lambda group: len(group._gpu._stayed), group)
    assert held <= 2


def test_a_segment_that_could_not_be_replaced_leaves_the_others_as_they_are(
    alone: GPUProcess,
) -> None:
    lost, again = alone.run(
        "from flatweights.ray.channels._gpu_segments import FIRST, MOST, GpuSegments\n"
        "held = {FIRST + at for at in range(MOST)}\n"
        "segments = GpuSegments(1, lambda at: at in held and any(w[1] == at for w in placed))\n"
        "placed = []\n"
        "for _ in held: placed.append(segments.take(uuid, 100).handle.placed)\n"
        "held.remove(FIRST + 1)\n"
        "driver.stand_in_cuda_fail(b'cuMemCreate', 2, 1)\n"
        "try: segments.take(uuid, 10_000)\n"
        "except MemoryError: pass\n"
        "driver.stand_in_cuda_fail(b'cuMemCreate', 0, 1)\n"
        "lost = [k for k, one in enumerate(placed) if segments.find(one) is None]\n"
        "result = lost, segments.take(uuid, 10_000).handle.placed in placed"
    )
    assert lost == [1]
    # others know a segment by its number, and would read the memory of the old one
    assert not again


def test_the_memory_of_a_segment_goes_before_that_of_the_next(alone: GPUProcess) -> None:
    alone.run(
        "from flatweights.ray.channels._gpu_segments import FIRST, MOST, GpuSegments\n"
        f"os.environ['STAND_IN_CUDA_MEMORY'] = '{(2 * MOST + 4) << 20}'\n"
        "held = set()\n"
        "segments = GpuSegments(1, held.__contains__)\n"
        "for at in range(MOST): segments.take(uuid, 1 << 20); held.add(FIRST + at)\n"
        "held.remove(FIRST)\n"
        "segments.take(uuid, 5 << 20)"  # 6 MiB, as well as three of 2 MiB
    )


def test_free_segments_of_other_models_go_if_memory_is_short(alone: GPUProcess) -> None:
    left = alone.run(
        "from flatweights.ray.channels._gpu_segments import FIRST, GpuSegments\n"
        f"os.environ['STAND_IN_CUDA_MEMORY'] = '{8 << 20}'\n"
        "held = set()\n"
        "segments = GpuSegments(1, held.__contains__)\n"
        "placed = [segments.take(uuid, n).handle.placed for n in (9, 99, 999, 9999)]\n"
        "held.add(FIRST + 1)\n"
        "segments.take(uuid, 5 << 20)\n"
        "result = [one.segment - FIRST for one in placed if segments.find(one) is not None]"
    )
    assert left == [1]


def test_segments_of_members_that_are_gone_are_let_go(start: Start) -> None:
    members = start(3)
    few = ", min_results=1"
    count = "result = len(os.listdir('/proc/self/fd'))"
    counts = []
    for call in range(0, 15, 5):
        for k in range(3):
            members.run(HOLD.format(call=call + k) + CALL.format(few))
        expect(members, call + 3, (0, 1, 2), "gpu", few)
        counts.append(members.run(count, 0)[0])
        if len(counts) == 3:
            break
        killed = members.processes.pop(2)
        killed.kill()
        killed.close()
        expect(members, call + 4, (0, 1), "gpu", few)
        members.join(2)
        members.run(HOLD.format(call=call + 4) + CALL.format(few), 2)  # late: it gets the average
    assert counts[-1] == counts[1]


def test_a_segment_for_which_the_coordinator_lacks_a_descriptor_is_read_by_it(
    start: Start,
) -> None:
    members = start(2)
    program = "called = member.broadcast_variables(held, root=1); result = called.transports"
    members.run(HOLD.format(call=0) + program)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        ways = members.run(HOLD.format(call=1) + program)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert {one[1] for one in ways.values()} == {"shm"}


def test_members_that_are_asked_again_at_the_end_of_the_time_are_waited_for(start: Start) -> None:
    members = start(3)
    for call in range(2):
        expect(members, call, (0, 1, 2), "gpu" if call else "shm", ", min_results=1")
    away = HOLD.format(call=2) + "held.gpu = uuid if rank else None\n"
    running = members.begin(away + CALL.format(", min_results=1, timeout=0.3"), 0, 1)
    assert {future.result()[0] for future in running.values()} == {(0, 1)}  # rank 2 does not call
    check_mean(members, 2, (0, 1), 0, 1)
