"""The nodes of benches: their links behave as documented, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import nodes

MB = 1_000_000
PROGRAM = Path(__file__).parents[1] / "helpers" / "node_programs.py"

pytestmark = pytest.mark.skipif(
    nodes.missing() is not None, reason=f"nodes cannot be made without {nodes.missing()}"
)


def test_links_are_shaped_cut_mended_and_slowed() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "links"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    bucket = 65536  # may pass at once
    assert found["shaped"] > (MB - bucket) / (10 * MB)
    for nbytes in found["sent"] + found["received"]:
        assert MB < nbytes < 1.1 * MB
    (meanwhile,) = found["while cut"]  # no time: the transfer did not finish
    assert meanwhile < 10_000
    assert found["after"] == 1
    assert found["slow"] > (MB - bucket) / MB


def test_nothing_is_left_of_nodes_whose_process_is_killed() -> None:
    code = (
        "import sys, time; from bench import nodes; nodes.enter(['-c', sys.argv[1], sys.argv[1]]);"
        "nodes.Nodes.make(2); print('made', flush=True); time.sleep(600)"
    )
    root = str(PROGRAM.parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    process = subprocess.Popen(
        [sys.executable, "-c", code, code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "made\n"
        assert len(keepers_of(process.pid)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 60
    while keepers_of(process.pid):
        assert time.monotonic() < end, "processes of the nodes live on"
        time.sleep(0.05)


def keepers_of(session: int) -> list[int]:
    """Return the processes of a session that keep namespaces."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            if name.endswith("(sleep") and int(rest.split()[3]) == session:
                found.append(int(folder.name))
        except (OSError, ValueError, IndexError):
            continue  # no process, or one that has ended
    return found
