"""Programs that tests run on nodes of `bench.nodes`; the argument is the name of one."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import nodes
from bench.rings import Ring

MB = 1_000_000


def links() -> dict[str, Any]:
    """Return measurements of links that are shaped, cut, mended and slow."""
    cluster = nodes.Nodes.make(2)
    cluster.shape(80)  # 10 MB a second
    ring = Ring("sockets", cluster, 2)
    ring.times(MB, 1)
    before = cluster.traffic()
    found: dict[str, Any] = {"shaped": ring.times(MB, 1)[0]}
    passed = [end.since(begin) for end, begin in zip(cluster.traffic(), before, strict=True)]
    found["sent"] = [link.sent for link in passed]
    found["received"] = [link.received for link in passed]

    cluster.cut(1)
    before = cluster.traffic()
    late: list[float] = []
    waiting = threading.Thread(target=lambda: late.extend(ring.times(MB, 1)))
    waiting.start()
    waiting.join(1.0)
    found["while cut"] = [*late, cluster.traffic()[0].received - before[0].received]
    cluster.mend(1)
    waiting.join()
    found["after"] = len(late)

    cluster.slow(1, 8)
    found["slow"] = ring.times(MB, 1)[0]
    ring.close()
    return found


if __name__ == "__main__":
    nodes.enter(sys.argv)
    print(json.dumps(globals()[sys.argv[1]]()))
