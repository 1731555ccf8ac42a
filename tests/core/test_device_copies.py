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
    layout memory_file parallel pinned_memory streaming thread_pool
"""
CORE = REPOSITORY / "csrc" / "flatweights"
PIECES = {
    "core": [*(CORE / f"{name}.cpp" for name in SOURCES.split()), PROGRAM],
    "kernels": [CORE / "kernels.cpp"],  # some of its names are those of the others
}
FLAGS = """
    -std=c++20 -ffp-contract=off -fno-trapping-math -fno-math-errno -pthread -Wall -Wextra -Werror
    -DFLATWEIGHTS_PORTABLE -DFLATWEIGHTS_ISA=portable
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built, with the portable loops alone."""
    if not has_compiler():
        pytest.skip("there is no C++ compiler, or no Linux")
    return tmp_path_factory.mktemp("copies")


def compile_to(built: Path, *arguments: object) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, *FLAGS.split(), f"-I{REPOSITORY / 'csrc'}", *map(str, arguments)]
    done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def object_of(piece: str, folder: Path) -> Path:
    """Compile a piece as one file, which takes a third of the time; at most once."""
    built = folder / f"{piece}.o"
    if not built.exists():
        whole = folder / f"{piece}.cpp"
        whole.write_text("".join(f'#include "{source}"\n' for source in PIECES[piece]))
        compile_to(built, "-O1" if piece == "core" else "-O0", "-c", whole)
    return built


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_portable_sources_compile_without_warnings(piece: str, folder: Path) -> None:
    assert object_of(piece, folder).exists()


@pytest.mark.slow  # compiles the core, whose own tests move segments by the same stand-in
@pytest.mark.parametrize(
    ("gpus", "defers", "without"),
    [
        pytest.param(1, 0, (), id="at once"),
        pytest.param(2, 1, (), id="late"),
        pytest.param(2, 1, ("cuMemHostRegister_v2",), id="never pinned"),
    ],
)
def test_copies_and_averages_write_the_right_bytes_and_no_others(
    folder: Path, tmp_path: Path, gpus: int, defers: int, without: tuple[str, ...]
) -> None:
    program = tmp_path / "try_device_copies"
    compile_to(program, *(object_of(piece, folder) for piece in PIECES), "-ldl")
    library = build_stand_in(tmp_path, without=without)
    environment = clean_environment(
        STAND_IN_CUDA_GPUS=str(gpus), STAND_IN_CUDA_DEFERS=str(defers), FLATWEIGHTS_ISA="portable"
    )
    done = subprocess.run(
        [program, library, "1"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
