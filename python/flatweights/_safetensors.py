"""Weights in a file: safetensors, with the layout and a checksum in its metadata."""

import errno
import io
import math
import os
import re
import secrets
import stat
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flatweights._layout import Layout, place_of

# Files of other programs have neither of these keys. A file with only one is damaged.
_LAYOUT = "flatweights.layout"
_CHECKSUM = "flatweights.crc32"

# The name under which the format keeps its metadata.
_RESERVED = "__metadata__"

_DTYPES: dict[str, np.dtype[Any]] = {
    code: np.dtype(dtype)
    for code, dtype in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "C64": "<c8",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        # New in ml_dtypes 0.5; TensorFlow 2.18.0 requires an older version.
        "F8_E8M0": getattr(ml_dtypes, "float8_e8m0fnu", None),
    }.items()
    if dtype is not None  # NumPy would read None as float64
}
_MOST_HEADER = 8 + 100_000_000  # bytes; the library refuses more
_KNOWN = frozenset(_DTYPES.values())


class SavedFile(NamedTuple):
    """The contents of a file.

    Attributes:
        layout: The layout of the buffer. For a file of another program its slots are sorted by
            name, since the file's own order has no meaning.
        buffer: The packed form of the parts.
        is_ours: Whether `write` wrote the file, so that the order of the slots has a meaning.
    """

    layout: Layout
    buffer: NDArray[np.uint8]
    is_ours: bool


class _Tensor(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # first byte in the file

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def write(path: str | os.PathLike[str], layout: Layout, buffer: NDArray[np.uint8]) -> None:
    """Write the packed ``buffer`` to a file; an existing file is replaced atomically.

    Args:
        path: The file. The target of a symbolic link is replaced, not the link.
        layout: Layout of the buffer.
        buffer: Packed form of the parts.

    Raises:
        OSError: If the file cannot be written; an existing file is unchanged then.
    """
    text = layout.to_json()
    tensors = {}
    checksum = zlib.crc32(text.encode())
    for slot in layout.slots:
        data = buffer[slot.offset : slot.offset + slot.nbytes]
        checksum = zlib.crc32(data.data, checksum)
        dtype, axes = _stored(slot.dtype)
        tensors[_key(slot.name)] = data.view(dtype).reshape(slot.shape + axes)
    _replace(path, tensors, {_LAYOUT: text, _CHECKSUM: f"{checksum:08x}"})


def read(path: str | os.PathLike[str]) -> SavedFile:
    """Read a file into memory and check all of it. Each byte is copied once.

    The file is not mapped: if another program truncated it, this process would die of SIGBUS.

    Args:
        path: A file that `write` wrote, or any other safetensors file.

    Raises:
        OSError: If it cannot be opened, or is not a regular file.
        ValueError: If it is not a safetensors file, is truncated, differs from what `write`
            wrote, or changes while it is read.
    """
    try:
        with _open(path) as file:
            return _read(file)
    except SafetensorError as error:
        expected = "expected a whole safetensors file, as save() writes"
        raise ValueError(f"{os.fspath(path)}: {expected}, got: {error}") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def _open(path: str | os.PathLike[str]) -> io.FileIO:
    # Opening or reading a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return io.FileIO(descriptor)  # which closes it: nobody else may, even after an interrupt
    os.close(descriptor)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "expected a file", os.fspath(path))


def _stored(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype in which a part of ``dtype`` is stored, and the axes that this adds."""
    if dtype in _KNOWN:
        return dtype, ()
    if dtype == np.dtype("<c16"):
        return np.dtype("<f8"), (2,)
    return np.dtype(np.uint8), (dtype.itemsize,)


def _key(name: str) -> str:
    """Return the unique name of the part called ``name`` in the file."""
    is_taken = name.startswith(_RESERVED) and not name[len(_RESERVED) :].strip("_")
    return f"{name}_" if is_taken else name


def _replace(
    path: str | os.PathLike[str], tensors: dict[str, NDArray[Any]], metadata: dict[str, str]
) -> None:
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    if target.exists() and not target.is_file():  # such as a device, which would be replaced
        code = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(code, "expected a file, or none", os.fspath(path))
    temporary = target.with_name(f".flatweights-{secrets.token_hex(8)}.tmp")
    try:
        # The library makes files private to their owner; this one gets the mode of the file that
        # it replaces, or that of a new file.
        temporary.open("xb").close()
        mode = stat.S_IMODE((target if target.exists() else temporary).stat().st_mode)
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
        _synchronise(temporary)
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except SafetensorError as error:
        # The tensors are valid, so the file is at fault; the message has the error number.
        match = re.search(r"os error (\d+)", str(error))
        code = int(match[1]) if match else errno.EIO
        reason = os.strerror(code) if match else str(error)
        raise OSError(code, reason, os.fspath(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    with suppress(OSError):
        # Some file systems do not support this, and some directories cannot be read. The new
        # file is complete; after a loss of power the file system may show the old one.
        _synchronise(target.parent)


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(file: io.FileIO) -> SavedFile:
    before = os.fstat(file.fileno())
    if before.st_size == 0:
        raise ValueError("expected a safetensors file, got an empty one")
    metadata, tensors = _header(file, before.st_size)
    is_ours = _LAYOUT in metadata or _CHECKSUM in metadata
    if is_ours:
        layout = _checked_layout(tensors, metadata)
    else:
        names = sorted(tensors)
        layout = Layout(names, [tensors[n].shape for n in names], [tensors[n].dtype for n in names])
    buffer = layout.new_buffer()
    checksum = zlib.crc32(metadata.get(_LAYOUT, "").encode())
    for slot in layout.slots:
        data = buffer[slot.offset : slot.offset + slot.nbytes]
        _fill(data.data, file, tensors[_key(slot.name) if is_ours else slot.name].begin)
        if is_ours:
            checksum = zlib.crc32(data.data, checksum)
    after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError(
            "expected a file that does not change, got one that changed while it was read"
        )
    if is_ours and metadata[_CHECKSUM] != f"{checksum:08x}":
        raise ValueError(f"expected checksum {metadata[_CHECKSUM]}, got {checksum:08x}")
    return SavedFile(layout, buffer, is_ours)


def _fill(target: memoryview, file: io.FileIO, begin: int) -> None:
    """Fill ``target`` from ``file``, starting at byte ``begin``."""
    file.seek(begin)
    while target:
        count = file.readinto(target)
        if not count:
            raise ValueError("expected a file that does not change, got one truncated while read")
        target = target[count:]


def _header(file: io.FileIO, size: int) -> tuple[dict[str, str], dict[str, _Tensor]]:
    """Return metadata and tensors in the file's order; the library refuses files with gaps."""
    begin = 8 + int.from_bytes(file.read(8), "little")
    # The library maps the file that it reads. So it gets a private sparse file of the same
    # size, which holds only a copy of the header.
    with _private_file() as private:
        os.truncate(private.fileno(), size)
        file.seek(0)
        private.write(file.read(min(begin, size, _MOST_HEADER)))
        private.flush()
        with safe_open(f"/dev/fd/{private.fileno()}", framework="np") as opened:
            metadata = opened.metadata() or {}
            tensors = {}
            for key in opened.offset_keys():
                tensor = opened.get_slice(key)
                code, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if code not in _DTYPES:
                    raise ValueError(f"tensor {key!r}: expected a dtype that NumPy has, got {code}")
                tensors[key] = _Tensor(_DTYPES[code], shape, begin)
                begin += math.prod(shape) * _DTYPES[code].itemsize
    return metadata, tensors


def _private_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("flatweights"), "w+b")
    return tempfile.TemporaryFile()


def _checked_layout(tensors: dict[str, _Tensor], metadata: dict[str, str]) -> Layout:
    """Return the layout in ``metadata``, after checking that ``tensors`` match it."""
    for key in (_LAYOUT, _CHECKSUM):
        if key not in metadata:
            raise ValueError(f"expected {key!r} in its metadata, got {sorted(metadata)}")
    layout = Layout.from_json(metadata[_LAYOUT])
    for i, slot in enumerate(layout.slots):
        tensor = tensors.get(_key(slot.name))
        dtype, axes = _stored(slot.dtype)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, slot.shape + axes):
            raise ValueError(
                f"{place_of(i, slot)}: expected {dtype} {slot.shape + axes}, got "
                f"{tensor or 'no such tensor'}"
            )
    if len(tensors) != len(layout):
        unknown = sorted(set(tensors) - {_key(name) for name in layout.names})
        raise ValueError(f"expected only the tensors of its layout, got also {unknown}")
    return layout
