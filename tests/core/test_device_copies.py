"""Copies between GPUs and the host, and averages on a GPU, by a program without Python.

What only the stand-in for NVIDIA's driver has tried is not known to work on a GPU.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from gpu_processes import REPOSITORY, build_stand_in, has_compiler
from reference import clean_environment

PROGRAM = REPOSITORY / "tests" / "cpp" / "try_device_copies.cpp"
SOURCES = """
    average average_segments buffer_pool control_groups cuda_driver device_copies flatten futex isa
    kernels layout memory_file parallel pinned_memory streaming thread_pool
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, with the portable loops alone."""
    if not has_compiler():
        pytest.skip("there is no C++ compiler, or no Linux")
    built = tmp_path_factory.mktemp("copies") / "try_device_copies"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = "-std=c++20 -O1 -ffp-contract=off -fno-trapping-math -fno-math-errno -pthread"
    flags += " -Wall -Wextra -Werror -DFLATWEIGHTS_PORTABLE -DFLATWEIGHTS_ISA=portable"
    sources = [REPOSITORY / "csrc" / "flatweights" / f"{name}.cpp" for name in SOURCES.split()]
    command = [
        *compiler,
        *flags.split(),
        f"-I{REPOSITORY / 'csrc'}",
        *map(str, [PROGRAM, *sources]),
    ]
    done = subprocess.run(
        [*command, "-ldl", "-o", str(built)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.parametrize(
    ("gpus", "defers", "without"),
    [(1, 0, ()), (2, 1, ()), (2, 1, ("cuMemHostRegister_v2",))],
    ids=["at once", "late", "never pinned"],
)
def test_copies_and_averages_write_the_right_bytes_and_no_others(
    program: Path, tmp_path: Path, gpus: int, defers: int, without: tuple[str, ...]
) -> None:
    library = build_stand_in(tmp_path, without=without)
    environment = clean_environment(
        STAND_IN_CUDA_GPUS=str(gpus), STAND_IN_CUDA_DEFERS=str(defers), FLATWEIGHTS_ISA="portable"
    )
    done = subprocess.run(
        [program, library, "1"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
