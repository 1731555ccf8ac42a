"""The op library that binds variables: found, compiled once if necessary, and loaded.

A wheel contains one library per TensorFlow release that it supports; a package that was built
beside a TensorFlow contains one for that. For any other TensorFlow, the first use compiles it
into the user's cache, which takes seconds, once per version.
"""

import json
import logging
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from flatweights import _core
from flatweights._locks import CallLock
from flatweights.tensorflow.library._cache import cache_folder, locked, private_folder
from flatweights.tensorflow.library._compile import (
    LIBRARY,
    WORK_PREFIX,
    LibraryError,
    compile_library,
    find_compiler,
    folder_name,
    identity,
    is_for_this,
)

SETTING = "FLATWEIGHTS_TENSORFLOW"
"""Environment variable: ``bound`` requires the library, ``ops`` does not use it."""

PACKAGED = Path(_core.__file__).parent / "_tf"
"""The library's sources in the package, and libraries that came with it.

A library from the package's build lies in this folder itself, those of a wheel in subfolders
named by `folder_name`.
"""

_FAILED = "failed.json"
_log = logging.getLogger("flatweights")


class Library(NamedTuple):
    """The op library in this process.

    Attributes:
        path: Where it was loaded from.
        bind: The function that adds the op that binds: resource handle in, int64 (3,) out.
        call: The function that adds the op that has a `_core.PythonCall` compute tensors.
        end_copy_on_read: The function that adds the op after which reads of a variable alias its
            value, although some rows were updated: resource handle in.
        core: The form that `_core.BoundVariables` takes.
    """

    path: Path
    bind: Any
    call: Any
    end_copy_on_read: Any
    core: _core.VariablesLibrary


_lock = CallLock("op library")
_loaded: Library | LibraryError | None = None


def _unlock() -> None:
    global _lock
    _lock = CallLock("op library")


# The thread that holds the lock does not exist in a forked child.
os.register_at_fork(after_in_child=_unlock)


def load_library() -> Library | None:
    """Return the library, which the first call finds or compiles; None if there is none.

    Raises:
        RuntimeError: If FLATWEIGHTS_TENSORFLOW is ``bound`` and it is not available.
        ValueError: If FLATWEIGHTS_TENSORFLOW is something unknown.
    """
    setting = _setting()
    if setting == "ops":
        return None
    library, is_new = _load_once()
    if isinstance(library, Library):
        return library
    if setting == "bound":
        raise RuntimeError(f"{SETTING}=bound, but {library}") from library
    if is_new:
        warnings.warn(
            f"flatweights moves weights by TensorFlow's operations, which is slower: {library}. "
            "After fixing this, run 'flatweights build-tf'; to use the operations without this "
            f"warning, set {SETTING}=ops",
            RuntimeWarning,
            stacklevel=3,
        )
    return None


def status() -> str:
    """Return how weights are moved, and why, as text."""
    try:
        setting = _setting()
    except ValueError as error:
        return str(error)
    if setting == "ops":
        return f"TensorFlow's operations, since {SETTING}=ops"
    if isinstance(_loaded, Library):
        return f"bound variables, by {_loaded.path}"
    if _loaded is not None:
        return f"TensorFlow's operations, since {_loaded}"
    try:
        wanted = identity(PACKAGED)
        folder = _folder_of_library(wanted)
        if folder is None:
            _raise_earlier_failure(_cached(wanted) / _FAILED, find_compiler())
            return "bound variables, once the first use has compiled the op library"
    except (LibraryError, OSError) as error:
        return f"TensorFlow's operations, since its op library cannot be compiled: {error}"
    return f"bound variables, by {folder / LIBRARY}"


def build_library(*, again: bool = True) -> Path:
    """Compile the library unless it exists; return where it is.

    Args:
        again: Try to compile it even if that failed earlier with the same compiler.

    Raises:
        LibraryError: If it cannot be compiled.
    """
    try:
        wanted = identity(PACKAGED)
        return (_folder_of_library(wanted) or _compile_into_cache(wanted, again=again)) / LIBRARY
    except OSError as error:
        raise LibraryError(str(error)) from error


def _setting() -> str:
    setting = os.environ.get(SETTING, "")
    if setting not in ("", "bound", "ops"):
        raise ValueError(f"{SETTING}: expected 'bound', 'ops' or nothing, got {setting!r}")
    return setting


def _load_once() -> tuple[Library | LibraryError, bool]:
    """Return the library, or why there is none, and whether this was the first call."""
    global _loaded
    known = _loaded
    if known is not None:
        return known, False
    with _lock.ready():
        if _loaded is not None:
            return _loaded, False
        try:
            _loaded = _load()
        except LibraryError as error:
            _loaded = error
        return _loaded, True


def _load() -> Library:
    try:
        path = build_library(again=False)
    except LibraryError as error:
        raise LibraryError(f"its op library cannot be compiled: {error}") from error
    try:
        module = tf.load_op_library(str(path))
        return Library(
            path,
            module.flatweights_bind_variable,
            module.flatweights_call_python,
            module.flatweights_end_copy_on_read,
            _core.VariablesLibrary(str(path)),
        )
    except (tf.errors.OpError, OSError, RuntimeError, ImportError, AttributeError) as error:
        raise LibraryError(
            f"its op library {path} cannot be loaded (delete it, and it is compiled again): {error}"
        ) from error


def _folder_of_library(wanted: dict[str, str]) -> Path | None:
    """Return the folder of a library that is ready to be loaded, or None."""
    for packaged in (PACKAGED, PACKAGED / folder_name(wanted)):
        # Installers check their files themselves, and tools that repair wheels change them.
        if is_for_this(packaged, wanted, check_bytes=False):
            return packaged
    cached = private_folder(_cached(wanted), make=False)
    return cached if is_for_this(cached, wanted) else None


def _cached(wanted: dict[str, str]) -> Path:
    return private_folder(cache_folder(), make=False) / folder_name(wanted)


def _compile_into_cache(wanted: dict[str, str], *, again: bool = False) -> Path:
    """Compile, unless another process just did, or failed with the same compiler."""
    folder = private_folder(_cached(wanted), make=True)
    failed = folder / _FAILED
    with locked(folder):
        if is_for_this(folder, wanted):
            return folder
        compiler = find_compiler()
        if not again:
            _raise_earlier_failure(failed, compiler)
        _log.warning(
            "compiling the op library of flatweights for TensorFlow %s, once, into %s",
            wanted["tensorflow"],
            folder,
        )
        for leftover in folder.glob(f"{WORK_PREFIX}*"):  # of processes that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            compile_library(PACKAGED, folder)
        except LibraryError as error:
            if not error.may_pass:
                with suppress(OSError):
                    failed.write_text(json.dumps({"compiler": compiler, "reason": str(error)}))
            raise
        failed.unlink(missing_ok=True)
    return folder


def _raise_earlier_failure(failed: Path, compiler: str) -> None:
    try:
        earlier = json.loads(failed.read_text())
        known = earlier["compiler"] == compiler
        reason = str(earlier["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if known:
        raise LibraryError(reason)
