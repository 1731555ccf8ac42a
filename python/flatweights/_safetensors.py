"""Weights in a file: safetensors, with the layout and a checksum in its metadata."""

import errno
import math
import mmap
import os
import re
import secrets
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flatweights._layout import Layout, place_of

# Either alone tells a damaged file from one of another program.
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
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
_KNOWN = frozenset(_DTYPES.values())


class Saved(NamedTuple):
    """What a file holds.

    Attributes:
        layout: The layout it was saved with; None for a file of another program.
        parts: By name, read-only views of the mapped file, not always aligned: in the order
            of the layout, or else of their names, as the file's own order has no meaning.
    """

    layout: Layout | None
    parts: dict[str, NDArray[Any]]


class _Tensor(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def write(path: str | os.PathLike[str], layout: Layout, buffer: NDArray[np.uint8]) -> None:
    """Write the packed ``buffer`` to a file, in place of what was there, all or nothing.

    Args:
        path: Where; what a symbolic link points to is replaced, not the link.
        layout: What lies where in the buffer.
        buffer: Packed form of the parts.

    Raises:
        OSError: If it cannot be written; the old file, if any, is untouched then.
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


def read(path: str | os.PathLike[str]) -> Saved:
    """Map a file into memory and check all of it. Each byte is read once; none is copied.

    Args:
        path: A file that `write` wrote, or any other safetensors file.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is no safetensors file, is truncated, or is not as `write` wrote it.
    """
    try:
        with Path(path).open("rb") as file:
            return _read(file.fileno())
    except SafetensorError as error:
        message = f"{os.fspath(path)}: expected a whole safetensors file, got: {error}"
        raise ValueError(message) from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def _stored(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return as what a part of ``dtype`` is stored, and the axes that this adds to it."""
    if dtype in _KNOWN:
        return dtype, ()
    if dtype == np.dtype("<c16"):
        return np.dtype("<f8"), (2,)
    return np.dtype(np.uint8), (dtype.itemsize,)


def _key(name: str) -> str:
    """Return the name in the file of the part called ``name``, another one for each."""
    is_taken = name.startswith(_RESERVED) and not name[len(_RESERVED) :].strip("_")
    return f"{name}_" if is_taken else name


def _replace(
    path: str | os.PathLike[str], tensors: dict[str, NDArray[Any]], metadata: dict[str, str]
) -> None:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device, for one, would be replaced
        code = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(code, "expected a file, or none", os.fspath(path))
    temporary = target.with_name(f".flatweights-{secrets.token_hex(8)}.tmp")
    try:
        # The library's files are their owner's alone; this one's mode is as the umask says.
        with temporary.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
        _synchronise(temporary)
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except SafetensorError as error:
        # The tensors are right, so it is the file; the library's message has the number.
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        reason = os.strerror(code) if found else str(error)
        raise OSError(code, reason, os.fspath(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    _synchronise_directory(target.parent)


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _synchronise_directory(path: Path) -> None:
    with suppress(OSError):
        # Some file systems cannot do that, some directories cannot be read. The file is in
        # place and whole; which of the two a loss of power leaves is up to the file system.
        _synchronise(path)


def _read(descriptor: int) -> Saved:
    if os.fstat(descriptor).st_size == 0:
        raise ValueError("expected a safetensors file, got an empty one")
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)
    # By descriptor: under the path there may be another file by now.
    with safe_open(f"/dev/fd/{descriptor}", framework="np") as file:
        metadata = file.metadata() or {}
        tensors = _tensors(file, data)
    if _LAYOUT not in metadata and _CHECKSUM not in metadata:
        parts = {key: _view(tensor, *tensor[:2]) for key, tensor in sorted(tensors.items())}
        return Saved(None, parts)
    layout = _checked_layout(tensors, metadata)
    parts = {s.name: _view(tensors[_key(s.name)], s.dtype, s.shape) for s in layout.slots}
    return Saved(layout, parts)


def _tensors(file: Any, data: NDArray[np.uint8]) -> dict[str, _Tensor]:
    """Return the tensors of ``file``, in its order: back to back, as the library has checked."""
    tensors = {}
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for key in file.offset_keys():
        described = file.get_slice(key)
        code, shape = described.get_dtype(), tuple(described.get_shape())
        if code not in _DTYPES:
            raise ValueError(f"tensor {key!r}: expected a dtype that NumPy has, got {code}")
        dtype = _DTYPES[code]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        tensors[key] = _Tensor(dtype, shape, data[begin:end])
    if end != data.size:
        raise ValueError(f"expected {end} bytes, got {data.size}")
    return tensors


def _checked_layout(tensors: dict[str, _Tensor], metadata: dict[str, str]) -> Layout:
    """Return the layout in ``metadata`` if ``tensors`` are what was saved with it."""
    for key in (_LAYOUT, _CHECKSUM):
        if key not in metadata:
            raise ValueError(f"expected {key!r} in its metadata, got {sorted(metadata)}")
    layout = Layout.from_json(metadata[_LAYOUT])
    checksum = zlib.crc32(metadata[_LAYOUT].encode())
    for i, slot in enumerate(layout.slots):
        tensor = tensors.get(_key(slot.name))
        dtype, axes = _stored(slot.dtype)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, slot.shape + axes):
            raise ValueError(
                f"{place_of(i, slot)}: expected {dtype} {slot.shape + axes}, got "
                f"{tensor or 'no such tensor'}"
            )
        checksum = zlib.crc32(tensor.data.data, checksum)
    if len(tensors) != len(layout):
        unknown = sorted(set(tensors) - {_key(name) for name in layout.names})
        raise ValueError(f"expected the tensors of its layout, got {unknown} besides")
    if metadata[_CHECKSUM] != f"{checksum:08x}":
        raise ValueError(f"expected checksum {metadata[_CHECKSUM]}, got {checksum:08x}")
    return layout


def _view(tensor: _Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    view: NDArray[Any] = np.ndarray(shape, dtype, tensor.data)
    return view
