"""A stand-in for an agent of a node of Ray.

A node starts an agent for its dashboard, and another for the environments of workers: programs in
Python that import for seconds, and that most tests never ask. The node waits until both have
written their ports, and it aborts when one ends. So this program writes that nobody listens, and
ends after its node.
"""

import os
import sys
import time
from pathlib import Path

PORTS = {
    "dashboard_agent": (
        "dashboard_agent_listen_port",
        "metrics_agent_port",
        "metrics_export_port",
    ),
    "runtime_env_agent": ("runtime_env_agent_port",),
}
"""The files that each agent writes, by its name in Ray."""


def main(agent: str, *arguments: str) -> None:
    options = dict(one.split("=", 1) for one in arguments if "=" in one)
    node = os.getppid()
    for name in PORTS[agent]:
        file = Path(options["--session-dir"], f"{name}_{options['--node-id']}")
        unread = file.with_name(f"{file.name}.unread")
        unread.write_text("-1")
        unread.rename(file)
    while os.getppid() == node:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
