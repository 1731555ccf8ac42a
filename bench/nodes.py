"""Nodes on one machine, with a network between them, for benches and checks between nodes.

A node is a network namespace with one link to a bridge, a token bucket in each direction of the
link, and its own ``/tmp/ray`` and ``/dev/shm``. All nodes live in one process namespace, and end
with the process that made them, in whatever way that ends. So nothing is left behind, and several
sets of nodes can exist side by side.

    from bench import nodes

    nodes.enter(sys.argv)                       # this process again, in namespaces of its own
    cluster = nodes.Nodes.make(4)
    cluster.shape(500)                          # Mbit/s
    cluster.start_ray()
    subprocess.run(cluster.inside(0, [sys.executable, "driver.py"]), env=cluster.environment())

In ``driver.py``, and in every process that it starts, `Nodes.of_this_process` returns the same
nodes, with methods to cut, mend and slow down a link, and to count its bytes.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.91.0"
PORT = 6379

_ROOT = Path(__file__).parents[1]
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_ENTERED = "FLATWEIGHTS_BENCH_ENTERED"
_KEEPERS = "FLATWEIGHTS_BENCH_NODES"
_STARTS = 300.0  # seconds that a node is given to start

# The process that keeps a node's namespaces: it makes private mounts, and then sleeps.
_KEEP = """
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm &&
ip link set lo up && exec sleep infinity
"""


@dataclass(frozen=True)
class Traffic:
    """Bytes that passed one node's link.

    Attributes:
        sent: The bytes that left the node.
        received: The bytes that reached it.
    """

    sent: int
    received: int

    def since(self, before: "Traffic", rounds: int = 1) -> "Traffic":
        """Return the bytes per round that passed since ``before``."""
        sent, received = self.sent - before.sent, self.received - before.received
        return Traffic(sent // rounds, received // rounds)


def is_among_nodes() -> bool:
    """Whether this process was started with the environment of nodes."""
    return _KEEPERS in os.environ


def missing() -> str | None:
    """Return the first requirement of nodes that is missing here; None if nothing is missing."""
    if os.geteuid() != 0:
        return "root"
    paths = os.environ.get("PATH", "").split(os.pathsep)
    # A user's path may lack the folders of administrators' commands.
    more = [folder for folder in ("/usr/sbin", "/sbin") if folder not in paths]
    os.environ["PATH"] = os.pathsep.join([*paths, *more])
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the command {absent[0]}"
    # A container's root may lack the right, and its kernel the module.
    trial = "ip link add fw0 type veth peer name fw1 && tc qdisc add dev fw0 root tbf rate 1mbit "
    trial += "burst 64kb latency 20ms"
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", trial]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = (done.stderr.strip().splitlines() or ["?"])[-1]
    return f"the right to make namespaces and shaped links ({said})" if done.returncode else None


def enter(command: Sequence[str]) -> None:
    """Replace this process by itself in process, network and mount namespaces of its own.

    The second call does nothing. When the process dies, the kernel ends all processes it started.

    Args:
        command: The arguments of the interpreter.
    """
    if os.environ.get(_ENTERED):
        return
    os.environ[_ENTERED] = "1"
    words = ["unshare", "--fork", "--pid", "--net", "--mount", "--propagation", "private"]
    words += ["--mount-proc", "--kill-child", sys.executable, *command]
    os.execvp(words[0], words)


def run_among(bench: str, count: int, mbit: float | None = None) -> None:
    """Return in a process on the first of ``count`` nodes; elsewhere, run the bench there, and end.

    This process starts itself again in namespaces, makes the nodes and their Ray, and then starts
    itself again on the first of them.

    Args:
        bench: The module's name in this package.
        count: The number of nodes.
        mbit: Million bits per second of each link; without a limit, if None.
    """
    if is_among_nodes():
        return
    why = missing()
    if why is not None:
        print(f"{bench}: skipped: it needs {why}")
        raise SystemExit
    again = ["-m", f"bench.{bench}", *sys.argv[1:]]
    enter(again)
    cluster = Nodes.make(count)
    if mbit is not None:
        cluster.shape(mbit)
    cluster.start_ray()
    driver = cluster.inside(0, [sys.executable, *again])
    raise SystemExit(subprocess.run(driver, env=cluster.environment(), check=False).returncode)


class Nodes:
    """Nodes, by number from 0, and the links between them."""

    def __init__(self, keepers: Sequence[int]) -> None:
        """Take, by node, the process that keeps its namespaces."""
        self._keepers = list(keepers)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._keepers)

    @classmethod
    def make(cls, count: int) -> "Nodes":
        """Make nodes whose links are not shaped; after `enter`."""
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "bridge0", "type", "bridge")
        _run("ip", "link", "set", "bridge0", "up")
        words = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-ec", _KEEP]
        nodes = cls([subprocess.Popen(words).pid for _ in range(count)])
        for node, keeper in enumerate(nodes._keepers):
            kept = functools.partial(_is_kept, keeper)
            _wait(kept, f"node {node} has no namespaces")
            port = nodes._port(node)
            peer = ["peer", "name", "eth0", "netns", str(keeper)]
            _run("ip", "link", "add", port, "type", "veth", *peer)
            _run("ip", "link", "set", port, "master", "bridge0", "up")
            _run(*nodes._at(node), "ip", "addr", "add", f"{nodes.address(node)}/24", "dev", "eth0")
            _run(*nodes._at(node), "ip", "link", "set", "eth0", "up")
        return nodes

    @classmethod
    def of_this_process(cls) -> "Nodes":
        """Return the nodes among which this process was started."""
        return cls([int(pid) for pid in os.environ[_KEEPERS].split(",")])

    def environment(self) -> dict[str, str]:
        """Return the environment of processes on the nodes."""
        mine = {
            _KEEPERS: ",".join(map(str, self._keepers)),
            "PYTHONPATH": str(_ROOT),
            "RAY_ADDRESS": f"{self.address(0)}:{PORT}",
            "RAY_AUTH_MODE": "disabled",  # nobody else is in this network
            "RAY_worker_niceness": "0",  # the nodes share processors, the driver among them
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_raylet_start_wait_time_s": str(int(_STARTS)),
        }
        return os.environ | mine

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"{NETWORK}.{node + 1}"

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs ``command`` on a node."""
        # Entering a node's mounts changes the folder to their root.
        here = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]
        return ["nsenter", "-t", str(self._keepers[node]), "-m", "-n", "--", *here, *command]

    def start_ray(self, *, store: int = 1_500_000_000) -> None:
        """Start a Ray of all nodes; each has a resource ``node0``, ``node1`` ... to place actors.

        Args:
            store: Bytes of each node's object store.
        """
        starting: list[_Raylet] = []
        for node in range(len(self)):
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
            words += [f"--node-ip-address={self.address(node)}", f"--object-store-memory={store}"]
            words += ["--num-cpus=1", f"--resources={json.dumps({f'node{node}': 1e6})}"]
            head = [f"--port={PORT}", "--head", "--include-dashboard=false"]
            words += head if node == 0 else [f"--address={self.address(0)}:{PORT}"]
            root = Path(f"/proc/{self._keepers[node]}/root")
            starting.append(_Raylet(self.inside(node, words), self.environment(), root))
            if node == 0:
                _wait(starting[0].is_there, "node 0 has no Ray")
        for node, raylet in enumerate(starting):
            _wait(raylet.is_there, f"node {node} has no Ray")

    def shape(self, mbit: float | None, *, queue: float = 20.0) -> None:
        """Limit all links, in both directions.

        Args:
            mbit: Million bits per second; no limit, if None.
            queue: Milliseconds that a byte waits at most before it is dropped.
        """
        for node in range(len(self)):
            self.slow(node, mbit, queue=queue)

    def slow(self, node: int, mbit: float | None, *, queue: float = 20.0) -> None:
        """Limit one link, as `shape` does."""
        ends = ((self._outside, self._port(node)), (self._at(node), "eth0"))
        for at, device in ends:
            if mbit is None:
                _run(*at, "tc", "qdisc", "del", "dev", device, "root", check=False)
                continue
            # The bucket holds the bytes of 2 ms, since a kernel's timer is not more precise.
            bucket = max(int(mbit * 1e6 / 8 * 2e-3), 65536)
            words = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit"]
            _run(*at, *words, "burst", str(bucket), "latency", f"{queue}ms")

    def cut(self, node: int) -> None:
        """Cut the link of a node: nothing passes, and no process is notified."""
        _run(*self._outside, "ip", "link", "set", self._port(node), "down")

    def mend(self, node: int) -> None:
        """Restore a link that was cut."""
        _run(*self._outside, "ip", "link", "set", self._port(node), "up")

    def cut_between(self, one: int, other: int) -> None:
        """Cut the traffic between two nodes; other nodes reach both, and no process is notified."""
        for sender, receiver in ((one, other), (other, one)):
            words = ["replace", self.address(receiver), "lladdr", "02:00:00:00:00:ff"]
            _run(*self._at(sender), "ip", "neigh", *words, "nud", "permanent", "dev", "eth0")

    def mend_between(self, one: int, other: int) -> None:
        """Restore the traffic that `cut_between` has cut."""
        for sender, receiver in ((one, other), (other, one)):
            words = ["del", self.address(receiver), "dev", "eth0"]
            _run(*self._at(sender), "ip", "neigh", *words)

    def kill(self, node: int) -> None:
        """Kill all processes of a node; it stays empty."""
        space = _network_of(self._keepers[node])
        for folder in Path("/proc").iterdir():
            pid = int(folder.name) if folder.name.isdigit() else 0
            if pid and pid != self._keepers[node] and _network_of(pid) == space:
                os.kill(pid, 9)

    def traffic(self) -> list[Traffic]:
        """Return, by node, the bytes that have passed its link."""
        found = []
        for node in range(len(self)):
            words = [*self._at(node), "ip", "-s", "-j", "link", "show", "dev", "eth0"]
            counts = json.loads(_run(*words))[0]["stats64"]
            found.append(Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"]))
        return found

    def _at(self, node: int) -> list[str]:
        """Return the prefix of commands in the network of a node, but with this process's files."""
        return ["nsenter", "-t", str(self._keepers[node]), "-n", "--"]

    @property
    def _outside(self) -> list[str]:
        """Return the prefix of commands in the network of the bridge."""
        return ["nsenter", "-t", "1", "-n", "--"]

    def _port(self, node: int) -> str:
        return f"port{node}"


class _Raylet:
    """The Ray of a node, while it starts."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], root: Path) -> None:
        self._sockets = root / "tmp/ray"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  for as long as this lives
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def is_there(self) -> bool:
        """Whether it can be used; raise if it has ended."""
        if self._process.poll() is not None:
            self._said.seek(0)
            raise RuntimeError(f"Ray did not start:\n{self._said.read()[-3000:]}")
        return any(self._sockets.glob("session_2*/sockets/raylet"))


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + _STARTS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} after {_STARTS:.0f} s")
        time.sleep(0.05)


def _is_kept(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"


def _network_of(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()
    except OSError:  # it has ended
        return None
