"""One Ray for all tests of a process, and a folder for it that no other program sees.

The tests and the pages of the documentation import these fixtures into their ``conftest.py``.
"""

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_agent
import ray_forks
from gpus import shown_gpus

ROOT = Path(__file__).parents[2]

LEAN: dict[str, Any] = {
    "include_dashboard": False,
    "dashboard_port": None,  # another Ray of these tests may have the usual one
    "include_log_monitor": False,  # it reads the files of all workers ten times a second
    "no_monitor": True,  # nothing adds nodes to these clusters
    "setup_worker_path": ray_forks.START,
}
"""Options of a node without what no test uses."""

MISSED_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""A cluster's settings by which a node that is killed is missed in two seconds, not in twenty."""

_STORE = 1 << 30  # bytes

_kept: list[ray_forks.RayForks] = []  # until the program ends


@pytest.fixture(scope="session", autouse=True)
def ray_folder() -> Iterator[Path]:
    """The folder for Rays of this process and its programs; it is removed after the tests.

    A Ray leaves its address in such a folder for any program to join. With a folder of their own,
    tests do not join another program's Ray, and other programs do not join theirs.
    """
    folder = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))  # the names of sockets must be short
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(folder))
        environment.setenv("RAY_ADDRESS", "local")
        # On a busy machine, a node needs longer than Ray's 30 s to start. (Ray also waits this long
        # for a node that has aborted.)
        environment.setenv("RAY_raylet_start_wait_time_s", "90")
        # A node aborts if its agent, a Python program, takes longer than this to start; default: 30
        # s.
        environment.setenv("RAY_agent_register_timeout_ms", "90000")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_ray(ray_folder: Path) -> Iterator[None]:
    """Ray on two CPUs; its workers can import the test modules, and TensorFlow is quiet in them."""
    import ray

    if ray.is_initialized():  # for the other conftest.py
        yield
        return
    folders = [
        str(ROOT),
        str(ROOT / "tests" / "helpers"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", os.pathsep.join(folders))
        inherited.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        forks = ray_forks.RayForks(ray_folder)
        for name, value in forks.environment.items():
            inherited.setenv(name, value)
        # The other agent serves actors with a `runtime_env`, such as those of Ray Train.
        node = start_lean_ray(
            num_gpus=shown_gpus(), object_store_memory=_STORE, without=["dashboard_agent"]
        )
    # Ray waits a second for each of its processes, and then lets it run.
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    yield
    ray.shutdown()
    node.kill_all_processes(check_alive=False)
    for process in processes:
        process.wait(60)
    forks.stop()


def start_lean_ray(**options: Any) -> Any:
    """Start a node of two CPUs, without parts that no test uses, and connect to it."""
    return start_lean_cluster(**{"num_cpus": 2} | options).head_node


def start_lean_cluster(*, without: Collection[str] = tuple(ray_agent.PORTS), **options: Any) -> Any:
    """Start the first node of a cluster, without parts that no test uses, and connect to it.

    All nodes that this process starts from now on are ``without`` these agents.

    In a program with a folder of its own, its workers are copies of a process without TensorFlow.
    """
    import ray
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray 2.40 leaves files of logs open
        # Without a dashboard, its server has only statistics of use, and the node waits for it.
        patched.setattr(Node, "start_api_server", lambda *_, **__: None)
        leave_out(without)
        if not ray_forks.are_there():
            forks = ray_forks.RayForks(Path(os.environ["RAY_TMPDIR"]), with_tensorflow=False)
            _kept.append(forks)
            os.environ.update(forks.environment)  # for nodes that are added, too
        attempts_left = 2
        while True:
            try:
                cluster = Cluster(initialize_head=True, head_node_args=LEAN | options)
                ray.init(cluster.address, log_to_driver=False)
                return cluster
            except Exception:
                # Ray gives a node 30 s to start, and its agent, a Python process, 15: too few on a
                # machine that is very busy, and there is no setting.
                ray.shutdown()
                if not attempts_left:
                    raise
                attempts_left -= 1


def leave_out(agents: Collection[str]) -> None:
    """Let nodes have stand-ins of these agents: of their processor time, most goes to imports."""
    import ray
    from ray._private import services

    if not hasattr(ray._raylet, "persist_port"):
        return  # older versions of Ray ask the agents themselves
    command_of = services._build_python_executable_command_memory_profileable

    def command(component: str, *args: Any) -> list[str]:
        if component in agents:
            return [sys.executable, "-S", "-E", ray_agent.__file__, component]
        found: list[str] = command_of(component, *args)
        return found

    services._build_python_executable_command_memory_profileable = command
