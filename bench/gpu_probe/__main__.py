"""What rounds that stay on an NVIDIA GPU would cost, by a program that needs no framework.

``python -m bench.gpu_probe [--json FILE] [--sections LETTERS] [--build FOLDER] [--compile-only]``

It wants g++ and nvcc 12.8 or later, and takes some eighty seconds on a GPU. Each section is a
process with a time limit, so a crash or a hang costs its own figures only:

- a: attributes, UUID, granularity of the GPU.
- b: memory that processes share by descriptors: times, and what works without a context.
- c: the creator of such memory is killed, idle and while its kernel writes.
- d: two processes that take turns on the GPU: the time of a hop.
- e: copies of many variables, by one kernel and by the driver.
- f: the averaging kernel: its rate, and its bits beside those of the processor's kernels. Without
  a GPU, the bits of its body compiled for the processor.
- g: times of calls of the driver.
- h: files in memory that are registered with the driver.
- i: a write through a map for reading; last, as it ruins the writer's context.
- j: copies in the host's memory.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"

# As CMakeLists.txt compiles the portable kernels.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]


def commands(folder: Path) -> dict[Path, list[str]]:
    """Return the commands that make each file of ``folder``, in their order but for the last."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on the path")
    host = [os.environ.get("CXX", "g++"), *FLAGS, f"-I{CSRC}"]
    kernels, portable, probe = (folder / n for n in ("kernels.ptx", "portable.o", "probe"))
    ptx = [nvcc, "-std=c++20", "-O3", "-arch=compute_75", "-ptx", str(HERE / "kernels.cu")]
    isa = ["-DFLATWEIGHTS_ISA=portable", "-DFLATWEIGHTS_PORTABLE"]
    loops = [*host, *isa, "-c", str(CSRC / "flatweights" / "kernels.cpp")]
    # By nvcc, which knows where its headers are.
    sections = [nvcc, *FLAGS[:2], "-Xcompiler", ",".join(FLAGS[2:]), f"-I{CSRC}"]
    parts = {
        kernels: [*ptx, "-o", str(kernels)],
        portable: [*loops, "-o", str(portable)],
        folder / "probe.o": [
            *sections,
            "-c",
            str(HERE / "probe.cpp"),
            "-o",
            str(folder / "probe.o"),
        ],
    }
    link = [host[0], str(folder / "probe.o"), str(portable), "-o", str(probe), "-ldl", "-pthread"]
    return {**parts, probe: link}


def compile_into(folder: Path) -> None:
    """Make the program, unless it is there."""
    if (folder / "probe").exists() and (folder / "kernels.ptx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    *parts, link = commands(folder).values()
    running = [subprocess.Popen(command) for command in parts]
    results = [process.wait() for process in running]
    if any(results) or subprocess.run(link).returncode:
        raise SystemExit("the probe does not compile")


def main() -> None:
    """Compile and run the probe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--sections", default="", help="the letters of those to run; all of them")
    parser.add_argument("--seconds", type=float, default=120, help="at most, in all")
    parser.add_argument("--patterns", type=float, default=1e7, help="random numbers of each type")
    parser.add_argument(
        "--build",
        type=Path,
        default=Path("build/gpu_probe"),
        help="the folder of the program; what it holds is not compiled again",
    )
    parser.add_argument("--compile-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    compile_into(options.build)
    if options.compile_only:
        return
    folder: Path = options.build
    command = [str(folder.resolve() / "probe"), str(folder.resolve() / "kernels.ptx")]
    command += [str(options.json or ""), str(options.seconds), str(options.patterns)]
    sys.exit(subprocess.run([*command, options.sections]).returncode)


if __name__ == "__main__":
    main()
