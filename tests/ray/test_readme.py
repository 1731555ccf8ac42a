"""The README's examples, run one after the other, print the output that it shows."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def test_the_examples_print_their_output(capsys: pytest.CaptureFixture[str]) -> None:
    # Ray sends classes of such a module by value, as those of a program.
    exec(compile(blocks("python"), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == blocks("text")
