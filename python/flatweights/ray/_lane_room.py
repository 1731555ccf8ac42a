"""Whether a memory file finds room: the limits of the control group and of the machine."""

from pathlib import Path

_SPARE = 0.05  # of a limit: below that, other allocations would be the ones that fail


class NoRoomError(MemoryError):
    """There is no memory for a window."""


def check_room(nbytes: int) -> None:
    """Raise `NoRoomError` unless ``nbytes`` more fit into memory.

    A memory file is charged to the control group of the process that fills it, and a group
    beyond its limit has a process killed. So the limit is asked before.
    """
    free = _machine()
    for group, limit in _groups():
        free = min(free, limit * (1 - _SPARE) - _used(group))
    if nbytes > free:
        raise NoRoomError(
            f"{nbytes:,} bytes of shared memory do not fit: {max(0, int(free)):,} are free"
        )


def _machine() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 * (1 - _SPARE)
    return float("inf")


def _groups() -> list[tuple[Path, int]]:
    """Return the control groups of this process that have a limit, and the limits."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        # In a container the path is the host's, and its own group is the root.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if root == folder or root in folder.parents:
                limit = _number(folder / name)
                if limit is not None and limit < 1 << 60:
                    found.append((folder, limit))
    return found


def _used(group: Path) -> float:
    """Return the bytes in use of ``group``, without the file pages that make room when asked."""
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return used - int(line.split()[1])
    except OSError:
        pass
    return used


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
