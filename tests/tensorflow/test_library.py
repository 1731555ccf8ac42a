"""The op library: compiled once, cached for this user, never loaded for another TensorFlow."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from interrupts import handlers_end
from tf_forks import Fork, Forks

import flatweights as fw
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow.library import _cache, _compile, _load
from flatweights.tensorflow.library._cache import locked, private_folder
from flatweights.tensorflow.library._compile import LibraryError
from flatweights.tensorflow.library._load import build_library, load_library, status

# Moves weights in a number of processes, each of which reports the way.
USE = """
import json, multiprocessing, os, sys, warnings
from pathlib import Path
import flatweights as fw
import tensorflow as tf
from flatweights.tensorflow import TensorFlowVariables
from flatweights.tensorflow.library import _load
is_import_idle = _load._loaded is None and not Path(os.environ["FLATWEIGHTS_CACHE_DIR"]).exists()
_load.PACKAGED = Path(sys.argv[1])
before = _load.status()

def use():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        variables = TensorFlowVariables([tf.Variable([1.0, 2.0], name="w")])
        variables.add_flat([1.0, 1.0])
    told = json.dumps({
        "is_import_idle": is_import_idle,
        "before": before,
        "after": fw.show_config()["tensorflow path"],
        "unbound": variables.unbound,
        "weights": variables.get_flat().tolist(),
        "warnings": [str(warning.message) for warning in caught],
    })
    os.write(1, f"{told}\\n".encode())

count = int(sys.argv[2])
if count == 1:
    sys.exit(use())
processes = [multiprocessing.get_context("fork").Process(target=use) for _ in range(count)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
"""


class Used(NamedTuple):
    """The report of a process that moved weights."""

    is_import_idle: bool
    before: str
    after: str
    unbound: dict[str, str]
    weights: list[float]
    warnings: list[str]

    @property
    def library(self) -> Path:
        """The library by which the variables are bound."""
        assert (self.unbound, self.weights, self.warnings) == ({}, [2.0, 3.0], []), self
        return Path(self.after.removeprefix("bound variables, by "))


class Compiler:
    """A script that stands in for a compiler, and counts its calls."""

    def __init__(self, folder: Path, name: str, body: str) -> None:
        self.path = folder / name
        self._calls = folder / f"{name}.calls"
        self.path.write_text(f'#!/bin/sh\necho $$ >> "{self._calls}"\n{body}\n')
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[int]:
        """The process ids of its calls."""
        text = self._calls.read_text() if self._calls.exists() else ""
        return [int(line) for line in text.splitlines()]


def start(
    forks: Forks, package: Path, cache: Path, *, processes: int = 1, **environment: object
) -> Fork:
    own = {"FLATWEIGHTS_CACHE_DIR": cache, "TF_CPP_MIN_LOG_LEVEL": 3} | environment
    theirs = os.environ | {name: str(value) for name, value in own.items()}
    return forks.start(USE, package, processes, environment=theirs)


def use(forks: Forks, package: Path, cache: Path, **options: Any) -> tuple[list[Used], list[str]]:
    """Return the report of each process, and the lines that they have logged together."""
    process = start(forks, package, cache, **options)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return [Used(**json.loads(line)) for line in stdout.splitlines()], ours(stderr)


def ours(stderr: str) -> list[str]:
    """The lines that TensorFlow itself did not write."""
    return [line for line in stderr.splitlines() if "op library" in line]


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def copy_sources(folder: Path) -> Path:
    """Copy the sources, as in a wheel that was built without TensorFlow."""
    folder.mkdir()
    for source in _load.PACKAGED.iterdir():
        if source.suffix in (".cc", ".hpp"):
            shutil.copy(source, folder)
    return folder


def put_library(folder: Path, record: object) -> Path:
    """Put a file that cannot be loaded in the place of a library."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "_tf.so").write_text("garbage")
    (folder / "_tf.json").write_text(json.dumps(record))
    return folder / "_tf.so"


def is_open_as(descriptor: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the way open, instead of the fixture that forces each."""
    for name in ("FLATWEIGHTS_TENSORFLOW", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Sources without a library."""
    return copy_sources(tmp_path / "package")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The path of a cache that does not exist yet."""
    return tmp_path / "cache"


class Built(NamedTuple):
    package: Path
    cache: Path
    first: Used
    said: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Built:
    """A library that a process got from a compiler at its first use.

    The compiler has been called before, as the sources take long: it gives the library in use here.
    """
    load_library()
    compiled = Path(status().removeprefix("bound variables, by "))
    folder = tmp_path_factory.mktemp("built")
    package = copy_sources(folder / "package")
    (first,), said = use(forks, package, folder / "cache", CXX=copying(folder, compiled).path)
    return Built(package, folder / "cache", first, said)


def copying(folder: Path, library: Path) -> Compiler:
    """A stand-in that copies a compiler's result at once."""
    body = f'while [ "$1" != -o ]; do shift; done\nsleep 0.5\ncp "{library}" "$2"'
    return Compiler(folder, "copier", body)


@pytest.fixture
def copier(tmp_path: Path, built: Built) -> Compiler:
    return copying(tmp_path, built.first.library)


@pytest.fixture
def failing(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path, "failing", "echo 'library.cc:7: error: too old' >&2; exit 1")


@pytest.fixture
def new_process(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Forget the library's state in this process; for tests that load no library."""

    def forget() -> None:
        monkeypatch.setattr(_load, "_loaded", None)

    monkeypatch.setattr(_load, "PACKAGED", package)
    monkeypatch.setenv("FLATWEIGHTS_CACHE_DIR", str(cache))
    forget()
    yield forget
    assert not isinstance(_load._loaded, _load.Library)


def check_operations_serve(reason: str) -> str:
    """Check that one warning gives reason and remedy, and that weights are moved all the same."""
    first = tf.Variable([1.0, 2.0], name="w")
    with pytest.warns(RuntimeWarning, match="TensorFlow's operations") as caught:
        variables = TensorFlowVariables([first])
    (warning,) = caught
    text = str(warning.message)
    assert reason in text
    assert "run 'flatweights build-tf'" in text
    assert "set FLATWEIGHTS_TENSORFLOW=ops" in text
    assert warning.filename == __file__
    assert list(variables.unbound) == ["w"]
    np.testing.assert_array_equal(variables.get_flat(), [1, 2])
    variables.set_flat([3, 4])
    variables.add_flat([1, 1])
    np.testing.assert_array_equal(first.numpy(), [4, 5])
    second = TensorFlowVariables([tf.Variable(1)])  # and no second warning
    assert len(second.unbound) == 1
    assert fw.show_config()["tensorflow path"] == status()
    assert status().startswith("TensorFlow's operations, since its op library ")
    assert reason in status()
    return text


# First use


def test_first_use_compiles_and_says_so_in_one_line(built: Any) -> None:
    first = built.first
    assert first.is_import_idle
    assert first.before == "bound variables, once the first use has compiled the op library"
    assert first.library.is_relative_to(built.cache)
    assert tf.version.VERSION in first.library.parent.name
    assert built.said == [
        f"compiling the op library of flatweights for TensorFlow {tf.version.VERSION}, once, into "
        f"{first.library.parent}"
    ]
    assert mode(built.cache) == mode(first.library.parent) == 0o700


@pytest.mark.slow  # any first use without a cache, such as that of a new machine, does the same
def test_first_use_compiles_the_sources(forks: Forks, package: Any, cache: Any) -> None:
    (first,), said = use(forks, package, cache)
    assert first.library.is_relative_to(cache)
    assert len(said) == 1


SMALL = """
#include <tensorflow/c/tf_datatype.h>

extern "C" __attribute__((visibility("default"))) int half() {
  return static_cast<int>(TF_DataTypeSize(TF_HALF));
}
extern "C" int hidden() { return 1; }
"""


def test_the_compiler_finds_the_headers_and_the_library_of_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "library.cc").write_text(SMALL)
    library = ctypes.CDLL(str(_compile.compile_library(tmp_path, tmp_path)))
    assert library.half() == 2
    assert not hasattr(library, "hidden")


@pytest.mark.slow
def test_second_process_needs_no_compiler(forks: Forks, built: Any, failing: Any) -> None:
    (second,), said = use(forks, built.package, built.cache, CXX=failing.path, PATH="")
    assert second.library == built.first.library
    assert second.before == second.after
    assert said == failing.calls == []


@pytest.mark.slow
def test_several_processes_at_once_compile_once(
    forks: Forks, package: Any, cache: Any, copier: Any
) -> None:
    used, said = use(forks, package, cache, processes=4, CXX=copier.path)
    assert len(used) == 4
    assert len({each.library for each in used}) == len(said) == len(copier.calls) == 1


@pytest.mark.slow
def test_process_that_was_killed_while_compiling_is_made_up_for(
    forks: Forks, package: Any, cache: Any, copier: Any, tmp_path: Path
) -> None:
    stuck = Compiler(tmp_path, "stuck", "exec sleep 120")
    process = start(forks, package, cache, CXX=stuck.path)
    (orphan,) = wait_for(lambda: stuck.calls)
    try:
        process.kill()
        process.communicate()
        (work,) = cache.glob("*/compiling-*")
        (second,), said = use(forks, package, cache, CXX=copier.path)
        assert (second.library.parent, len(said)) == (work.parent, 1)
        # The compiler of the first still runs: it did not hold the lock.
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert {file.name for file in work.parent.iterdir()} == {"_tf.so", "_tf.json", "lock"}


def test_status_compiles_and_makes_nothing_and_tells_why_there_will_be_no_library(
    new_process: Any, cache: Any, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    for _ in range(2):
        assert status() == "bound variables, once the first use has compiled the op library"
    assert fw.show_config()["tensorflow path"] == status()
    assert failing.calls == []
    assert not cache.exists()
    monkeypatch.setenv("CXX", "/nonexistent")
    assert status() == (
        "TensorFlow's operations, since its op library cannot be compiled: "
        "the C++ compiler of CXX, '/nonexistent', was not found"
    )


# Several libraries in a wheel


@pytest.mark.slow
def test_library_for_this_tensorflow_is_chosen_among_those_of_a_wheel(
    forks: Forks, package: Any, cache: Any, built: Any, failing: Any
) -> None:
    wanted = _compile.identity(package)
    for other in ({"tensorflow": "2.0.0"}, {"git": "v2.0.0-rc0"}, {"machine": "Linux other"}):
        put_library(package / _compile.folder_name(wanted | other), wanted | other)
    bundled = package / _compile.folder_name(wanted)
    shutil.copytree(built.first.library.parent, bundled)
    (used,), said = use(forks, package, cache, CXX=failing.path)
    assert used.library == bundled / "_tf.so"
    assert used.before == used.after
    assert said == failing.calls == []
    assert not cache.exists()


def test_tensorflow_that_a_wheel_does_not_know_is_compiled_for(
    new_process: Any, package: Any, copier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copier.path))
    wanted = _compile.identity(package)
    put_library(package / _compile.folder_name(wanted), wanted | {"tensorflow": "2.0.0"})
    other = wanted | {"git": "v2.0.0-rc0"}
    put_library(package / _compile.folder_name(other), other)
    assert status() == "bound variables, once the first use has compiled the op library"
    assert build_library().parent == _load._cached(wanted)
    assert len(copier.calls) == 1


def test_library_can_be_compiled_for_a_tensorflow_that_is_not_installed(
    package: Any, tmp_path: Path, copier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copier.path))
    target = _compile.installed()._replace(version="9.9.9", git="v9.9.9", machine="Linux other")
    _compile.compile_library(package, tmp_path, target)
    record = json.loads((tmp_path / "_tf.json").read_text())
    here = _compile.identity(package)
    wanted = here | {"tensorflow": "9.9.9", "git": "v9.9.9", "machine": "Linux other"}
    assert {name: record[name] for name in wanted} == wanted
    assert _compile.folder_name(record) != _compile.folder_name(here)


# Libraries that must not be loaded


@pytest.mark.parametrize("key", ["tensorflow", "git", "flags", "machine", "sources"])
def test_library_that_is_for_something_else_is_not_found(
    key: Any, new_process: Any, package: Any
) -> None:
    wanted = _compile.identity(package)
    for folder in (package, package / _compile.folder_name(wanted), _load._cached(wanted)):
        put_library(folder, wanted)
        assert _load._folder_of_library(wanted) == folder
        put_library(folder, wanted).unlink()
        assert _load._folder_of_library(wanted) is None
        put_library(folder, wanted | {key: "other"})
        assert _load._folder_of_library(wanted) is None


def test_library_without_a_proper_record_or_not_as_it_was_compiled_is_not_found(
    new_process: Any, package: Any
) -> None:
    wanted = _compile.identity(package)
    record = put_library(package, wanted).with_suffix(".json")
    for text in (b"", b"[]", b"null", b"\xff", b"{"):
        record.write_bytes(text)
        assert _load._folder_of_library(wanted) is None
    record.unlink()
    assert _load._folder_of_library(wanted) is None
    folder = _load._cached(wanted)
    library = put_library(folder, wanted)
    put_library(folder, wanted | _compile._bytes_of(library))
    assert _load._folder_of_library(wanted) == folder
    for content in ("", "garb", "garbagf", "garbage more"):
        library.write_text(content)
        assert _load._folder_of_library(wanted) is None


def test_other_sources_and_other_tensorflows_have_their_own_places(
    new_process: Any, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {_load._cached(_compile.identity(package))}
    with (package / "library.cc").open("a") as file:
        file.write("// changed\n")
    places.add(_load._cached(_compile.identity(package)))
    monkeypatch.setattr(tf.version, "GIT_VERSION", "v9.9-rc")
    places.add(_load._cached(_compile.identity(package)))
    monkeypatch.setattr(tf.version, "VERSION", "9.9.9")
    places.add(_load._cached(_compile.identity(package)))
    assert len(places) == 4


@pytest.mark.parametrize("where", ["package", "cache"])
def test_corrupt_library_is_told_and_done_without(
    where: Any, new_process: Any, package: Any
) -> None:
    wanted = _compile.identity(package)
    library = put_library(package if where == "package" else _load._cached(wanted), wanted)
    text = check_operations_serve(f"its op library {library} cannot be loaded")
    assert "delete it, and it is compiled again" in text


# Where it cannot be compiled


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": ""}, "there is no C++ compiler (install g++ or clang++, or set CXX)"),
        ({"CXX": "/nonexistent/g++ -m64"}, "CXX, '/nonexistent/g++ -m64', was not found"),
        ({"CXX": "false"}, "false failed: no message"),
        ({"CXX": "g++ '"}, 'CXX is not a command, "g++ \'"'),
        ({"CXX": " ", "PATH": ""}, "there is no C++ compiler"),
    ],
)
def test_without_a_working_compiler_operations_serve(
    environment: Any, reason: Any, new_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_operations_serve(reason)


def test_without_headers_a_program_or_sources_operations_serve(
    new_process: Any, package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, compiler = tmp_path / "headers", tmp_path / "compiler"
    headers.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(tf.sysconfig, "get_include", lambda: str(headers))
        check_operations_serve(f"TensorFlow's headers are not in {headers}")
    new_process()
    compiler.write_text("garbage")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check_operations_serve(f"{compiler} did not run: ")
    new_process()
    shutil.rmtree(package)
    assert "No such file" in status()
    check_operations_serve("No such file")


def test_failure_is_remembered_and_told_by_each_process(
    new_process: Any,
    failing: Any,
    cache: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    for _ in range(3):
        check_operations_serve(f"{failing.path} failed: library.cc:7: error: too old")
        new_process()
        assert "error: too old" in status()
    assert len(failing.calls) == len(caplog.messages) == 1
    assert not list(cache.glob("*/compiling-*"))
    assert not list(cache.glob("*/_tf.*"))
    (failed,) = _load._cached(_compile.identity(_load.PACKAGED)).glob("failed.json")
    for k, record in enumerate((b"", b"[]", b"{}", b"\xff", b"null"), start=2):
        failed.write_bytes(record)  # it cannot be read, so it is tried again
        with pytest.raises(LibraryError):
            _load._load()
        assert len(failing.calls) == k


LINKER = "/usr/bin/ld: final link failed: No space left on device"
PASSING = {
    "the disk is full": (
        f"echo '{LINKER}' >&2; echo 'collect2: error: ld returned 1 exit status' >&2; exit 1",
        f" failed: {LINKER}",
    ),
    "no room for temporary files": (
        "echo 'x.s: Assembler messages:' >&2; "
        "echo \"x.s: Fatal error: cannot write x.o: 'No space left on device'\" >&2; exit 1",
        " failed: x.s: Fatal error: cannot write x.o: 'No space left on device'",
    ),
    "no memory": (
        "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
        " failed: virtual memory exhausted: Cannot allocate memory",
    ),
    "its compiler is killed": (
        "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        " failed: c++: fatal error: Killed signal terminated program cc1plus",
    ),
    "it is killed": ("kill -9 $$", " was killed by SIGKILL"),
    "it is killed by a real-time signal": ("kill -40 $$", " was killed by signal 40"),
    "the time is up": ("exec sleep 120", "timed out after 0.2 seconds"),
}


@pytest.mark.parametrize(
    "case",
    [
        "the disk is full",
        "it is killed",
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*PASSING][1:4]),
        "it is killed by a real-time signal",
        "the time is up",
    ],
)
def test_failure_that_may_pass_is_told_and_tried_again(
    case: str, new_process: Any, tmp_path: Path, copier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, reason = PASSING[case]
    compiler = Compiler(tmp_path, "passing", body)
    monkeypatch.setenv("CXX", str(compiler.path))
    with monkeypatch.context() as patched:
        if case == "the time is up":
            patched.setattr(_compile, "_TIMEOUT", 0.2)
        check_operations_serve(reason)
    new_process()
    assert status() == "bound variables, once the first use has compiled the op library"
    shutil.copy(copier.path, compiler.path)  # there is room again
    assert build_library(again=False).is_file()


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (["ld: cannot find -lx", "collect2: error: ld returned 1 exit status"], "cannot find -lx"),
        (["ld: no such symbol", "clang: error: linker command failed with exit code 1"], "symbol"),
        (["a.cc:7: warning: old", "a.cc:8: error: too old", "1 error"], "a.cc:8: error: too old"),
    ],
)
def test_the_cause_of_a_failure_is_told(
    errors: list[str],
    reason: str,
    new_process: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = "".join(f"echo '{line}' >&2\n" for line in errors) + "exit 1"
    monkeypatch.setenv("CXX", str(Compiler(tmp_path, "wrong", body).path))
    check_operations_serve(reason)
    new_process()
    assert "cannot be compiled" in status()


def test_build_or_another_compiler_tries_again_after_a_failure_and_then_forgets_it(
    new_process: Any, failing: Any, copier: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    for calls in (1, 2):
        with pytest.raises(LibraryError, match="error: too old"):
            build_library()
        assert len(failing.calls) == calls
    monkeypatch.setenv("CXX", str(copier.path))
    new_process()
    assert status() == "bound variables, once the first use has compiled the op library"
    assert _load._compile_into_cache(_compile.identity(_load.PACKAGED)).is_dir()
    assert (len(failing.calls), len(copier.calls)) == (2, 1)
    shutil.rmtree(cache)
    monkeypatch.setenv("CXX", str(failing.path))
    with pytest.raises(LibraryError, match="error: too old"):
        build_library()
    shutil.copy(copier.path, failing.path)  # mended
    built = build_library()
    assert {file.name for file in built.parent.iterdir()} == {"_tf.so", "_tf.json", "lock"}
    assert build_library() == built
    assert len(copier.calls) == 2
    assert status() == f"bound variables, by {built}"


def test_threads_at_once_compile_once_and_warn_once(
    new_process: Any, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    barrier = threading.Barrier(4)

    def first_use() -> None:
        barrier.wait()
        assert load_library() is None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=first_use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == len(failing.calls) == 1


# The setting


def test_bound_raises_where_it_cannot_be_had_and_an_unknown_setting_is_named(
    new_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "bound")
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"FLATWEIGHTS_TENSORFLOW=bound, but its op library .* was not found"
        ):
            TensorFlowVariables([tf.Variable(1.0)])
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "nonsense")
    with pytest.raises(ValueError, match=r"FLATWEIGHTS_TENSORFLOW: .*, got 'nonsense'"):
        TensorFlowVariables([tf.Variable(1.0)])
    assert "got 'nonsense'" in status()


def test_ops_neither_compiles_nor_warns(
    new_process: Any, failing: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "ops")
    variables = TensorFlowVariables([tf.Variable(1.0, name="w")])
    assert variables.get_flat() == [1]
    assert list(variables.unbound) == ["w"]
    assert status() == "TensorFlow's operations, since FLATWEIGHTS_TENSORFLOW=ops"
    assert failing.calls == []
    assert not cache.exists()


# The cache


def test_cache_is_looked_for_in_an_order_and_made_for_this_user_alone_only_to_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLATWEIGHTS_CACHE_DIR", raising=False)
    assert _cache.cache_folder() == tmp_path / ".cache" / "flatweights"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.cache_folder() == tmp_path / "xdg" / "flatweights"
    monkeypatch.setenv("FLATWEIGHTS_CACHE_DIR", str(tmp_path / "own"))
    assert _cache.cache_folder() == tmp_path / "own"
    assert private_folder(tmp_path / "a" / "b", make=False) == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b" / "c", make=True)
    finally:
        os.umask(before)
    assert [mode(path) for path in (made, *made.parents[:2])] == [0o700] * 3
    assert private_folder(made, make=True) == made


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o1777])
def test_cache_and_library_that_others_can_write_to_are_refused(
    bits: Any,
    new_process: Any,
    package: Any,
    cache: Any,
    failing: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    cache.mkdir()
    cache.chmod(bits)
    assert str(cache) in status()
    check_operations_serve(f"{cache} can be written to by another user: set FLATWEIGHTS_CACHE_DIR")
    with pytest.raises(LibraryError, match="chmod go-w"):
        build_library()
    assert failing.calls == []
    assert not list(cache.iterdir())
    new_process()
    cache.chmod(0o700)
    wanted = _compile.identity(package)
    library = put_library(_load._cached(wanted), wanted)
    library.parent.chmod(bits)
    check_operations_serve(f"{library.parent} can be written to by another user")


def test_cache_in_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    around = tmp_path / "around"
    around.mkdir()
    around.chmod(0o777)
    for make in (False, True):
        with pytest.raises(LibraryError, match=f"{around} can be written to by another user"):
            private_folder(around / "cache", make=make)
    assert not list(around.iterdir())
    around.chmod(0o1777)  # as /tmp: none but its owner can put something else in its place
    assert private_folder(around / "cache", make=True) == around / "cache"


@pytest.mark.parametrize(
    ("name", "members", "is_refused"),
    [("me", [], False), ("me", ["me"], False), ("me", ["me", "other"], True), ("users", [], True)],
)
def test_folder_around_may_be_of_a_group_of_one(
    name: Any, members: Any, is_refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    (tmp_path / "around").mkdir()
    (tmp_path / "around").chmod(0o775)
    with pytest.raises(LibraryError) if is_refused else contextlib.nullcontext():
        private_folder(tmp_path / "around" / "cache", make=True)
    with pytest.raises(LibraryError):  # a library is never loaded from a folder of a group
        private_folder(tmp_path / "around", make=True)


def test_folder_of_another_user_is_refused_unless_it_is_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("takes root, to give a folder away")
    (tmp_path / "theirs" / "cache").mkdir(parents=True)
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(LibraryError, match=f"{tmp_path}/theirs belongs to another user: set FLATW"):
        private_folder(tmp_path / "theirs", make=True)
    with pytest.raises(LibraryError, match=f"{tmp_path}/theirs belongs to another user"):
        private_folder(tmp_path / "theirs" / "cache", make=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert private_folder(tmp_path, make=False) == tmp_path


def test_links_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert private_folder(tmp_path / "link" / "a", make=True) == tmp_path / "real" / "a"
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(LibraryError, match=f"{tmp_path}/real can be written to"):
        private_folder(tmp_path / "link" / "a", make=False)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LibraryError, match="loop"):
        private_folder(tmp_path / "loop", make=True)


def test_cache_that_cannot_be_used_is_told(
    new_process: Any, cache: Any, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    cache.touch()
    check_operations_serve(f"{cache} is not a folder: set FLATWEIGHTS_CACHE_DIR to a folder")
    new_process()
    cache.unlink()
    folder = _load._cached(_compile.identity(package))
    folder.mkdir(parents=True)
    (folder / "lock").mkdir()  # root can write even without the permission
    check_operations_serve(f"{folder} cannot be written to: Is a directory")
    new_process()
    monkeypatch.setenv("FLATWEIGHTS_CACHE_DIR", "/proc/flatweights")
    check_operations_serve("cannot be used: [Errno 2] No such file or directory: '/proc/flatw")
    new_process()
    monkeypatch.delenv("FLATWEIGHTS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    check_operations_serve("there is no home folder")


def test_lock_is_free_while_a_fork_goes_on(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with locked(tmp_path):
        # The child keeps its copy of the open file until the pipe is closed.
        lock = (tmp_path / "lock").stat()
        held = [fd for fd in range(3, 1024) if is_open_as(fd, lock)]
        child = subprocess.Popen(["sh", "-c", "read line"], stdin=reader, pass_fds=held)
    try:
        other = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        subprocess.run([sys.executable, "-c", other, tmp_path / "lock"], check=True)
        assert child.poll() is None
    finally:
        os.close(reader)
        os.close(writer)
        child.wait()


# The program


@pytest.mark.slow
def test_sources_are_compiled_by_a_program(
    forks: Forks, package: Any, tmp_path: Path, copier: Any
) -> None:
    folder = tmp_path / "a" / "b"
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = os.environ | {"CXX": str(copier.path)}
    done = forks.run(program, _compile.__file__, package, folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in folder.iterdir()} == {"_tf.so", "_tf.json"}
    assert _compile.is_for_this(folder, _compile.identity(package))


def test_program_that_fails_says_why(
    package: Any,
    tmp_path: Path,
    failing: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", str(failing.path))
    monkeypatch.setattr(sys, "argv", ["_compile.py", str(package), str(tmp_path / "folder")])
    assert _compile.main() == 1
    assert capsys.readouterr().err == (
        f"the op library for TensorFlow: {failing.path} failed: library.cc:7: error: too old\n"
    )
    assert not list((tmp_path / "folder").iterdir())


def test_a_signal_handler_does_not_wait_for_the_call_that_it_interrupts() -> None:
    def load_again() -> None:
        with contextlib.suppress(RuntimeError):
            load_library()

    assert handlers_end(load_library, load_again)
