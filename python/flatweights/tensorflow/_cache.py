"""A folder of this user alone, for what is compiled at first use."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path


class CacheError(Exception):
    """There is no folder that can be trusted and written to; the message says why."""


def cache_folder() -> Path:
    """Return the folder, made if it is not there, that no other user can write to.

    That of the environment variable FLATWEIGHTS_CACHE_DIR, else ``flatweights`` in
    XDG_CACHE_HOME, else in ``~/.cache``.

    Raises:
        CacheError: If it cannot be made, or another user owns it or can write to it: what
            is loaded from there runs as this user.
    """
    chosen = os.environ.get("FLATWEIGHTS_CACHE_DIR")
    if chosen:
        folder = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            folder = Path(base) if base else Path.home() / ".cache"
        except RuntimeError as error:
            raise CacheError(f"there is no home folder: {error}") from error
        folder /= "flatweights"
    return private_folder(folder)


def private_folder(folder: Path) -> Path:
    """Return ``folder``, made if it is not there, after checking that it is this user's.

    Raises:
        CacheError: As `cache_folder`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise CacheError(f"{folder} cannot be made: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{folder} can be written to by another user: set FLATWEIGHTS_CACHE_DIR to a folder "
            "of your own, or take that right away (chmod go-w)"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written to")
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` among all processes; one that dies lets go of it."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
