"""A folder of this user alone, for what is compiled at first use."""

import contextlib
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_REMEDY = "set FLATWEIGHTS_CACHE_DIR to a folder of your own"


class CacheError(Exception):
    """There is no folder that can be trusted and written to; the message says why."""


def cache_folder() -> Path:
    """Return the folder for the cache, which need not be there.

    That of the environment variable FLATWEIGHTS_CACHE_DIR, else ``flatweights`` in
    XDG_CACHE_HOME, else in ``~/.cache``.

    Raises:
        CacheError: If there is no home folder.
    """
    chosen = os.environ.get("FLATWEIGHTS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flatweights"
    except RuntimeError as error:
        raise CacheError(f"there is no home folder: {error}") from error


def private_folder(folder: Path, *, make: bool) -> Path:
    """Return ``folder`` after checking that no other user can change what is in it.

    What is loaded from there runs as this user, so it has to be this user's or root's, and
    so do the folders that it is in: whoever can write to one of those can put another in
    its place.

    Args:
        folder: Where it is.
        make: Make it, and what it is in, for this user alone; else it need not be there.

    Returns:
        The same without symbolic links, which could lead elsewhere later.

    Raises:
        CacheError: If another user could change it, or it cannot be made.
    """
    try:
        folder = folder.resolve()
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                if not make:
                    break
                path.mkdir(mode=0o700, exist_ok=True)
            _check(path, path.lstat(), is_around=path != folder)
    except (OSError, RuntimeError) as error:
        raise CacheError(f"{folder} cannot be used: {error}") from error
    return folder


def _check(path: Path, status: os.stat_result, *, is_around: bool) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{path} is not a folder: {_REMEDY}")
    # Root has another number in some containers.
    if status.st_uid not in (os.getuid(), 0, Path("/").stat().st_uid):
        raise CacheError(f"{path} belongs to another user: {_REMEDY}")
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_around and (
        status.st_mode & stat.S_ISVTX  # as /tmp: what is in it is left to its owner
        or (others == stat.S_IWGRP and _is_group_of_one(status.st_gid))
    ):
        return
    if others:
        raise CacheError(
            f"{path} can be written to by another user: {_REMEDY}, or take that right away "
            "(chmod go-w)"
        )


def _is_group_of_one(group: int) -> bool:
    """Whether ``group`` is the one that many systems make for each user."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` among all processes; one that dies lets go of it.

    Raises:
        CacheError: If the folder cannot be written to.
    """
    try:
        file = (folder / "lock").open("w")
    except OSError as error:
        raise CacheError(f"{folder} cannot be written to: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing does not do it while a fork holds the file open.
            fcntl.flock(file, fcntl.LOCK_UN)
