"""Compiles the op library, by default for the TensorFlow that is installed.

It imports nothing else of the package: if the package's build finds a TensorFlow, it runs
this file as a program, ``python _compile.py SOURCES FOLDER``.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC
from pathlib import Path
from typing import NamedTuple

LIBRARY = "_tf.so"
RECORD = "_tf.json"
WORK_PREFIX = "compiling-"
_SIZE, _HASH = "size", "sha256"  # of the library, in the record

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden")
_TIMEOUT = 600  # seconds


# Messages of compilers, assemblers and linkers for failures that another try may not meet.
_PASSING = re.compile(
    "|".join(
        (
            *(os.strerror(code) for code in (ENOSPC, EDQUOT, EFBIG, ENOMEM, EMFILE, ENFILE, EIO)),
            "signal terminated program|unable to execute command|virtual memory exhausted",
        )
    )
)
# Lines that only report the failure of another program, after that program's own message.
_SUMMARY = re.compile("^collect2: |linker command failed")


class LibraryError(Exception):
    """The op library is not available; the message says why.

    Attributes:
        may_pass: Whether another try may succeed though nothing was changed: the disk is full, the
            time is up, the compiler was killed.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        """Raise with ``message``."""
        super().__init__(message)
        self.may_pass = may_pass


class Target(NamedTuple):
    """A TensorFlow to compile for.

    Attributes:
        version: Its version.
        git: The commit it was built from, as ``tf.version.GIT_VERSION`` gives it.
        machine: The operating system and the processor.
        flags: Compiler flags that its headers need, without the include path.
        headers: The folder of its headers.
        link: The linker's arguments.
    """

    version: str
    git: str
    machine: str
    flags: tuple[str, ...]
    headers: Path
    link: tuple[str, ...]


def installed() -> Target:
    """Return the TensorFlow that this Python imports."""
    import tensorflow as tf

    flags = tf.sysconfig.get_compile_flags()
    return Target(
        version=tf.version.VERSION,
        git=tf.version.GIT_VERSION,
        machine=f"{platform.system()} {platform.machine()}",
        flags=tuple(flag for flag in flags if not flag.startswith("-I")),
        headers=Path(tf.sysconfig.get_include()),
        link=tuple(tf.sysconfig.get_link_flags()),
    )


def identity(sources: Path, target: Target | None = None) -> dict[str, str]:
    """Return the identity of a library: its sources and the target that it is compiled for.

    TensorFlow's headers do not state their version, and a library for another version fails
    with undefined symbols at best.

    Args:
        sources: Folder of the library's sources.
        target: The TensorFlow that loads it; None for the one that is installed.
    """
    target = target or installed()
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".cc", ".hpp"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return {
        "tensorflow": target.version,
        "git": target.git,
        "flags": " ".join((*target.flags, *_FLAGS)),
        "machine": target.machine,
        "sources": digest.hexdigest(),
    }


def folder_name(wanted: dict[str, str]) -> str:
    """Return the name of the folder for a library of this `identity` beside others."""
    key = "".join(wanted[name] for name in ("git", "flags", "machine", "sources"))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return f"tensorflow-{wanted['tensorflow']}-{digest}"


def find_compiler() -> str:
    """Return the compiler's command: that of the environment variable CXX, or a usual one.

    Raises:
        LibraryError: If there is none.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            compiler = shutil.which(shlex.split(chosen)[0])
        except ValueError as error:
            raise LibraryError(f"CXX is not a command, {chosen!r}: {error}") from error
        if compiler is None:
            raise LibraryError(f"the C++ compiler of CXX, {chosen!r}, was not found")
        return chosen
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return name
    raise LibraryError("there is no C++ compiler (install g++ or clang++, or set CXX)")


def compile_library(sources: Path, folder: Path, target: Target | None = None) -> Path:
    """Compile the library into ``folder``, beside a record of its `identity`.

    Each file appears atomically, the library first, so a record never exists alone.

    Args:
        sources: Folder of the library's sources.
        folder: Where the library goes.
        target: The TensorFlow to compile for; None for the one that is installed.

    Returns:
        Path of the library.

    Raises:
        LibraryError: If the compiler or the headers are missing, or compiling fails.
    """
    target = target or installed()
    compiler = find_compiler()
    if not (target.headers / "tensorflow/core/framework/resource_var.h").is_file():
        raise LibraryError(f"TensorFlow's headers are not in {target.headers}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=WORK_PREFIX) as work:
        library = Path(work, LIBRARY)
        command = [
            *shlex.split(compiler),
            *target.flags,
            *_FLAGS,
            # Hides warnings in TensorFlow's headers.
            *("-isystem", str(target.headers)),
            str(sources / "library.cc"),
            *("-o", str(library)),
            *target.link,
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                env=os.environ | {"LC_ALL": "C"},  # for messages in English
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LibraryError(f"{compiler} did not run: {error}", may_pass=True) from error
        if done.returncode != 0:
            raise _failure(compiler, done)
        record = Path(work, RECORD)
        record.write_text(json.dumps(identity(sources, target) | _bytes_of(library), indent=1))
        library.replace(folder / LIBRARY)
        record.replace(folder / RECORD)
    return folder / LIBRARY


def _failure(compiler: str, done: "subprocess.CompletedProcess[str]") -> LibraryError:
    if done.returncode < 0:
        names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
        name = names.get(-done.returncode, f"signal {-done.returncode}")
        return LibraryError(f"{compiler} was killed by {name}", may_pass=True)
    lines = [line.strip() for line in done.stderr.strip().splitlines()]
    passing = [line for line in lines if _PASSING.search(line)]
    causes = [line for line in lines if not _SUMMARY.search(line)]
    errors = passing or [line for line in causes if "error" in line] or causes[-1:]
    message = f"{compiler} failed: {errors[0] if errors else 'no message'}"
    return LibraryError(message, may_pass=bool(passing))


def is_for_this(folder: Path, wanted: dict[str, str], *, check_bytes: bool = True) -> bool:
    """Whether ``folder`` has a library of the ``wanted`` identity.

    Args:
        folder: Where to look.
        wanted: A result of `identity`.
        check_bytes: Whether to compare the library with the size and hash in the record, if
            it has them. Loading a truncated library would kill the process.
    """
    library = folder / LIBRARY
    try:
        record = json.loads((folder / RECORD).read_text())
        recorded = {name: record.pop(name) for name in (_SIZE, _HASH) if name in record}
        if record != wanted or not library.is_file():
            return False
        return not (check_bytes and recorded) or recorded == _bytes_of(library)
    except (AttributeError, OSError, TypeError, ValueError):
        return False


def _bytes_of(library: Path) -> dict[str, str]:
    content = library.read_bytes()
    return {_SIZE: str(len(content)), _HASH: hashlib.sha256(content).hexdigest()}


def main() -> int:
    """Compile as the command line says; return the exit code."""
    sources, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        compile_library(sources, folder)
    except LibraryError as error:
        print(f"the op library for TensorFlow: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
