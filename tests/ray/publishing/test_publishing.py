"""Publishers and subscribers of one node: every kind of model reads the published weights."""

import concurrent.futures
import contextlib
import errno
import functools
import gc
import itertools
import os
import re
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from interrupts import Interrupts
from ray.experimental import internal_kv
from ray_workers import wait_for

import flatweights as fw
from flatweights import _core
from flatweights.ray import (
    FlatWorker,
    Publisher,
    StaleWeightsError,
    Subscriber,
    SupersededError,
    WorkerGroup,
    average,
    join,
)
from flatweights.ray.channels._end import NoDescriptorsError
from flatweights.ray.members._platform import PLATFORM
from flatweights.ray.peers import _shared_actor
from flatweights.ray.publishing import (
    _names,
    _publication_server,
    _sources,
    _subscriber,
    _transports,
)
from flatweights.ray.publishing._answer import answer_of
from flatweights.ray.publishing._publication_server import PublicationAddress, PublicationConnection
from flatweights.ray.publishing._sources import (
    PulledSource,
    SharedMemorySource,
    Source,
    patience_of,
)
from flatweights.ray.support._errors import IN_FORK

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="such memory is Linux's"),
]

VERSIONS = 10**12


def wait_until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def model_of(value: float) -> dict[str, Any]:
    return {"a": np.full((50, 60), value, np.float32), "n": np.array([int(value)])}


class Learner:
    """An actor that publishes."""

    def __init__(self, name: str, size: int = 1000) -> None:
        self.weights = {"w": np.zeros(size)}
        self.publisher = Publisher(name, self.weights)

    def publish(self, value: float) -> int:
        self.weights["w"][:] = value
        return self.publisher.publish()

    def publish_for_ever(self) -> None:
        value = 0.0
        while True:
            self.publish(value := value + 1.0)

    def pid(self) -> int:
        return os.getpid()


class Actor:
    """An actor that reads."""

    def __init__(self, name: str, way: str = "", size: int = 1000, **options: Any) -> None:
        os.environ["FLATWEIGHTS_RAY"] = way
        self.weights = {"w": np.zeros(size)}
        self.subscriber = Subscriber(name, self.weights, **options)

    def update(self) -> tuple[bool, int, float]:
        is_new = self.subscriber.update()
        values = self.weights["w"]
        assert (values == values[0]).all()
        return is_new, self.subscriber.version, float(values[0])

    def update_many(self, count: int) -> None:
        """Update until ``count`` updates have found newer weights."""
        before = self.subscriber.version
        while count > 0:
            is_new, version, _ = self.update()
            assert version > before if is_new else version == before
            count, before = count - is_new, version

    def ask(self, name: str) -> Any:
        return getattr(self.subscriber, name)

    def pid(self) -> int:
        return os.getpid()


remote_learner: Any = ray.remote(num_cpus=0)(Learner)
remote_actor: Any = ray.remote(num_cpus=0)(Actor)


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Actors to be killed after the test."""
    actors: list[Any] = []
    yield actors
    for actor in actors:
        ray.kill(actor)


class Gate:
    """An actor that answers once it is told to."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def open(self) -> None:
        self.is_open.set()

    def wait(self) -> str:
        self.is_open.wait()
        return "open"

    def fail(self) -> None:
        raise TimeoutError("of its own")

    def fail_later(self, where: str) -> None:
        wait_for(Path(where))
        self.fail()


remote_gate: Any = ray.remote(num_cpus=0, max_concurrency=2)(Gate)


def test_an_interrupt_while_the_main_thread_waits_stops_no_other_answer(
    started: list[Any],
) -> None:
    """Also not if it comes just when a lock of Python's own was taken."""
    gate = remote_gate.remote()
    started.append(gate)
    waits = gate.wait.remote()

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt, ray.exceptions.GetTimeoutError):
            answer_of(waits, 0.3)
    finally:
        sys.setprofile(None)
    ray.get(gate.open.remote(), timeout=60)
    assert answer_of(waits, 60.0) == "open"
    assert ray.get(waits, timeout=60) == "open"


def test_an_answer_that_comes_as_the_wait_ends_is_taken() -> None:
    class JustInTime:
        """A reference whose result comes after a wait has given up, before it is looked at."""

        def future(self) -> Any:
            future = Future[str]()
            wait = future.result

            def result(timeout: float | None = None) -> str:
                if future.done():
                    return wait()
                future.set_result("open")
                raise concurrent.futures.TimeoutError

            future.result = result  # type: ignore[method-assign]
            return future

    found: list[str] = []
    ref: Any = JustInTime()
    thread = threading.Thread(target=lambda: found.append(answer_of(ref, 60.0)))
    thread.start()
    thread.join()
    assert found == ["open"]


@pytest.mark.parametrize("name", ["begin", "commit"])
@pytest.mark.parametrize("event", ["c_call", "c_return"])
def test_a_publisher_goes_on_after_an_interrupt(name: str, event: str) -> None:
    weights, read = {"w": np.zeros(4)}, {"w": np.zeros(4)}

    def interrupt(_: Any, at: str, function: Any) -> None:
        if at == event and function.__name__ == name:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with Publisher("interrupted", weights) as publisher, Subscriber("interrupted", read) as reader:
        first = publisher.publish()
        sys.setprofile(interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        is_published = (name, event) == ("commit", "c_return")
        assert publisher.version == first + is_published
        weights["w"] += 1.0
        assert publisher.publish() == publisher.version == first + is_published + 1
        assert reader.update()
        assert reader.version == publisher.version
        assert np.array_equal(weights["w"], read["w"])


@pytest.mark.parametrize("thread", ["flatweights-publication", "flatweights-subscriber"])
def test_a_constructor_that_is_interrupted_leaves_no_thread(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, []

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name == thread and threading.current_thread() is threading.main_thread():
            begun.append(self)
            raise KeyboardInterrupt

    weights = {"w": np.zeros(4)}
    make: Callable[[], Any] = functools.partial(Publisher, "another", weights)
    if thread == "flatweights-subscriber":
        make = functools.partial(Subscriber, "interrupted at once")
    with Publisher("interrupted at once", weights), monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
        (one,) = begun
        wait_until(lambda: not one.is_alive())


def _close(*some: Any) -> None:
    for one in some:
        one.close()


def test_what_is_interrupted_as_it_is_closed_is_closed_by_another_call() -> None:
    weights, threads = {"w": np.zeros(4)}, threading.active_count()
    interrupts = Interrupts(at_lines_only=True)
    is_hit = True
    while is_hit:
        publisher = Publisher("closed twice", weights)
        subscriber = Subscriber("closed twice", weights)
        close = functools.partial(_close, subscriber, publisher)
        is_hit = interrupts.hit(close)
        close()
        with pytest.raises(RuntimeError, match="it was closed"):
            subscriber.update()
        with pytest.raises(RuntimeError, match="it was closed"):
            publisher.publish()
        wait_until(lambda: threading.active_count() == threads)


def test_a_publisher_that_is_interrupted_before_its_thread_runs_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, late, failed = threading.Thread.start, list[threading.Thread](), list[object]()

    def interrupted(self: threading.Thread) -> None:
        late.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "excepthook", failed.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Publisher("another", {"w": np.zeros(4)})
    start(late[0])
    late[0].join(60)
    assert (late[0].is_alive(), failed) == (False, [])


def test_a_publisher_that_python_ends_does_not_tell_of_another_one() -> None:
    publisher = Publisher("ended", np.zeros(3))
    publisher._finalizer()  # as at the end of the process, while a thread publishes
    with pytest.raises(RuntimeError, match="it was closed") as raised:
        publisher.publish()
    assert not isinstance(raised.value, SupersededError)


def test_weights_that_nobody_has_asked_for_any_more_are_not_pulled() -> None:
    def pull(seen: int) -> tuple[()]:
        time.sleep(0.01)
        return ()

    with Publisher("pulled", np.zeros(3)):
        record = _names.find("pulled")
    assert record is not None
    source = PulledSource(record, pull)
    thread = source._thread
    del source
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_seconds_may_be_of_any_type(dtype: Any) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        Subscriber("of any type", timeout=dtype(0.5))
    with Publisher("of any type", np.ones(3)) as publisher:
        publisher.publish()
        with Subscriber("of any type", timeout=dtype(1.5), max_age=dtype(60)) as subscriber:
            assert subscriber.read().buffer[:24].view(np.float64).tolist() == [1.0] * 3
    with pytest.raises(TimeoutError, match="missing ranks: 1"):
        join("of any type", rank=0, size=2, timeout=dtype(0.5))


@pytest.mark.parametrize("is_main", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_call_that_raises_a_timeout_error_is_not_waited_for(
    started: list[Any], is_main: bool
) -> None:
    gate = remote_gate.remote()
    started.append(gate)
    call = gate.fail.remote()
    with ThreadPoolExecutor() as threads, pytest.raises(TimeoutError, match="of its own"):
        answer_of(call, 60.0) if is_main else threads.submit(answer_of, call, 60.0).result()


def test_ray_logs_no_error_of_a_call_that_nobody_waits_for_any_more(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logged: list[Exception] = []
    monkeypatch.setattr("ray._private.worker._unhandled_error_handler", logged.append)
    gate = remote_gate.options(max_concurrency=1).remote()
    started.append(gate)
    for wait in (answer_of, PLATFORM.get):
        go_on = tmp_path / wait.__qualname__
        with pytest.raises(ray.exceptions.GetTimeoutError):
            wait(gate.fail_later.remote(str(go_on)), 0.0)
        go_on.touch()
        ray.get(gate.open.remote(), timeout=60)  # it runs after the other call
        assert not logged, wait


@pytest.mark.parametrize("way", ["", "store"])
def test_an_actor_reads_the_newest_weights_once(started: list[Any], way: str) -> None:
    name = f"newest{way}"
    weights = {"w": np.zeros(20_000)}
    with Publisher(name, weights) as publisher:
        actor = remote_actor.remote(name, way, 20_000)
        started.append(actor)
        assert ray.get(actor.update.remote()) == (False, 0, 0.0)
        assert ray.get(actor.ask.remote("transport")) == ("store" if way else "shm")
        assert ray.get(actor.ask.remote("age")) == float("inf")
        for value in (1.0, 2.0, 3.0):
            weights["w"][:] = value
            assert publisher.publish() == publisher.version == int(value)
        if way:
            wait_until(lambda: ray.get(actor.ask.remote("behind")) == 3)
        assert ray.get(actor.ask.remote("behind")) == 3
        assert ray.get(actor.update.remote()) == (True, 3, 3.0)
        assert ray.get(actor.update.remote()) == (False, 3, 3.0)
        assert ray.get(actor.ask.remote("behind")) == 0
        assert 0 < ray.get(actor.ask.remote("age")) < 600
        weights["w"][:] = 4.0
        publisher.publish()
        assert wait_until(lambda: ray.get(actor.update.remote())[1:] == (4, 4.0))


KINDS: dict[str, Callable[[float], Any]] = {
    "array": lambda value: np.full(7, value),
    "mapping": model_of,
    "sequence": lambda value: [np.full((2, 3), value), np.full(3, int(value))],
    "flat weights": lambda value: fw.FlatWeights(model_of(value)),
    "tree": lambda value: {"x": [np.full(2, value), {"y": np.full(3, value)}]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_average_takes_is_published_and_set(kind: str) -> None:
    make = KINDS[kind]
    ours, theirs, other = make(1.0), make(0.0), make(0.0)
    with (
        Publisher(f"kinds {kind}", ours) as publisher,
        Subscriber(f"kinds {kind}", theirs) as reader,
    ):
        publisher.publish()
        assert reader.update()
        np.testing.assert_equal(theirs, make(1.0))
        publisher.publish(make(2.0))
        assert reader.update(out=other)
        np.testing.assert_equal(other, make(2.0))
        np.testing.assert_equal(theirs, make(1.0))
        assert not reader.update()
        copy = reader.read()
        assert isinstance(copy, fw.FlatWeights)
        for part in copy.values():
            assert (part == 2).all()


class Holder:
    """Weights without a framework."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.model = model
        self.layout = fw.Layout.of(model)
        self.error: Exception | None = None
        self.kept: Any = None

    def gather_into(self, buffer: Any) -> None:
        if self.error is not None:
            raise self.error
        for own, view in zip(self.model.values(), self.layout.packed_views(buffer), strict=True):
            view[...] = own

    def scatter(self, buffer: Any) -> None:
        if self.error is not None:
            raise self.error
        self.kept = buffer if self.kept == "next" else None
        for own, view in zip(self.model.values(), self.layout.packed_views(buffer), strict=True):
            own[...] = view


def test_what_goes_wrong_in_the_variables_is_raised_and_passes() -> None:
    ours, theirs = Holder(model_of(1.0)), Holder(model_of(0.0))
    errors = []
    with Publisher("errors", ours) as publisher, Subscriber("errors", theirs) as subscriber:
        for _ in range(10):
            ours.error = theirs.error = ArithmeticError("diverged")
            with pytest.raises(ArithmeticError) as raised:
                publisher.publish()
            errors.append(raised)  # with the traceback, which refers to the memory
            ours.error = None
            version = publisher.publish()
            with pytest.raises(ArithmeticError) as raised:
                subscriber.update()
            errors.append(raised)
            theirs.error = None
            assert subscriber.update()
            assert subscriber.version == version
        assert version == 10
        np.testing.assert_equal(theirs.model, model_of(1.0))
        theirs.kept = "next"
        publisher.publish()
        assert subscriber.update()
        publisher.publish()
        with pytest.raises(RuntimeError, match="copy weights that you keep"):
            subscriber.update()
        theirs.kept = None
        assert subscriber.update()


@pytest.mark.parametrize("way", ["publish", "update", "read"])
def test_a_signal_handler_that_interrupts_a_call_is_refused_another(way: str) -> None:
    ours, theirs = Holder(model_of(1.0)), Holder(model_of(0.0))
    errors: list[str] = []
    owner: Publisher | Subscriber

    def handle(*_: Any) -> None:
        try:
            getattr(owner, way)()
        except RuntimeError as error:
            errors.append(str(error))

    def interrupt(moved: Callable[[Any], None], buffer: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        moved(buffer)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with (
            Publisher(f"handler {way}", ours) as publisher,
            Subscriber(f"handler {way}", theirs) as subscriber,
        ):
            owner = publisher if way == "publish" else subscriber
            holder, name = (ours, "gather_into") if way == "publish" else (theirs, "scatter")
            vars(holder)[name] = functools.partial(interrupt, getattr(holder, name))
            for version in (1, 2):  # it is refused only in the call
                assert publisher.publish() == version
                assert subscriber.update()
                assert subscriber.read()["n"][0] == theirs.model["n"][0] == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 2
    for error in errors:
        name = "publisher" if way == "publish" else "subscriber"
        assert error.startswith(f"this thread is in a call of the {name} already")


class Counted(Holder):
    """Weights that count how often their layout is read."""

    reads = 0

    @property
    def layout(self) -> fw.Layout:
        self.reads += 1
        return self._layout

    @layout.setter
    def layout(self, layout: fw.Layout) -> None:
        self._layout = layout


def test_another_layout_is_refused_even_if_nothing_is_new() -> None:
    wrong, right = model_of(0.0), Counted(model_of(0.0))
    wrong["a"] = wrong["a"].reshape(60, 50)
    with Publisher("layouts", model_of(1.0)) as publisher:
        with pytest.raises(ValueError, match=r"variables, .*slot 0: expected .*50, 60.*60, 50"):
            Subscriber("layouts", wrong)
        with Subscriber("layouts") as subscriber:
            for is_new in (False, True):
                if is_new:
                    publisher.publish()
                for _ in range(2):
                    with pytest.raises(ValueError, match="out, against the published weights: slo"):
                        subscriber.update(out=wrong)
                    with pytest.raises(TypeError, match="neither"):
                        subscriber.update()
                if not is_new:
                    assert not subscriber.update(out=right)
                    reads = right.reads
                    for _ in range(100):
                        assert not subscriber.update(out=right)
                    assert right.reads == reads
            frozen = model_of(0.0)
            frozen["n"].flags.writeable = False
            with pytest.raises(ValueError, match="out, slot 1 'n': expected an array that is wri"):
                subscriber.update(out=frozen)
            both = np.zeros(3000, np.float32)
            overlapping = {"a": both.reshape(50, 60), "n": both[-2:].view(np.int64)}
            with pytest.raises(ValueError, match="out, slot 1 'n': overlaps another part of out"):
                subscriber.update(out=overlapping)
            assert subscriber.version == 0
            assert subscriber.update(out=right)
            assert (right.model["a"] == 1).all()
            assert not subscriber.update(out=right)
        with pytest.raises(ValueError, match="weights, against the published weights"):
            publisher.publish(wrong)
        assert publisher.publish() == 2


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_arrays_that_change_or_were_replaced_by_others_of_another_shape_are_named() -> None:
    ours, theirs = model_of(1.0), model_of(0.0)
    with Publisher("replaced", ours) as publisher, Subscriber("replaced", theirs) as subscriber:
        publisher.publish()
        for shape in [(2,), (1, 1)]:
            theirs["n"] = np.zeros(shape, np.int64)
            with pytest.raises(
                ValueError, match=r"variables, slot 1 'n': expected int64 \(1,\), got"
            ):
                subscriber.update()
            assert (theirs["a"] == 0.0).all(), "nothing was set"
        theirs["n"] = np.zeros(1, np.int64)
        assert subscriber.update()
        ours["a"] = np.zeros((60, 50), np.float32)
        with pytest.raises(ValueError, match=r"variables, slot 0 'a': expected float32 \(50, 60\)"):
            publisher.publish()
        ours["a"] = np.full((50, 60), 2.0, np.float32)
        assert publisher.publish() == 2
        assert subscriber.update()
        assert (theirs["a"] == 2.0).all()
    with pytest.raises(TypeError, match="variables, slot 0 '0': expected a NumPy array, got float"):
        Subscriber("replaced", [1.0], timeout=1)
    models: list[dict[str, Any]] = [{"w": np.ones(4)}, {"w": np.zeros(4)}]
    ours, theirs = models
    with Publisher("in place", ours) as publisher, Subscriber("in place", theirs) as subscriber:
        publisher.publish()
        assert subscriber.update()
        publisher.publish()
        for weights, call in ((ours, publisher.publish), (theirs, subscriber.update)):
            weights["w"].dtype = np.int64
            with pytest.raises(TypeError, match=r"'w': expected float64 \(4,\), got int64 \(4,\)"):
                call()
            weights["w"].dtype = np.float64
            weights["w"].shape = (2, 2)
            with pytest.raises(ValueError, match=r"'w': expected float64 \(4,\), got .* \(2, 2\)"):
                call()
            weights["w"].shape = (4,)
        assert subscriber.update()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", np.array([np.nan])),
        ("n", np.zeros(1, np.int32)),
        ("a", np.full((50, 60), 1 + 1j, np.complex64)),
        ("a", np.zeros((50, 60), ">f4")),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_arrays_that_were_replaced_by_others_of_another_dtype_are_named(
    name: str, value: Any
) -> None:
    ours, theirs = model_of(1.0), model_of(0.0)
    with Publisher("retyped", ours) as publisher, Subscriber("retyped", theirs) as subscriber:
        expected = re.escape(f"'{name}': expected {ours[name].dtype} {ours[name].shape}, got ")
        publisher.publish()
        kept, theirs[name] = theirs[name], value.copy()
        with pytest.raises(TypeError, match=expected):
            subscriber.update()
        np.testing.assert_equal(theirs, theirs | {name: value})
        theirs[name] = kept
        kept, ours[name] = ours[name], value
        with pytest.raises(TypeError, match=expected):
            publisher.publish()
        ours[name] = kept
        publisher.publish()
        assert subscriber.update()
        np.testing.assert_equal(theirs, ours)


def test_a_subscriber_that_is_closed_while_it_finds_a_new_publisher_reads_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = threading.Event()

    def close_first(*args: Any) -> Any:
        source = _transports.connect(*args)
        subscriber.close()
        found.set()
        return source

    first = Publisher("found", np.zeros(3))
    first.publish()
    subscriber = Subscriber("found", np.zeros(3))
    assert subscriber.update()
    monkeypatch.setattr("flatweights.ray.publishing._subscriber.connect", close_first)
    first.close()
    with Publisher("found", np.ones(3)) as publisher:
        publisher.publish()
        assert found.wait(60)
        for _ in range(50):
            with pytest.raises(RuntimeError, match="closed"):
                subscriber.update()
            time.sleep(0.01)


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large_memory_files() -> int:
    """Return the number of mappings of memory files, of a megabyte or more, in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:flatweights" in line]
    return sum(int(end, 16) - int(begin, 16) >= 1 << 20 for begin, end in ranges)


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("is_kept", [True, False])
def test_nothing_of_the_memory_stays_after_the_end(is_kept: bool) -> None:
    """Without the collector of cycles, and even if the objects are kept."""
    before = large_memory_files()
    weights, theirs = {"w": np.ones(1 << 17)}, Holder({"w": np.zeros(1 << 17)})
    publisher = Publisher("memory", weights)
    publisher.publish()
    subscriber = Subscriber("memory", theirs)
    theirs.kept = "next"
    assert subscriber.update()
    assert large_memory_files() == before + 2
    if is_kept:
        subscriber.close()
        publisher.close()
        assert (subscriber.behind, publisher.version % VERSIONS) == (0, 1)
    else:
        del subscriber, publisher
    wait_until(lambda: large_memory_files() == before + 1)
    assert (theirs.kept.view(np.float64) == 1).all()  # a view that is kept keeps its memory
    theirs.kept = None
    wait_until(lambda: large_memory_files() == before)  # the subscriber's thread closes its end


@pytest.mark.usefixtures("_no_collection")
def test_weights_from_the_store_go_with_their_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATWEIGHTS_RAY", "store")
    with Publisher("stored", np.ones(50_000)) as publisher:
        publisher.publish()
        kept, dropped = Subscriber("stored"), Subscriber("stored")
        assert (kept.read()[""] == dropped.read()[""]).all()
        source, other = kept._state.source, weakref.ref(dropped._state.source)
        assert isinstance(source, PulledSource)
        assert source._arrived is not None
        kept.close()
        wait_until(lambda: source._arrived is None)
        assert source.newest == publisher.version
        del dropped
        wait_until(lambda: other() is None)


def test_wrong_calls_are_refused() -> None:
    class Model:  # of Keras, or of another framework
        trainable_variables = ()

    for kind in (Publisher, Subscriber):
        with pytest.raises(TypeError, match=r"got Model; pass TensorFlowVariables\(model\)"):
            kind("wrong", Model())
    with pytest.raises(TypeError, match="name: expected a text"):
        Publisher(3, np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="variables: expected"):
        Publisher("wrong", 3)
    with pytest.raises(ValueError, match="timeout"):
        Subscriber("wrong", timeout=-1)
    with pytest.raises(ValueError, match="max_age: expected a positive"):
        Subscriber("wrong", max_age=0)
    with pytest.raises(TypeError, match="max_age: expected seconds or None, got 'soon'"):
        Subscriber("wrong", max_age="soon")  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="there was none yet"):
        Subscriber("nobody", timeout=0.05)
    text = f"publisher:0a0a0000:{b'elsewhere'.hex()}:000000000000".encode()
    internal_kv._internal_kv_put(text, b"", namespace=b"flatweights")
    message = "there was none yet; a name is local to its Ray job, and job 0a0a0000 has used it"
    with pytest.raises(TimeoutError, match=message):
        Subscriber("elsewhere", timeout=0.05)
    with Publisher("wrong", np.zeros(2)) as publisher:
        with pytest.raises(TypeError, match="cannot be pickled"):
            ray.put(publisher)
        with Subscriber("wrong", np.zeros(2)) as subscriber:
            with pytest.raises(TypeError, match="cannot be pickled"):
                ray.put(subscriber)
            with pytest.raises(RuntimeError, match="nothing has been published"):
                subscriber.read()
        with pytest.raises(RuntimeError, match="closed"):
            subscriber.update()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish()
    why = r"ConnectionError: ConnectionRefusedError: .*; through Ray, no answer within"
    with pytest.raises(TimeoutError, match=rf"process {os.getpid()} on .* was the last: {why}"):
        Subscriber("wrong", timeout=0.05)


def test_the_end_of_the_time_does_not_hide_why_a_publisher_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons: list[Exception] = [ConnectionError("the publisher has ended")]

    def connect(*_: object) -> None:
        raise reasons.pop() if reasons else ray.exceptions.GetTimeoutError("no answer within 0 s")

    monkeypatch.setattr(_subscriber, "connect", connect)
    Publisher("ended", np.zeros(2)).close()
    with pytest.raises(TimeoutError, match=r"ConnectionError: the publisher has ended$"):
        Subscriber("ended", timeout=0.2)


def test_a_newer_publisher_takes_over() -> None:
    weights = np.zeros(5)
    with Publisher("over", np.ones(5)) as old, Subscriber("over", weights) as subscriber:
        for _ in range(3):
            old.publish()
        assert subscriber.update()
        with Publisher("over", np.full(5, 2.0)) as new:
            with pytest.raises(
                SupersededError, match=f"'over' has taken over: process {os.getpid()}"
            ):
                old.publish()
            assert new.publish() == VERSIONS + 1
            wait_until(subscriber.update)
            assert (weights == 2.0).all()
            assert subscriber.version == VERSIONS + 1
            assert subscriber.behind == 0


def test_no_actor_is_asked_about_a_publisher_that_has_ended_and_has_a_successor() -> None:
    """To start the actor takes seconds, in which the successor would not be looked for."""
    Publisher("brief", np.ones(5)).close()
    ended = _names.find("brief")
    assert ended is not None
    with Publisher("brief", np.ones(5)) as successor:
        successor.publish()
        with pytest.raises(ConnectionError, match=r"another publisher has taken over from process"):
            _transports.connect("brief", ended, time.monotonic() + 60)
        with Subscriber("brief") as subscriber:
            assert subscriber.version == 0
            assert subscriber.read() is not None
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert not [name for name in actors if "proxy:brief" in name]


def test_the_last_weights_stay_until_a_newer_publisher_has_published() -> None:
    with Publisher("begins", np.ones(5)) as old, Subscriber("begins") as subscriber:
        old.publish()
        with Publisher("begins", np.full(7, 2.0)) as second:
            wait_until(lambda: subscriber._state._next is not None)
            assert next(iter(subscriber.read().values())).tolist() == [1.0] * 5
            assert second.version == 0
        with Publisher("begins", np.full(7, 3.0)) as third:
            wait_until(lambda: subscriber._state._next is not None)
            assert next(iter(subscriber.read().values())).tolist() == [1.0] * 5
            third.publish()
            wait_until(lambda: subscriber.behind == 1)
            assert next(iter(subscriber.read().values())).tolist() == [3.0] * 7
            assert subscriber.version == 2 * VERSIONS + 1


@pytest.mark.parametrize("way", ["", pytest.param("store", marks=pytest.mark.slow)])
def test_a_learner_that_is_killed_publishes_again(started: list[Any], way: str) -> None:
    name = f"restarts{way}"
    learner = remote_learner.options(max_restarts=-1).remote(name)
    actor = remote_actor.remote(name, way, max_age=600.0)
    started += [learner, actor]
    assert ray.get(learner.publish.remote(1.0)) == 1
    wait_until(lambda: ray.get(actor.update.remote()) == (True, 1, 1.0))
    for restart in (1, 2) if way else (1,):
        os.kill(ray.get(learner.pid.remote()), signal.SIGKILL)
        assert ray.get(actor.update.remote())[1:] == (VERSIONS * (restart - 1) + 1, float(restart))

        def publish(value: float = 1.0 + restart) -> Any:
            try:
                return ray.get(learner.publish.remote(value))
            except ray.exceptions.RayActorError:  # it has just died
                return None

        version = wait_until(publish)
        assert version == restart * VERSIONS + 1
        wait_until(lambda: ray.get(actor.update.remote())[0])
        assert ray.get(actor.update.remote()) == (False, version, 1.0 + restart)


@pytest.fixture
def relays(started: list[Any], request: pytest.FixtureRequest) -> list[Any]:
    """Relays as of three nodes, or as many as a test wants; there is no publisher yet."""

    def be_of(node: int, _: Any) -> None:
        _transports.this_node = lambda: f"node {node}"  # type: ignore[attr-defined]

    actor: Any = ray.remote(num_cpus=0, max_concurrency=8)(_transports.Relay)
    started += (made := [actor.remote("tree") for _ in range(getattr(request, "param", 3))])
    ray.get([one.__ray_call__.remote(functools.partial(be_of, k)) for k, one in enumerate(made)])
    return made


def test_a_relay_passes_weights_on_until_it_is_lost(relays: list[Any]) -> None:
    weights = np.ones(50_000)

    def read(relay: Any, least: int) -> float:
        end = time.monotonic() + 60
        _, address = ray.get(relay.serve.remote(0, end))
        source = SharedMemorySource("agent", 0, b"", PublicationAddress(*address), end)
        assert source.wait(least - 1, 60.0)
        news = source.take(0)
        assert news is not None
        (value,) = {*news[2].view(np.float64).tolist()}
        del news
        source.drop()
        source.close()
        return float(value)

    def parent_of(relay: Any) -> Any:
        return ray.get(relay.__ray_call__.remote(lambda one: one._source._pull._parent))

    with Publisher("tree", weights) as publisher:
        publisher.publish()
        assert [read(one, 1) for one in relays] == [1.0] * 3
        parents = [parent_of(one) for one in relays]
        (child,) = [k for k, parent in enumerate(parents) if parent is not None]
        parent = relays.index(parents[child])
        weights += 1
        publisher.publish()
        assert [read(one, 2) for one in relays] == [2.0] * 3
        ray.kill(relays[parent])
        weights += 1
        publisher.publish()
        left = [one for k, one in enumerate(relays) if k != parent]
        assert [read(one, 3) for one in left] == [3.0] * 2
        assert parent_of(relays[child]) != relays[parent]
        weights += 1
        with Publisher("tree", weights) as newer:
            version = newer.publish()
            assert [read(one, version) for one in left] == [4.0] * 2


@pytest.fixture
def relay(relays: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The relay of the node on which this process is said to be."""
    relay, shared_actor = relays[0], _shared_actor.shared_actor

    def shared(cls: type, *args: Any) -> Any:
        return relay if cls is _transports.Relay else shared_actor(cls, *args)

    monkeypatch.setattr(_transports, "this_node", lambda: "node 0")
    monkeypatch.setattr(_transports, "shared_actor", shared)
    return relay


def in_relay(relay: Any, name: str, value: Any) -> None:
    """Replace what the process of a relay uses under a name."""

    def replace(_: Any) -> None:
        vars(_transports)[name] = value

    ray.get(relay.__ray_call__.remote(replace))


def source_of_tree() -> Source:
    record = _names.find("tree")
    assert record is not None
    return _transports.connect("tree", record, time.monotonic() + 60)


def raised_frames(relay: Any) -> int:
    """Return the number of frames in the traceback of the error that a relay raises."""
    with pytest.raises(OSError, match="no memory") as raised:
        relay.serve(0, 0.0)
    return len(raised.traceback)


def no_server(nbytes: int) -> Any:
    raise OSError(errno.ENOMEM, "no memory")


@pytest.mark.parametrize("relays", [1], indirect=True)
def test_a_relay_without_memory_leaves_its_node_to_the_store_and_tries_again(relay: Any) -> None:
    in_relay(relay, "PublicationServer", no_server)
    with Publisher("tree", np.ones(3)) as publisher:
        publisher.publish()
        for _ in range(2):
            lacking = source_of_tree()
            assert (lacking.transport, lacking.newest) == ("store", publisher.version)
            lacking.close()
        assert len({ray.get(relay.__ray_call__.remote(raised_frames)) for _ in range(3)}) == 1
        in_relay(relay, "PublicationServer", _publication_server.PublicationServer)
        wait_until(lambda: ray.get(relay.__ray_call__.remote(lambda one: one._server is not None)))
        found = source_of_tree()
        assert found.transport == "agent"
        assert found.wait(publisher.version - 1, 60)
        found.close()
    in_relay(relay, "PublicationServer", no_server)
    for size, transport in [(3, "agent"), (5, "store"), (3, "agent")]:  # it has memory for 3
        with Publisher("tree", np.ones(size)) as publisher:
            publisher.publish()

            def is_reached(newest: int = publisher.version, way: str = transport) -> bool:
                with contextlib.suppress(TimeoutError):
                    source = source_of_tree()
                    source.wait(newest - 1, 1.0)
                    source.close()
                    return (source.transport, source.newest) == (way, newest)
                return False

            wait_until(is_reached)


@pytest.mark.parametrize("relays", [1], indirect=True)
def test_a_relay_that_reads_from_an_earlier_publisher_is_waited_for(relay: Any) -> None:
    with Publisher("tree", np.ones(3)) as earlier:
        earlier.publish()
        with Subscriber("tree", np.zeros(3)) as subscriber:
            assert subscriber.transport == "agent"
    in_relay(relay, "find", lambda name: None)  # it does not see a newer one
    with Publisher("tree", np.ones(5)) as newer, ThreadPoolExecutor(1) as pool:
        newer.publish()
        asked = pool.submit(Subscriber, "tree", np.zeros(5))
        time.sleep(1)
        assert not asked.done()
        in_relay(relay, "find", _names.find)
        with asked.result(60) as subscriber:
            assert subscriber.transport == "agent"
            wait_until(subscriber.update)


@pytest.mark.parametrize("relays", [1], indirect=True)
def test_a_relay_says_why_a_publisher_cannot_be_read(relays: list[Any]) -> None:
    Publisher("tree", np.ones(3)).close()
    text = r"this node: ConnectionError: ConnectionRefusedError: .* refused$"

    def is_told() -> bool:
        with pytest.raises(TimeoutError) as raised:
            _transports._relay_address(relays[0], 0, time.monotonic() + 0.5)
        return re.search(text, str(raised.value)) is not None

    wait_until(is_told)


@pytest.fixture
def proxy_here(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], _transports.Proxy]]:
    """A function that makes the proxy of a publisher in this process, without its thread."""
    monkeypatch.setattr(_transports, "_start", lambda *_: None)
    context = types.SimpleNamespace(current_actor=None)
    sources = list[SharedMemorySource]()

    def make(name: str) -> _transports.Proxy:
        record = _names.find(name)
        assert record is not None
        with monkeypatch.context() as patch:
            patch.setattr(ray, "get_runtime_context", lambda: context)
            proxy = _transports.Proxy(name, tuple(record))
        proxy.ping()
        assert proxy._source is not None
        sources.append(proxy._source)
        return proxy

    yield make
    for source in sources:
        source.close()


def test_a_proxy_stays_for_one_that_fetches_while_others_only_ask(
    proxy_here: Callable[[str], _transports.Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transports, "PULL", 0.0)
    with Publisher("fetched", np.ones(50_000)) as publisher:
        publisher.publish()
        proxy = proxy_here("fetched")
        begin = now = time.monotonic()
        _, _, told = proxy.newer(0)  # type: ignore[misc]
        assert isinstance(told, list)
        for _ in range(3):
            assert proxy.newer(publisher.version) == ()

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        clock = types.SimpleNamespace(now=lambda: now, sleep=sleep)
        monkeypatch.setattr(_transports, "_clock", clock)
        proxy._watch()
        assert now - begin >= patience_of(8 * 50_000)


def test_a_proxy_goes_on_after_a_failure_to_put_weights(
    proxy_here: Callable[[str], _transports.Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ArithmeticError

    with Publisher("put", np.ones(50_000)) as publisher:
        publisher.publish()
        proxy, errors = proxy_here("put"), list[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(ray, "put", fail)
            for _ in range(2):  # also while a traceback refers to the weights
                with pytest.raises(ArithmeticError) as raised:
                    proxy.newer(0)
                errors.append(raised)
        version, _, told = proxy.newer(0)  # type: ignore[misc]
        assert (version, (ray.get(told[0]).view(np.float64) == 1).all()) == (1, True)


def test_a_lack_of_descriptors_moves_no_subscriber_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS]
    lacks = [NoDescriptorsError(), *(OSError(number, "") for number in numbers)]

    def connection(*args: Any, **options: Any) -> PublicationConnection:
        if lacks:
            raise lacks.pop()
        return PublicationConnection(*args, **options)

    monkeypatch.setattr(_sources, "PublicationConnection", connection)
    with Publisher("short", np.ones(3)), Subscriber("short") as subscriber:
        assert (subscriber.transport, lacks) == ("shm", [])


@pytest.mark.parametrize("relays", [1], indirect=True)
@pytest.mark.parametrize("kind", [_transports.Relay, _transports.Proxy])
def test_an_actor_that_ends_as_it_is_found_is_looked_for_again(
    relays: list[Any], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, another process starts it meanwhile."""
    actor_class, failures = _shared_actor.actor_class, [*range(2 * _shared_actor._TRIES)]

    class Options:
        def __init__(self, cls: type) -> None:
            self.cls = cls

        def options(self, **options: Any) -> Any:
            self.all = options
            return self

        def remote(self, *args: Any) -> Any:
            if self.cls is kind and failures:
                failures.pop()
                raise ValueError("Failed to look up actor")
            if self.cls is _transports.Relay:
                return relays[0]
            return actor_class(self.cls).options(**self.all).remote(*args)

    monkeypatch.setattr(_shared_actor, "actor_class", Options)
    monkeypatch.setattr(_shared_actor, "_PAUSE", 0.0)
    if kind is _transports.Relay:
        monkeypatch.setattr(_transports, "this_node", lambda: "a" * 56)
    else:
        monkeypatch.setenv("FLATWEIGHTS_RAY", "store")
    with Publisher("tree", np.ones(3)), Subscriber("tree") as subscriber:
        assert failures == []
        assert subscriber.transport == ("agent" if kind is _transports.Relay else "store")


@pytest.mark.slow
def test_a_publisher_that_is_stopped_is_left_for_its_successor(started: list[Any]) -> None:
    learner = remote_learner.remote("stopped")
    started.append(learner)
    ray.get(learner.publish.remote(1.0))
    weights = {"w": np.zeros(1000)}
    with Subscriber("stopped", weights) as subscriber:
        pid = ray.get(learner.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            assert subscriber.update()
            assert not subscriber.update()
            with Publisher("stopped", {"w": np.full(1000, 2.0)}) as publisher:
                publisher.publish()
                wait_until(subscriber.update)
                assert (weights["w"] == 2.0).all()
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(SupersededError):
            wait_until(lambda: ray.get(learner.publish.remote(3.0)) is None)


def test_weights_that_are_too_old_are_refused() -> None:
    weights = np.zeros(3)
    with Publisher("age", np.ones(3)) as publisher:
        with Subscriber("age", weights, max_age=600.0) as patient:
            assert not patient.update()  # what is still to come is as old as the publisher
        with Subscriber("age", weights, max_age=1e-9) as subscriber:
            text = r"'age': nothing was published for .* s, expected at most 1e-09 s \(max_age\)"
            with pytest.raises(StaleWeightsError, match=text):
                subscriber.update()
            publisher.publish()
            with pytest.raises(StaleWeightsError, match="is silent"):
                subscriber.update()
            assert (weights == 0).all()
            with pytest.raises(StaleWeightsError):
                subscriber.read()
            publisher.close()

            def has_ended() -> bool:
                with pytest.raises(StaleWeightsError) as raised:
                    subscriber.update()
                return "has ended" in str(raised.value)

            wait_until(has_ended)
        assert subscriber.version == 0
    with Publisher("age", np.ones(3)) as publisher:
        publisher.publish()
        with Subscriber("age", max_age=1e-9) as subscriber:
            subscriber._state.source.transport = "agent"  # which says less of its publisher
            with pytest.raises(StaleWeightsError, match=r", has ended or is silent$"):
                subscriber.read()


def test_arrays_without_names_take_the_weights_by_position() -> None:
    with Publisher("order", {"b": np.full(2, 1.0), "a": np.full(3, 2.0)}) as publisher:
        publisher.publish()
        arrays = [np.zeros(2), np.zeros(3)]
        with Subscriber("order", arrays) as subscriber:
            assert subscriber.update()
            assert [array.tolist() for array in arrays] == [[1.0] * 2, [2.0] * 3]
            with pytest.raises(ValueError, match="out, against the published weights: "):
                subscriber.update(out=[np.zeros(3), np.zeros(2)])
        with Subscriber("order") as reader:
            assert [array.tolist() for array in reader.read().values()] == [[1.0] * 2, [2.0] * 3]
            assert repr(reader) == "<Subscriber of 'order', version 1, transport 'shm'>"


def test_weights_reach_other_nodes_and_a_successor_although_this_node_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Publisher("full", np.ones(3)) as publisher:
        publisher.publish()
        address, end = publisher._server.address, time.monotonic() + 60
        most = _core.PUBLICATION_READERS - 1
        readers = [PublicationConnection(address, end) for _ in range(most)]
        with pytest.raises(TimeoutError, match=f"the server of this node has {most} readers"):
            Subscriber("full", timeout=0.2)
        with monkeypatch.context() as patch:
            patch.setenv("FLATWEIGHTS_RAY", "store")
            with Subscriber("full") as subscriber:
                assert (subscriber.read()[""] == 1).all()
        with Publisher("full", np.ones(3)), pytest.raises(SupersededError):
            publisher.publish()
        for reader in readers:
            reader.close()


def test_threads_share_a_subscriber() -> None:
    source, target = np.zeros(5000), np.zeros(5000)
    with Publisher("threads", source) as publisher, Subscriber("threads", target) as subscriber:
        news = []
        is_over = threading.Event()

        def update() -> None:
            while not is_over.is_set():
                news.append(subscriber.update())

        threads = [threading.Thread(target=update) for _ in range(4)]
        for thread in threads:
            thread.start()
        for value in range(1, 200):
            source[:] = value
            publisher.publish()
        wait_until(lambda: subscriber.version == 199)
        is_over.set()
        for thread in threads:
            thread.join()
        assert (target == 199).all()
        assert 1 <= sum(news) <= 199


def test_ray_is_refused_in_a_fork() -> None:
    """Calls of Ray hang there, some of them without end, and then in the parent."""
    with (
        Publisher("forks", np.ones(3)) as publisher,
        Subscriber("forks", np.zeros(3)) as subscriber,
    ):
        publisher.publish()
        ref = ray.put(np.ones(3))
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            calls: list[Callable[[], object]] = [
                publisher.publish,
                subscriber.update,
                subscriber.read,
                lambda: Publisher("of a fork", np.ones(3)),
                lambda: Subscriber("forks", timeout=0.1),
                lambda: join("of a fork", rank=0, size=1, timeout=0.1),
                lambda: WorkerGroup.create(FlatWorker, 1),
                lambda: average([ref]),
            ]
            refused = []
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    refused.append(IN_FORK in str(error))
            subscriber.close()
            publisher.close()
            os._exit(0 if refused == [True] * len(calls) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert subscriber.update()
        assert publisher.publish() == 2
        assert subscriber.update()


@pytest.mark.slow
def test_updates_are_whole_while_learner_and_actors_are_stopped(started: list[Any]) -> None:
    learner = remote_learner.remote("whole", 30_000)
    ray.get(learner.publish.remote(1.0))
    actors = [remote_actor.remote("whole", "", 30_000) for _ in range(2)]
    started += [learner, *actors]
    pids = ray.get([process.pid.remote() for process in (learner, *actors)])
    learner.publish_for_ever.remote()
    running = [actor.update_many.remote(300) for actor in actors]
    for pid in itertools.cycle(pids):
        os.kill(pid, signal.SIGSTOP)
        left = ray.wait(running, num_returns=2, timeout=0.05)[1]
        os.kill(pid, signal.SIGCONT)
        if not left:
            break
    ray.get(running)
