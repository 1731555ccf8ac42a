"""A private folder of the user, for the op library that the first use compiles."""

import contextlib
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from flatweights.tensorflow.library._compile import LibraryError

_REMEDY = "set FLATWEIGHTS_CACHE_DIR to a folder of your own"


def cache_folder() -> Path:
    """Return the folder for the cache, which need not exist.

    It is FLATWEIGHTS_CACHE_DIR, else ``flatweights`` in XDG_CACHE_HOME or ``~/.cache``.

    Raises:
        LibraryError: If there is no home folder.
    """
    chosen = os.environ.get("FLATWEIGHTS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "flatweights"
    except RuntimeError as error:
        raise LibraryError(f"there is no home folder: {error}") from error


def private_folder(folder: Path, *, make: bool) -> Path:
    """Return ``folder`` after checking that no other user can change what is in it.

    Code in the folder runs as this user. So the folder and all of its parents must belong to
    this user or root: a user who can write to one of them could replace the folder.

    Args:
        folder: Path of the folder.
        make: Create the folder and its parents, for this user alone. If False, the folder
            need not exist.

    Returns:
        The folder with symbolic links resolved, since they could change later.

    Raises:
        LibraryError: If another user could change the folder, or it cannot be created.
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
        raise LibraryError(f"{folder} cannot be used: {error}") from error
    return folder


def _check(path: Path, status: os.stat_result, *, is_around: bool) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise LibraryError(f"{path} is not a folder: {_REMEDY}")
    # In some containers root has another id.
    if status.st_uid not in (os.getuid(), 0, Path("/").stat().st_uid):
        raise LibraryError(f"{path} belongs to another user: {_REMEDY}")
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_around and (
        status.st_mode & stat.S_ISVTX  # like /tmp: only the owner of an entry can replace it
        or (others == stat.S_IWGRP and _is_group_of_one(status.st_gid))
    ):
        return
    if others:
        raise LibraryError(
            f"{path} can be written to by another user: {_REMEDY}, or remove that permission "
            "(chmod go-w)"
        )


def _is_group_of_one(group: int) -> bool:
    """Whether ``group`` is the private group that many systems create for each user."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` among all processes; a process that dies releases it.

    Raises:
        LibraryError: If the folder cannot be written to.
    """
    try:
        file = (folder / "lock").open("w")
    except OSError as error:
        raise LibraryError(f"{folder} cannot be written to: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing the file does not unlock it while a forked child has it open.
            fcntl.flock(file, fcntl.LOCK_UN)
