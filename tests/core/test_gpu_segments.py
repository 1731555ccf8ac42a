"""Segments in a GPU's memory, by a stand-in for NVIDIA's driver, and on a GPU where there is one.

What only the stand-in has tried is not known to work on a GPU.
"""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu_processes import (
    REAL,
    GPUProcess,
    build_stand_in,
    gpu_processes,
    has_compiler,
    shared_stand_in,
)
from gpus import shown_gpus
from reference import run_python

SIZES = (1, 4096, (3 << 20) + 5)

UUID = b"stand-in GPU 000"


def built(folder: Path, *without: str) -> str:
    if not has_compiler():
        pytest.skip("there is no C++ compiler, or no Linux")
    return build_stand_in(folder, without=without)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shared_stand_in(tmp_path_factory)


@pytest.fixture(params=["stand-in", "GPU"])
def library(request: pytest.FixtureRequest) -> str:
    """The driver that a test uses."""
    if request.param == "stand-in":
        return request.getfixturevalue("stand_in")  # type: ignore[no-any-return]
    if shown_gpus() == 0:
        pytest.skip("there is no GPU, or it is hidden")
    return REAL


_idle: dict[str, list[GPUProcess]] = {}  # by library: a process takes longer than most tests


@pytest.fixture(scope="module", autouse=True)
def end_idle_processes() -> Iterator[None]:
    yield
    for processes in _idle.values():
        while processes:
            processes.pop().close()


@contextmanager
def lent(library: str, count: int) -> Iterator[list[GPUProcess]]:
    """Processes of earlier tests that went well, and new ones if there are too few."""
    idle = _idle.setdefault(library, [])
    processes = [idle.pop() if idle else GPUProcess(library) for _ in range(count)]
    try:
        yield processes
        for process in processes:
            process.run("segment = own = None")
    except BaseException:
        for process in processes:
            process.close()
        raise
    idle += processes


def create(owner: GPUProcess, nbytes: int, seed: int) -> None:
    """Have ``owner`` make a ``segment`` with bytes of this seed, and send its descriptor."""
    owner.run(
        f"segment = _core.DeviceSegment(uuid, {nbytes})\n"
        f"segment.copy_from(random_bytes({nbytes}, {seed}))\n"
        "sent.append(segment.descriptor)"
    )


def open_segment(peer: GPUProcess, nbytes: int, descriptor: int) -> None:
    """Have ``peer`` open a segment as ``segment``, and close the descriptor at once."""
    peer.run(
        f"segment = _core.PeerDeviceSegment(descriptors[0], {nbytes}, uuid)\n"
        "os.close(descriptors[0])",
        descriptor,
    )


def has_bytes(process: GPUProcess, nbytes: int, seed: int) -> bool:
    """Whether the ``segment`` of a process has the bytes of this seed."""
    return process.run(  # type: ignore[no-any-return]
        f"out = np.empty({nbytes}, np.uint8)\n"
        "segment.copy_to(out)\n"
        f"result = bool((out == random_bytes({nbytes}, {seed})).all())"
    )


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# What processes see of each other.


def test_peers_read_what_the_owner_writes(library: str) -> None:
    with lent(library, 3) as (owner, *peers):
        for nbytes in SIZES:
            create(owner, nbytes, 1)
            for peer in peers:
                open_segment(peer, nbytes, owner.descriptors[0])
                assert has_bytes(peer, nbytes, 1)
            owner.run(f"segment.copy_from(random_bytes({nbytes}, 2))")
            assert all(has_bytes(process, nbytes, 2) for process in (owner, *peers))
            sides = [process.run("result = segment.nbytes, segment.uuid") for process in peers]
            assert sides == [(nbytes, owner.run("result = uuid"))] * 2


def test_parts_of_segments_are_read_and_written(library: str) -> None:
    with lent(library, 2) as (owner, peer):
        create(owner, 1000, 1)
        open_segment(peer, 1000, owner.descriptors[0])
        owner.run("segment.copy_from(np.arange(10, dtype=np.float32), 100)")
        assert peer.run(
            "out = np.empty((5, 2), np.float32)\n"
            "segment.copy_to(out, offset=100)\n"
            "rest = np.empty(1000, np.uint8)\n"
            "segment.copy_to(rest)\n"
            "before = random_bytes(1000, 1)\n"
            "result = out.tolist(), rest[:100].tolist() == before[:100].tolist(), "
            "rest[140:].tolist() == before[140:].tolist()"
        ) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], True, True)


def test_kernels_read_a_peers_segment_and_write_their_own(library: str) -> None:
    nbytes = 3 * 4096 + 48
    with lent(library, 2) as (owner, peer):
        create(owner, nbytes, 1)
        open_segment(peer, nbytes, owner.descriptors[0])
        assert peer.run(
            f"own = _core.DeviceSegment(uuid, {nbytes})\n"
            f"copy_by_kernel(driver, own.address, segment.address, {nbytes})\n"
            f"out = np.empty({nbytes}, np.uint8)\n"
            "own.copy_to(out)\n"
            f"result = bool((out == random_bytes({nbytes}, 1)).all())"
        )


def test_a_peer_that_writes_faults_and_changes_nothing(library: str) -> None:
    nbytes = 4096
    with lent(library, 2) as (owner, reader), gpu_processes(library, 1) as (writer,):
        create(owner, nbytes, 1)
        for peer in (reader, writer):
            open_segment(peer, nbytes, owner.descriptors[0])
        writer.run(f"own = _core.DeviceSegment(uuid, {nbytes})")
        with pytest.raises((EOFError, RuntimeError)):
            writer.run(f"copy_by_kernel(driver, segment.address, own.address, {nbytes})")
        assert has_bytes(owner, nbytes, 1)
        assert has_bytes(reader, nbytes, 1)


def test_bytes_outlive_their_owner(library: str) -> None:
    nbytes = 3 << 20
    with lent(library, 2) as (reader, late), gpu_processes(library, 1) as (owner,):
        create(owner, nbytes, 1)
        # This process uses no GPU, like one that forwards descriptors.
        descriptor = os.dup(owner.descriptors[0])
        open_segment(reader, nbytes, descriptor)
        owner.kill()
        assert has_bytes(reader, nbytes, 1)
        open_segment(late, nbytes, descriptor)
        os.close(descriptor)
        reader.run("del segment")
        assert has_bytes(late, nbytes, 1)


def test_a_peers_view_outlives_the_owners_segment(library: str) -> None:
    with lent(library, 2) as (owner, peer):
        create(owner, 4096, 1)
        open_segment(peer, 4096, owner.descriptors[0])
        owner.run("del segment\nsegment = _core.DeviceSegment(uuid, 4096)")
        owner.run("segment.copy_from(random_bytes(4096, 2))")
        assert has_bytes(peer, 4096, 1)


def test_a_forked_child_frees_nothing(library: str) -> None:
    counts = "driver.stand_in_cuda_calls()" if library != REAL else "0"
    with lent(library, 2) as (owner, peer):
        create(owner, 4096, 1)
        open_segment(peer, 4096, owner.descriptors[0])
        for process in (owner, peer):
            assert (
                process.run(
                    "child = os.fork()\n"
                    "if child == 0:\n"
                    f"    before = {counts}\n"
                    "    del segment\n"
                    f"    os._exit({counts} - before)\n"
                    "result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
                )
                == 0
            )
            assert has_bytes(process, 4096, 1)


def test_a_forked_child_gets_errors(library: str) -> None:
    with lent(library, 1) as (process,):
        create(process, 4096, 1)
        assert (
            process.run(
                "child = os.fork()\n"
                "if child == 0:\n"
                "    failed = 0\n"
                "    out = np.empty(8, np.uint8)\n"
                "    calls = [\n"
                "        lambda: _core.DeviceSegment(uuid, 8),\n"
                "        lambda: segment.copy_to(out),\n"
                "        lambda: segment.copy_from(out),\n"
                "    ]\n"
                "    for call in calls:\n"
                "        try:\n"
                "            call()\n"
                "        except RuntimeError as error:\n"
                "            failed += 'forked' in str(error)\n"
                "    failed += 'forked' in _core.device_segment_obstacle(uuid)\n"
                "    os._exit(failed)\n"
                "result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
            )
            == 4
        )


# What is freed.


def test_a_hundred_segments_leave_no_descriptors_and_no_memory(library: str) -> None:
    objects = "driver.stand_in_cuda_objects()" if library != REAL else "0"
    with lent(library, 2) as processes:
        for process in processes:  # the first segment of all makes what stays
            process.run("first = _core.DeviceSegment(uuid, 1)\ndel first")
        before = [
            process.run(f"result = len(os.listdir('/proc/self/fd')), {objects}")
            for process in processes
        ]
        here = count_descriptors()
        owner, peer = processes
        for seed in range(100):
            create(owner, 4096, seed)
            open_segment(peer, 4096, owner.descriptors[0])
            if seed % 2:
                owner.run("segment.close_descriptor()\nresult = segment.descriptor")
            owner.run("del segment")
            peer.run("del segment")
        after = [
            process.run(f"result = len(os.listdir('/proc/self/fd')), {objects}")
            for process in processes
        ]
        assert after == before
        assert count_descriptors() == here


def test_the_descriptor_is_not_inherited_and_closes_once(library: str) -> None:
    with lent(library, 1) as (process,):
        assert process.run(
            "segment = _core.DeviceSegment(uuid, 1)\n"
            "number = segment.descriptor\n"
            "inherited = os.get_inheritable(number)\n"
            "segment.close_descriptor()\n"
            "taken = os.dup(0)\n"
            "segment.close_descriptor()\n"
            "os.fstat(taken)\n"
            "result = inherited, taken == number, segment.descriptor"
        ) == (False, True, -1)


# What fails.


def test_short_memory_of_the_gpu_is_a_memory_error(library: str) -> None:
    with lent(library, 1) as (process,):
        for nbytes in (1 << 50, (1 << 64) - 1):
            with pytest.raises(MemoryError):
                process.run(f"_core.DeviceSegment(uuid, {nbytes})")
        create(process, 4096, 1)
        assert has_bytes(process, 4096, 1)


def test_segments_have_no_obstacle(library: str) -> None:
    with lent(library, 1) as (process,):
        assert process.run("result = _core.device_segment_obstacle(uuid)") == ""
        assert process.run("result = _core.device_obstacle()") == ""


def test_other_descriptors_and_sizes_are_refused(library: str) -> None:
    ours, theirs = socket.socketpair()
    with lent(library, 2) as (owner, peer), ours, theirs:
        with pytest.raises(RuntimeError, match="cuMemImportFromShareableHandle"):
            open_segment(peer, 4096, ours.fileno())
        create(owner, 4096, 1)
        with pytest.raises(RuntimeError, match="of NVIDIA's driver: CUDA_ERROR_"):
            open_segment(peer, 100 << 20, owner.descriptors[0])
        open_segment(peer, 4096, owner.descriptors[0])
        assert has_bytes(peer, 4096, 1)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("_core.DeviceSegment(b'short', 8)", "uuid: expected 16 bytes, got 5"),
        ("segment.copy_to(out, offset=4090)", "segment: expected at most 4096 bytes, got 4090 + 8"),
        ("segment.copy_from(out, 5000)", "segment: expected at most 4096 bytes, got 5000 + 8"),
        ("segment.copy_from(np.zeros(9)[::2])", "contiguous array of numbers, got float64"),
        ("segment.copy_from(np.array([None]))", "contiguous array of numbers, got object"),
        ("out.flags.writeable = False\nsegment.copy_to(out)", "out: expected a writable array"),
    ],
)
def test_wrong_arguments_are_refused(stand_in: str, program: str, message: str) -> None:
    with lent(stand_in, 1) as (process,):
        process.run("segment = _core.DeviceSegment(uuid, 4096)\nout = np.empty(8, np.uint8)")
        with pytest.raises(ValueError, match=re.escape(message)):
            process.run(program)


STEPS = {
    "cuDeviceGetUuid_v2": "cuDeviceGetUuid",
    "cuCtxGetDevice": "cuCtxGetDevice",
    "cuMemGetAllocationGranularity": "cuMemGetAllocationGranularity",
    "cuMemCreate": "cuMemCreate",
    "cuMemExportToShareableHandle": "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle": "cuMemImportFromShareableHandle",
    "cuMemAddressReserve": "cuMemAddressReserve",
    "cuMemMap": "cuMemMap",
    "cuMemSetAccess": "cuMemSetAccess",
}


def test_a_failure_half_way_leaves_nothing_and_the_next_trial_works(stand_in: str) -> None:
    out_of_memory, unknown = 2, 999
    with lent(stand_in, 1) as (process,):
        process.run(
            "segment = _core.DeviceSegment(uuid, 4096)\n"
            "def count():\n"
            "    return len(os.listdir('/proc/self/fd')), driver.stand_in_cuda_objects()\n"
            "before = count()"
        )
        for function, name in STEPS.items():
            for code in (unknown, out_of_memory):
                expected = MemoryError if code == out_of_memory else RuntimeError
                failing = f"driver.stand_in_cuda_fail(b'{function}', {code}, 1)"
                message = f"^{name} of NVIDIA's driver: CUDA_ERROR_UNKNOWN$"
                for call in (
                    "_core.DeviceSegment(uuid, 1)",
                    "_core.PeerDeviceSegment(segment.descriptor, 4096, uuid)",
                ):
                    is_peers = "Peer" in call
                    if is_peers and function in ("cuMemCreate", "cuMemExportToShareableHandle"):
                        continue
                    if not is_peers and function == "cuMemImportFromShareableHandle":
                        continue
                    with pytest.raises(expected, match=message if code == unknown else None):
                        process.run(f"{failing}\n{call}")
                    process.run(f"driver.stand_in_cuda_fail(b'{function}', 0, 1)\n{call}")
        assert process.run("result = count() == before")


@pytest.mark.parametrize(
    ("env", "obstacle"),
    [
        ({"STAND_IN_CUDA_LACKS": "102"}, "the GPU has no virtual memory management"),
        ({"STAND_IN_CUDA_LACKS": "103"}, "the GPU's memory cannot be shared by descriptors"),
        (
            {"STAND_IN_CUDA_FAIL": "cuMemImportFromShareableHandle:801:1"},
            "cuMemImportFromShareableHandle of NVIDIA's driver: CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            {"STAND_IN_CUDA_FAIL": "cuMemSetAccess:801:2"},  # the map for reading
            "cuMemSetAccess of NVIDIA's driver: CUDA_ERROR_NOT_SUPPORTED",
        ),
    ],
)
def test_obstacles_are_named_and_remembered(
    stand_in: str, env: dict[str, str], obstacle: str
) -> None:
    with gpu_processes(stand_in, 1, **env) as (process,):
        for _ in range(2):
            assert process.run("result = _core.device_segment_obstacle(uuid)") == obstacle
        calls = "calls = driver.stand_in_cuda_calls()\n_core.device_segment_obstacle(uuid)\n"
        assert process.run(f"{calls}result = driver.stand_in_cuda_calls() - calls") < 6
        assert process.run("result = _core.device_obstacle()") == ""


def test_short_memory_at_the_trial_is_not_remembered(stand_in: str) -> None:
    with gpu_processes(stand_in, 1, STAND_IN_CUDA_FAIL="cuMemCreate:2:1") as (process,):
        obstacle = process.run("result = _core.device_segment_obstacle(uuid)")
        assert obstacle == "there is no memory for a trial"
        process.run("driver.stand_in_cuda_fail(b'cuMemCreate', 0, 1)")
        assert process.run("result = _core.device_segment_obstacle(uuid)") == ""


@pytest.mark.slow
def test_a_driver_without_a_function_does_everything_else(tmp_path: Path) -> None:
    library = built(tmp_path, "cuMemSetAccess", "cuDeviceGetUuid_v2")
    with gpu_processes(library, 1) as (process,):
        missing = "NVIDIA's driver has no function cuMemSetAccess"
        assert process.run("result = uuid") == UUID
        assert process.run("result = _core.device_segment_obstacle(uuid)") == missing
        with pytest.raises(RuntimeError, match=f"^{missing}$"):
            process.run("_core.DeviceSegment(uuid, 8)")
        with pytest.raises(RuntimeError, match=f"^{missing}$"):
            process.run("_core.PeerDeviceSegment(0, 8, uuid)")
        assert process.run("result = _core.device_obstacle()") == ""


def test_a_gpu_that_the_process_does_not_use_has_no_segments(stand_in: str) -> None:
    other = UUID[:-1] + b"1"
    name = "GPU-7374616e-642d-696e-2047-505520303031"
    message = f"the process does not use {name}"
    with gpu_processes(stand_in, 1, STAND_IN_CUDA_GPUS="2") as (process,):
        assert process.run("result = _core.device_uuids()") == [UUID]
        assert process.run(f"result = _core.device_name({other!r})") == name
        assert process.run(f"result = _core.device_segment_obstacle({other!r})") == message
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            process.run(f"_core.DeviceSegment({other!r}, 8)")
        process.run("load_driver(driver._name, uses_gpus=[1])")
        assert process.run("result = _core.device_uuids()") == [UUID, other]
        assert process.run(f"result = _core.DeviceSegment({other!r}, 8).uuid") == other


def test_without_a_driver_there_are_no_gpus() -> None:
    code = (
        "from flatweights import _core\n"
        "print(_core.device_uuids(), _core.device_segment_obstacle(bytes(16)))\n"
    )
    assert run_python(code) == "[] NVIDIA's driver is not loaded\n"


# What the stand-in shows of mistakes.


def test_the_stand_in_ends_a_process_that_touches_a_gpus_memory(stand_in: str) -> None:
    process = GPUProcess(stand_in)
    try:
        process.run("segment = _core.DeviceSegment(uuid, 4096)")
        with pytest.raises(EOFError):
            process.run("import ctypes\nctypes.memset(segment.address, 1, 1)")
    finally:
        process.close()
    # A sanitizer ends the process itself.
    assert process.process.returncode in (-signal.SIGSEGV, 1)


def test_the_stand_in_knows_memory_by_its_address(stand_in: str) -> None:
    program = """
import ctypes
def attribute(number, address, kind=ctypes.c_size_t):
    value = kind()
    code = driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(address))
    return value.value if code == 0 else -code
segment = _core.DeviceSegment(uuid, 4096)
variable, pinned = ctypes.c_uint64(), ctypes.c_void_p()
check(driver.cuMemAlloc_v2(ctypes.byref(variable), ctypes.c_size_t(1000)))
check(driver.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(1000), 0))
array = np.zeros(4096, np.uint8)
registered = ctypes.c_void_p(array.ctypes.data)
before = attribute(2, registered.value, ctypes.c_uint)
check(driver.cuMemHostRegister_v2(registered, ctypes.c_size_t(4096), 0))
twice = driver.cuMemHostRegister_v2(registered, ctypes.c_size_t(4096), 0)
places = segment.address, variable.value, pinned.value, registered.value
types = [attribute(2, place + 999, ctypes.c_uint) for place in places]
starts = [attribute(11, place + 999) == place for place in places]
sizes = [attribute(12, place) for place in places]
contexts = [attribute(1, place) not in (0, None) for place in places]
check(driver.cuMemHostUnregister(registered))
after = attribute(2, registered.value, ctypes.c_uint)
result = before, twice, types, starts, sizes, contexts, after
"""
    with lent(stand_in, 1) as (process,):
        before, twice, types, starts, sizes, contexts, after = process.run(program)
    assert (before, twice, after) == (-1, 712, -1)
    assert types == [2, 2, 1, 1]  # device, device, host, host
    assert starts == [True] * 4
    assert sizes == [2 << 20, 1000, 1000, 4096]
    assert contexts == [False, True, True, True]
