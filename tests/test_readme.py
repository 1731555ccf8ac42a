"""The README's examples, run one after the other, print what it says they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def test_the_examples_print_their_output(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(blocks("python"))
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        # Not the cluster that another program may have left behind.
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    # Ray relays what its workers print, TensorFlow's greetings among it.
    printed = [line for line in run.stdout.splitlines() if "pid=" not in line]
    assert "\n".join(printed).endswith(blocks("text").rstrip())
