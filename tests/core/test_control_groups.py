"""Limits of control groups, of both versions, in trees of files that look like /proc and /sys."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from flatweights import _core

GIB = 1 << 30
NO_LIMIT = (1 << 64) - 1


def tree(folder: Path, files: Mapping[str, str]) -> str:
    """Write ``files``; return the root of the tree."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


SECOND = "sys/fs/cgroup"
FIRST = "sys/fs/cgroup/memory"


def test_the_least_limit_of_all_groups_around_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job/step\n",
            f"{SECOND}/user.slice/memory.max": f"{8 * GIB}\n",
            f"{SECOND}/user.slice/cpu.max": "250000 100000\n",
            f"{SECOND}/user.slice/job/memory.max": f"{4 * GIB}\n",
            f"{SECOND}/user.slice/job/cpu.max": "max 100000\n",
            f"{SECOND}/user.slice/job/step/memory.max": "max\n",
            f"{SECOND}/user.slice/job/step/cpu.max": "1600000 100000\n",
        },
    )
    assert _core.memory_limit(root) == 4 * GIB
    assert _core.processor_limit(root) == 2


def test_groups_of_the_first_version_are_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/\n",
            f"{FIRST}/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            f"{FIRST}/docker/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "350000\n",
            "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
        },
    )
    assert _core.memory_limit(root) == 2 * GIB
    assert _core.processor_limit(root) == 3


@pytest.mark.parametrize("path", ["/", "/kubepods/of-the-host", "/../../outside"])
def test_in_a_container_its_own_group_is_the_root(tmp_path: Path, path: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            f"{SECOND}/memory.max": f"{GIB}\n",
            f"{SECOND}/cpu.max": "50000 100000\n",
        },
    )
    assert _core.memory_limit(root) == GIB
    assert _core.processor_limit(root) == 1, "less than a processor is one"


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    for text in ("", "0::/\n", "nonsense\n"):
        root = tree(tmp_path, {"proc/self/cgroup": text})
        assert _core.memory_limit(root) == NO_LIMIT
        assert _core.processor_limit(root) == 0
    assert _core.free_memory(root) == NO_LIMIT


def test_free_memory_is_what_the_fullest_group_has_left(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/job/step\n",
    }
    assert _core.free_memory(tree(tmp_path, files)) == 19 * GIB
    files |= {
        f"{SECOND}/job/memory.max": f"{10 * GIB}",
        f"{SECOND}/job/memory.current": f"{7 * GIB}",
        f"{SECOND}/job/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
        f"{SECOND}/job/step/memory.max": f"{9 * GIB}",
        f"{SECOND}/job/step/memory.current": f"{GIB}",
    }
    used = 5 * GIB
    assert _core.free_memory(tree(tmp_path, files)) == 10 * GIB - GIB // 2 - used
    files[f"{SECOND}/job/memory.current"] = f"{13 * GIB}"
    assert _core.free_memory(tree(tmp_path, files)) == 0


def test_here_there_is_memory() -> None:
    assert _core.free_memory() > 0
    assert _core.memory_limit() > 0
