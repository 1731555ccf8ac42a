"""Runs every bench: ``python -m bench [--quick] [--json FILE] [--plot FILE]``.

Each bench puts its name before the ending of the files: ``out.json`` becomes
``out.average.json`` and so on. Each bench runs in its own process, since the models of one would
leave too little memory for the actors of another.
"""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from bench import runner

BENCHES = (
    "average",
    "flatten",
    "inplace",
    "variables",
    "exchange",
    "async",
    "members",
    "publish",
    "fit",
    "healing",
    "contention",
    "wire",
    "robust",
    "gpu",
    "nodes",
)


def main() -> None:
    """Run all benches one after the other; end with an error if one of them fails."""
    options = runner.arguments(__doc__ or "")
    failed = [name for name in BENCHES if subprocess.run(_command(name, options)).returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _command(name: str, options: Namespace) -> list[str]:
    command = [sys.executable, "-m", f"bench.bench_{name}"]
    if options.quick:
        command.append("--quick")
    for option in ("json", "plot"):
        path: Path | None = getattr(options, option)
        if path:
            command += [f"--{option}", str(path.with_suffix(f".{name}{path.suffix}"))]
    return command


if __name__ == "__main__":
    main()
