"""Weights in files: round trips, refused files, and the remains of a failed save."""

import io
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import (
    MOVED,
    assert_parts,
    clean_environment,
    dtype_id,
    numpy_forks,
    random_array,
    run_python,
    same_bits,
)

from flatweights import FlatWeights, Layout

FLOAT8 = tuple(
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float8_e3m4",
        "float4_e2m1fn",
    )
    if hasattr(ml_dtypes, name)  # before 0.5, which TensorFlow 2.18 needs, it has fewer
)
EVERY = tuple(dict.fromkeys(MOVED + FLOAT8))
# Those that the library turns into arrays by itself.
PLAIN = tuple(np.dtype(code) for code in ("?", *"bBhHiIlLefdF"))

names = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.builds("__metadata_{}".format, st.text("_", max_size=3)),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[np.dtype[Any], ...] = EVERY) -> np.ndarray:
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**32))
    shape = draw(shapes)
    if dtype in FLOAT8:
        return np.random.default_rng(seed).integers(0, 16, shape).astype(np.uint8).view(dtype)
    return np.asarray(random_array(np.random.default_rng(seed), shape, dtype))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


@pytest.fixture
def weights(rng: np.random.Generator) -> FlatWeights:
    """Weights in an order that is not the file's, with special names, shapes and dtypes."""
    return FlatWeights(
        {
            "z/kernel": random_array(rng, (5, 3), np.dtype(np.float32)),
            "a/bias": random_array(rng, 3, np.dtype(np.float64)),
            "step": np.int64(2**40 + 1),
            "brain": random_array(rng, 3, np.dtype(ml_dtypes.bfloat16)),
            "none": np.zeros((0, 3), np.float16),
            "__metadata__": random_array(rng, 2, np.dtype(np.complex128)),
            "flag": np.array([True, False, True]),
            'Größe "1"\n': random_array(rng, (2, 2), np.dtype(np.float32)),
        }
    )


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size])  # type: ignore[no-any-return]


def with_header(path: Path, header: dict[str, Any], padding: int = 0) -> None:
    """Give the file another header."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def refused(path: Path, match: str = ".") -> None:
    """Expect that `load` refuses the file by a `ValueError` that names it."""
    with pytest.raises(ValueError, match=match) as error:
        FlatWeights.load(path)
    assert str(error.value).startswith(f"{path}: ")


# Round trips.


def test_what_is_saved_comes_back_and_is_independent_of_the_file(
    weights: FlatWeights, path: Path
) -> None:
    weights.save(path)
    loaded = FlatWeights.load(path)
    assert type(loaded) is FlatWeights
    assert loaded.layout == weights.layout
    assert_parts(loaded, weights)
    assert loaded.buffer.tobytes() == weights.buffer.tobytes()  # padding zero
    path.write_bytes(b"")  # pages of a mapped file that is cut short end the process
    assert_parts(loaded, weights)
    loaded["step"] = 3
    assert loaded["step"] == 3


@pytest.mark.parametrize("dtype", EVERY, ids=dtype_id)
def test_each_dtype_comes_back(dtype: np.dtype[Any], path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {
        str(i): random_array(rng, shape, dtype)
        if dtype not in FLOAT8
        else rng.integers(0, 16, shape).astype(np.uint8).view(dtype)
        for i, shape in enumerate([(3, 5), (1,), (0, 2), (7,)])
    }
    FlatWeights(parts).save(path)
    assert_parts(FlatWeights.load(path), parts)


@settings(max_examples=30)
@given(st.dictionaries(names, arrays(), max_size=6))
def test_any_weights_come_back(tmp_path_factory: Any, parts: dict[str, np.ndarray]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    FlatWeights(parts).save(path)
    loaded = FlatWeights.load(path)
    assert loaded.layout == Layout.of(parts)
    assert_parts(loaded, parts)


@settings(max_examples=30)
@given(st.dictionaries(names, arrays(PLAIN), max_size=6))
def test_the_library_reads_what_is_saved(tmp_path_factory: Any, parts: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "library.safetensors"
    FlatWeights(parts).save(path)
    read = safetensors.numpy.load_file(path)
    # The format has no tensor called __metadata__.
    keys = {n: f"{n}_" if n.startswith("__metadata__") else n for n in parts}
    assert sorted(read) == sorted(keys.values())
    for name, array in parts.items():
        assert same_bits(np.asarray(read[keys[name]]), array), name


def test_what_the_format_has_no_dtype_for_is_stored_otherwise(path: Path) -> None:
    values = np.array([[1 + 2j, 3 - 4j]])
    weights = FlatWeights({"c": values, "big": np.array([1.5], ">f4")})
    weights.save(path)
    read = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(read["c"], [[[1, 2], [3, -4]]], strict=False)
    assert read["c"].dtype == np.float64
    assert read["big"].tobytes() == struct.pack(">f", 1.5)
    assert_parts(FlatWeights.load(path), weights)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, *[d for d in FLOAT8 if "8" in d.name][:5]])
def test_bfloat16_and_float8_have_their_own_name_in_the_file(dtype: Any, path: Path) -> None:
    FlatWeights({"w": np.zeros(3, dtype)}).save(path)
    code = header_of(path)["w"]["dtype"]
    assert code == {"bfloat16": "BF16", "float8_e8m0fnu": "F8_E8M0"}.get(
        np.dtype(dtype).name, np.dtype(dtype).name.upper().replace("FLOAT", "F").removesuffix("FN")
    )


@settings(max_examples=30)
@given(st.dictionaries(names, arrays(PLAIN), max_size=6), st.integers(0, 9))
def test_files_of_other_programs_are_read(
    tmp_path_factory: Any, parts: dict[str, np.ndarray], padding: int
) -> None:
    parts = {name: array for name, array in parts.items() if name != "__metadata__"}
    path = tmp_path_factory.getbasetemp() / "foreign.safetensors"
    safetensors.numpy.save_file(parts, path, metadata={"format": "np"})
    with_header(path, header_of(path), padding)  # some write headers that align nothing
    loaded = FlatWeights.load(path)
    assert_parts(loaded, dict(sorted(parts.items())))


def test_a_dtype_that_numpy_has_not_is_refused(path: Path) -> None:
    safetensors.serialize_file(
        {
            "w": safetensors.TensorSpec(
                dtype="float4_e2m1fn_x2", shape=[2], data_ptr=np.zeros(2).ctypes.data, data_len=2
            )
        },
        path,
    )
    refused(path, "tensor 'w': expected a dtype that NumPy has, got F4")


def test_weights_over_any_buffer_are_saved(weights: FlatWeights, path: Path) -> None:
    buffer = weights.buffer.copy()
    buffer[weights.layout["a/bias"].offset + 24 :][:40] = 1  # padding that is not zero
    buffer.setflags(write=False)
    FlatWeights.wrap(buffer, weights.layout).save(path)
    assert_parts(FlatWeights.load(path), weights)


def test_names_by_position_stay_so(path: Path) -> None:
    layout = Layout.of([np.zeros(3), np.zeros(2)])
    FlatWeights.wrap(layout.new_buffer(), layout).save(path)
    assert FlatWeights.load(path).layout == layout
    assert not FlatWeights.load(path).layout.named


def test_equal_weights_make_equal_files(weights: FlatWeights, tmp_path: Path) -> None:
    weights.save(tmp_path / "a")
    weights.copy().save(str(tmp_path / "b"))
    layouts = {json.dumps(header_of(tmp_path / name), sort_keys=True) for name in "ab"}
    assert len(layouts) == 1


def test_importing_flatweights_does_not_import_the_library() -> None:
    code = "import flatweights, sys; print('safetensors' in sys.modules)"
    assert run_python(code).split() == ["False"]


# Refusals.


def test_a_file_cut_short_anywhere_is_refused(weights: FlatWeights, path: Path) -> None:
    weights.save(path)
    whole = path.stat().st_size
    os.truncate(path, whole + 1)
    refused(path)
    for size in reversed(range(whole)):
        os.truncate(path, size)
        refused(path)


def test_a_changed_byte_anywhere_is_refused_or_changes_nothing(
    weights: FlatWeights, path: Path
) -> None:
    weights.save(path)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    text = content[8 : 8 + size].rstrip()
    harmless = []
    with path.open("r+b", buffering=0) as file:
        for i, byte in enumerate(content):
            space = {ord("\n")} if i < 8 + size else set()  # only text may have some more
            for other in {byte ^ 1 << i % 8, *space} - {byte}:
                os.pwrite(file.fileno(), bytes([other]), i)
                try:
                    loaded = FlatWeights.load(path)
                except ValueError:
                    pass
                else:
                    assert_parts(loaded, weights)
                    harmless.append(i)
            os.pwrite(file.fileno(), bytes([byte]), i)
    # The spaces that fill up the header can become other white space.
    assert harmless == list(range(8 + len(text), 8 + size))


def test_changed_values_and_places_are_refused_by_the_checksum(path: Path) -> None:
    FlatWeights({"a": np.zeros(3), "b": np.ones(3)}).save(path)
    header = header_of(path)
    header["a"], header["b"] = header["b"], header["a"]
    with_header(path, header)
    refused(path, "checksum")
    FlatWeights({"a": np.zeros(3), "b": np.ones(3)}).save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused(path, "expected checksum [0-9a-f]{8}, got [0-9a-f]{8}")


def changed_layout(header: dict[str, Any], **change: Any) -> None:
    layout = json.loads(header["__metadata__"]["flatweights.layout"])
    layout["slots"][0].update(change)
    header["__metadata__"]["flatweights.layout"] = json.dumps(layout)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h["__metadata__"].pop("flatweights.layout"), "expected 'flatweights.layout'"),
        (lambda h: h["__metadata__"].pop("flatweights.crc32"), "expected 'flatweights.crc32'"),
        (lambda h: h.update(c=h.pop("b")), r"slot 1 'b': expected float32 \(3,\), got no such"),
        (lambda h: h["b"].update(dtype="I32"), r"float32 \(3,\), got int32 \(3,\)"),
        (lambda h: h["b"].update(shape=[3, 1]), r"float32 \(3,\), got float32 \(3, 1\)"),
        (lambda h: h.update(c={**h["b"], "shape": [0], "data_offsets": [60, 60]}), r"\['c'\]"),
        (lambda h: changed_layout(h), "checksum"),  # white space is enough
        (lambda h: changed_layout(h, dtype="|O"), "not a layout"),
        (lambda h: changed_layout(h, shape=[-6]), "not a layout"),
        (lambda h: changed_layout(h, shape=[2**62]), "not a layout"),
        (lambda h: changed_layout(h, offset=64), "not a layout"),
        (lambda h: changed_layout(h, name="x"), "not a layout"),
        (lambda h: h["a"].update(data_offsets=[0, 2**63]), "whole safetensors file"),
        (lambda h: h["a"].update(data_offsets=[8, 56]), r"file, as save\(\) writes, got: "),
        (lambda h: h["a"].update(shape=[2**33, 2**33]), "whole safetensors file"),
    ],
)
def test_a_header_that_does_not_agree_is_refused(path: Path, change: Any, match: str) -> None:
    FlatWeights({"a": np.zeros((2, 3)), "b": np.ones(3, np.float32)}).save(path)
    header = header_of(path)
    change(header)
    with_header(path, header)
    refused(path, match)


@given(st.binary(max_size=64))
def test_garbage_is_refused(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    path.write_bytes(content)
    refused(path, "expected a")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"flatweights.layout":"x","flatweights.crc32":"0"}}',
        b"{" * 10_000,
    ],
)
def test_a_header_of_garbage_or_of_another_size_is_refused(header: bytes, path: Path) -> None:
    for size in (len(header), 2**63):
        path.write_bytes(struct.pack("<Q", size) + header)
        refused(path)


def test_missing_files_directories_and_pipes_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        FlatWeights.load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        FlatWeights.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="expected a file"):
        FlatWeights.load(tmp_path / "pipe")


def test_an_interrupt_while_a_file_is_opened_closes_no_file_twice(
    weights: FlatWeights, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = io.FileIO

    def interrupted(descriptor: int) -> None:
        made(descriptor).close()  # by then, another thread may have opened one of this number
        raise KeyboardInterrupt

    weights.save(path)
    monkeypatch.setattr(io, "FileIO", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FlatWeights.load(path)


@pytest.mark.parametrize("size", [0, 8, 4096, 1_000_000])
def test_a_file_that_is_cut_short_while_it_is_loaded_is_refused(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatweights import _safetensors

    FlatWeights({"a": np.ones(1000), "b": np.ones(1_000_000)}).save(path)
    original = _safetensors._header

    def header(*args: Any) -> Any:
        found = original(*args)
        os.truncate(path, size)
        return found

    monkeypatch.setattr(_safetensors, "_header", header)
    with pytest.raises(ValueError, match="a file that does not change"):
        FlatWeights.load(path)


def test_a_file_that_is_written_while_it_is_loaded_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatweights import _safetensors

    safetensors.numpy.save_file({"a": np.zeros(1000)}, path)  # without a checksum
    os.utime(path, ns=(0, 0))
    original = _safetensors._fill

    def fill(*args: Any) -> None:
        original(*args)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")

    monkeypatch.setattr(_safetensors, "_fill", fill)
    with pytest.raises(ValueError, match="got one that changed while it was read"):
        FlatWeights.load(path)


def test_a_file_that_is_overwritten_while_it_is_loaded_is_refused_or_whole(path: Path) -> None:
    # Files of other programs have no checksum.
    code = """
import os, sys, threading
import numpy as np, safetensors.numpy
from flatweights import FlatWeights
path = sys.argv[1]
safetensors.numpy.save_file({"a": np.zeros(500_000)}, path)
content = open(path, "rb").read()
stop = threading.Event()
def overwrite():
    while not stop.is_set():
        with open(path, "wb") as file:
            file.write(content)
writer = threading.Thread(target=overwrite)
writer.start()
for _ in range(200):
    try:
        assert FlatWeights.load(path)["a"].shape == (500_000,)
    except ValueError:
        pass
stop.set()
writer.join()
"""
    assert numpy_forks().run(code, path).returncode == 0


# The remains of a save.


def listing(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ("w" * 255)  # the longest name
    for value in range(3):
        FlatWeights({"w": np.full(10 - value, value)}).save(path)
    assert FlatWeights.load(path)["w"].tolist() == [2] * 8
    assert listing(path.parent) == [path.name]


def test_a_reader_keeps_the_file_that_was_replaced(path: Path) -> None:
    from flatweights import _safetensors

    FlatWeights({"w": np.zeros(3)}).save(path)
    saved = _safetensors.read(path)
    FlatWeights({"w": np.ones(3)}).save(path)
    assert saved.is_ours
    assert FlatWeights.wrap(saved.buffer, saved.layout)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_is_as_the_umask_says(path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        FlatWeights({"w": np.zeros(3)}).save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_its_mode_when_it_is_replaced(path: Path, mode: int) -> None:
    for number in range(2):
        FlatWeights({"w": np.full(3, number)}).save(path)
        if number == 0:
            path.chmod(mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert FlatWeights.load(path)["w"].tolist() == [1, 1, 1]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("runs/7")
    for value in (1, 2):  # the first time it points to nothing
        FlatWeights({"w": np.full(3, value)}).save(link)
        assert link.is_symlink()
        assert FlatWeights.load(tmp_path / "runs" / "7")["w"][0] == value
    assert listing(tmp_path / "runs") == ["7"]
    assert listing(tmp_path) == ["latest", "runs"]
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match="symbolic links"):
        FlatWeights({}).save(link)
    assert link.is_symlink()


def test_what_is_no_file_is_not_replaced(weights: FlatWeights, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="folder"):
        weights.save(tmp_path / "folder")
    with pytest.raises(OSError, match=r"expected a file, or none: '.*/pipe'"):
        weights.save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none" / "w"))):
        weights.save(tmp_path / "none" / "w")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/w"):
        weights.save(tmp_path / "file" / "w")
    assert listing(tmp_path) == ["file", "folder", "pipe"]


# Each stage of a save, by the function that it calls.
STAGES = ["save_file", "_synchronise"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(5, "bad disk")])
def test_whatever_fails_the_old_file_stays(
    path: Path, stage: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatweights import _safetensors

    FlatWeights({"w": np.zeros(3)}).save(path)
    before = path.read_bytes()
    original = getattr(_safetensors, stage)

    def fail(*args: Any) -> None:
        original(*args)
        raise error

    monkeypatch.setattr(_safetensors, stage, fail)
    with pytest.raises(error if isinstance(error, type) else OSError):
        FlatWeights({"w": np.ones(9)}).save(path)
    assert path.read_bytes() == before
    assert listing(path.parent) == [path.name]


def test_a_folder_that_cannot_be_brought_to_the_disk_is_no_failure(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    FlatWeights({"w": np.zeros(3)}).save(path)
    assert FlatWeights.load(path)["w"].size == 3


SAVE_TOO_MUCH = """
import os, resource, signal, sys
import numpy as np
from flatweights import FlatWeights

path = sys.argv[1]
FlatWeights({"w": np.arange(1000.0)}).save(path)
if sys.argv[2] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    FlatWeights({"v": np.zeros(1 << 20), "w": np.zeros(1 << 20)}).save(path)
except OSError as error:
    print(error.errno, error.filename == path)
print(os.listdir(os.path.dirname(path)) == [os.path.basename(path)])
print(FlatWeights.load(path)["w"].sum())
FlatWeights({"w": np.ones(1000)}).save(path)
print(FlatWeights.load(path)["w"].sum())
"""


def test_a_file_that_grows_too_large_leaves_the_old_one(path: Path) -> None:
    done = numpy_forks().run(SAVE_TOO_MUCH, path, "limit", environment=clean_environment())
    assert done.stdout.split() == ["27", "True", "True", "499500.0", "1000.0"], done.stderr


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    # A disk of 1 MB, in a namespace of its own: no other process sees it.
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m none '{path.parent}'"
    try:
        allowed = subprocess.run([*own, mount], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no namespaces for processes here")
    done = subprocess.run(
        [*own, f'{mount} && "$0" -c "$1" "$2" disk', sys.executable, SAVE_TOO_MUCH, path],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    assert done.stdout.split() == ["28", "True", "True", "499500.0", "1000.0"], done.stderr


SAVE_FOREVER = """
import os, sys
import numpy as np
from flatweights import FlatWeights

value, parts = 0.0, {f"w{i}": np.zeros(1 << 18) for i in range(4)}
weights = FlatWeights(parts)
while True:
    for name in weights:
        weights[name].fill(value)
    weights.save(sys.argv[1])
    value += 1
    os.write(1, b".")
"""


def test_a_process_killed_at_any_moment_leaves_a_whole_file(path: Path) -> None:
    rng = np.random.default_rng(1)
    left = set()
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, path],
            stdout=subprocess.PIPE,
            env=clean_environment(),
        )
        assert process.stdout is not None
        assert process.stdout.read(2) == b".."
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        loaded = FlatWeights.load(path)
        assert len({float(value) for array in loaded.values() for value in array[[0, -1]]}) == 1
        left |= set(listing(path.parent)) - {path.name}
    assert all(name.startswith((".flatweights-", ".tmp")) for name in left)


KILLED_IN = """
import os, signal, sys
import numpy as np
from flatweights import FlatWeights, _safetensors

FlatWeights({"w": np.zeros(3)}).save(sys.argv[1])
original = getattr(_safetensors, sys.argv[2])

def die(*args):
    original(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(_safetensors, sys.argv[2], die)
FlatWeights({"w": np.ones(9)}).save(sys.argv[1])
"""


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_killed_before_the_end_leaves_the_old_file(path: Path, stage: str) -> None:
    done = numpy_forks().run(KILLED_IN, path, stage, environment=clean_environment())
    assert done.returncode == -signal.SIGKILL
    assert FlatWeights.load(path)["w"].tolist() == [0, 0, 0]
    assert len(listing(path.parent)) == 2  # the unfinished file is left


def test_any_number_of_threads_may_save_and_load_one_file(path: Path) -> None:
    FlatWeights({f"w{i}": np.full(5000, -1.0) for i in range(3)}).save(path)
    start, failures = threading.Barrier(6), []

    def save(value: float) -> None:
        mine = FlatWeights({f"w{i}": np.full(5000, value) for i in range(3)})
        start.wait()
        for _ in range(5):
            mine.save(path)

    def load() -> None:
        start.wait()
        for _ in range(20):
            loaded = FlatWeights.load(path)  # never refused, never mixed
            if len({float(x) for array in loaded.values() for x in array}) != 1:
                failures.append(loaded)

    def run(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(save, float(i))) for i in range(3)]
    threads += [threading.Thread(target=run, args=(load,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert listing(path.parent) == [path.name]
