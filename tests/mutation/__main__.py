"""Makes small wrong changes to a copy of the package, and says which of them the tests find.

``python -m tests.mutation [--slow] [--cheapest] [--jobs N] [texts ...]``

Each change of `tests.mutation.changes` is made alone. Its tests run in their order until one fails:
those of the default run, or with ``--slow`` the others; with ``--cheapest``, only the first of
them. After a change of C++, the core is built anew. Needs what ``pip install '.[test]' --group
build`` installs, and takes an hour or two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.changes import CHANGES, Change

ROOT = Path(__file__).parents[2]
PARTS = "CMakeLists.txt", "README.md", "bench", "csrc", "docs", "pyproject.toml", "python", "tests"
LIMIT = 900.0  # seconds for one run of tests: a change may make them hang


class Copy:
    """A copy of the repository, with a core that is built from it."""

    def __init__(self, folder: Path, jobs: str) -> None:
        """Copy everything to ``folder``, and build the core."""
        self._folder, self._jobs = folder, jobs
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("*.so", "_tf"))
            else:
                shutil.copy(source, folder / part)
        (folder / "python/flatweights/_tf").symlink_to("../../csrc/tensorflow")
        settings = {
            "SKBUILD_PROJECT_NAME": "flatweights",
            "SKBUILD_PROJECT_VERSION": "0",
            "FLATWEIGHTS_UNITY": "OFF",
            "FLATWEIGHTS_TENSORFLOW": "OFF",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": _output("-m", "pybind11", "--cmakedir"),
        }
        given = [f"-D{name}={value}" for name, value in settings.items()]
        self._run(["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *given])
        self.build()

    def build(self) -> None:
        """Build the core of what the copy has now."""
        self._run(["cmake", "--build", "build", "--target", "_core"])
        for core in (self._folder / "build").glob("_core*.so"):
            # Elsewhere at first: a process may still have the old one in its memory.
            new = self._folder / "python/flatweights/new"
            shutil.copy(core, new)
            new.rename(new.with_name(core.name))

    def found_by(self, change: Change, tests: Sequence[str], *, slow: bool) -> str | None:
        """Return those of ``tests`` that fail with ``change``; None, if none does."""
        path = self._folder / change.file
        text = path.read_text()
        if text.count(change.old) != 1:
            raise ValueError(f"{change.file}: expected once, got other than once: {change.old!r}")
        is_core = change.file.startswith(("csrc/flatweights", "csrc/bind"))
        try:
            path.write_text(text.replace(change.old, change.new))
            if is_core:
                self.build()
            return next((one for one in tests if self._fails(one, slow=slow)), None)
        finally:
            path.write_text(text)
            if is_core:
                self.build()

    def _fails(self, tests: str, *, slow: bool) -> bool:
        """Whether ``tests`` fail, or hang."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", self._jobs]
        command += ["-m", "slow" if slow else "not slow", "-p", "no:cacheprovider", *tests.split()]
        environment = os.environ | {"PYTHONPATH": f"{self._folder / 'python'}:{self._folder}"}
        try:
            ran = subprocess.run(
                command,
                cwd=self._folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        if ran.returncode not in (0, 1, 2, 5):  # 2: it cannot be imported; 5: no test is chosen
            raise RuntimeError(f"pytest {tests}: exit status {ran.returncode}")
        return ran.returncode in (1, 2)

    def _run(self, command: list[str]) -> None:
        subprocess.run(command, cwd=self._folder, stdout=subprocess.DEVNULL, check=True)


def _output(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Make the changes, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="run the tests that are marked slow")
    parser.add_argument("--cheapest", action="store_true", help="only the first tests of each")
    parser.add_argument("--jobs", default="auto", help="processes of pytest")
    parser.add_argument("texts", nargs="*", help="only changes with one of these in them")
    options = parser.parse_args()
    chosen = [
        change
        for change in CHANGES
        if not options.texts or any(text in str(change) for text in options.texts)
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.jobs)
        for change in chosen:
            begin = time.perf_counter()
            tests = change.tests[:1] if options.cheapest else change.tests
            found = copy.found_by(change, tests, slow=options.slow)
            took = time.perf_counter() - begin
            made = f"{change.file}: {change.old.strip()!r} -> {change.new.strip()!r}"
            print(f"{took:6.1f} s  {found or 'NOT FOUND'}  {made}", flush=True)
            missed += found is None
    print(f"{len(chosen) - missed} of {len(chosen)} are found")


if __name__ == "__main__":
    main()
