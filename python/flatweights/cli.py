"""The command `flatweights`."""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import flatweights
from flatweights import demo
from flatweights._arguments import PLOT_SUFFIXES, integer, plot_file
from flatweights.examples._catalogue import find_programs, read_catalogue

_DEMO_NEEDS = ("tensorflow", "ray", "sklearn", "rich", "matplotlib")
_EXAMPLES_NEED = (*_DEMO_NEEDS, "scipy", "gymnasium")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows the command's name; `sys.argv` if None.

    Returns:
        The exit code: 0, 1 if the demo failed, 130 if it was interrupted.

    Raises:
        SystemExit: With code 2 for arguments that do not make sense, 0 after ``--help``.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.command(parser, options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be stopped
        print("flatweights: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _info(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    config = flatweights.show_config()
    if "flatweights.tensorflow._library" not in sys.modules and not _missing(["tensorflow"]):
        config["tensorflow path"] = _tensorflow_path()
    width = max(map(len, config))
    for key, value in config.items():
        print(f"{key:<{width}}  {value}")
    return 0


def _tensorflow_path() -> str:
    """Return which way weights are moved to and from TensorFlow, and why.

    TensorFlow alone knows its build. It is asked in a process of its own: it writes to stderr,
    and a broken one may kill the process that imports it.
    """
    program = "from flatweights.tensorflow._library import status; print(status())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return last if done.returncode == 0 else f"none, since tensorflow cannot be imported: {last}"


def _build_tf(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "flatweights build-tf: tensorflow not installed: pip install 'flatweights[tensorflow]'",
            file=sys.stderr,
        )
        return 2
    from flatweights.tensorflow._library import LibraryError, build_library

    try:
        print(build_library())
    except LibraryError as error:
        print(f"flatweights build-tf: {error}", file=sys.stderr)
        return 1
    return 0


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    missing = _missing(_DEMO_NEEDS)
    if missing:
        print(
            f"flatweights demo: {missing} not installed: pip install 'flatweights[all]'",
            file=sys.stderr,
        )
        return 2
    schedule = demo.SCHEDULES[options.mode]
    try:
        chosen = demo.Options(
            workers=options.workers,
            rounds=options.rounds or schedule.rounds,
            local_steps=options.local_steps or schedule.local_steps,
            mode=options.mode,
            seed=options.seed,
            plot=options.plot,
            kill_worker=options.kill_worker,
        )
    except ValueError as error:
        parser.error(str(error).replace("kill_worker", "--kill-worker"))
    try:
        demo.run(chosen)
    except demo.DemoError as error:
        print(f"flatweights demo: {error}", file=sys.stderr)
        return 1
    return 0


def _examples(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.name is None:
        catalogue = read_catalogue()
        width = max(map(len, catalogue))
        for name, line in catalogue.items():
            print(f"{name:<{width}}  {line}")
        print("\nTo run one: flatweights examples NAME; more about it: with --help")
        return 0
    missing = _missing(_EXAMPLES_NEED)
    if not missing:
        # In the place of this process: signals reach the program, and its exit code the caller.
        module = f"flatweights.examples.{options.name}"
        os.execv(sys.executable, [sys.executable, "-m", module, *options.options])
    print(
        f"flatweights examples: {missing} not installed: pip install 'flatweights[all]'",
        file=sys.stderr,
    )
    return 2


def _missing(needed: Sequence[str]) -> str:
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flatweights", description=flatweights.__doc__)
    parser.add_argument(
        "--version", action="version", version=f"flatweights {flatweights.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    info = commands.add_parser("info", help="print versions, threads and code paths in use")
    info.set_defaults(command=_info)

    build = commands.add_parser(
        "build-tf",
        help="compile the op library for the TensorFlow that is installed, ahead of its first use",
        description=(
            "Compile the library that moves weights without TensorFlow's operations, and print "
            "where it is. The first use does the same; this tries again after a failure."
        ),
    )
    build.set_defaults(command=_build_tf)

    examples = commands.add_parser(
        "examples",
        help="list the programs to read and to change, or run one of them",
        description="List the programs of flatweights.examples, or run one of them.",
        usage="flatweights examples [-h] [NAME [options of the program]]",
    )
    examples.set_defaults(command=_examples)
    examples.add_argument(
        "name", nargs="?", choices=find_programs(), metavar="NAME", help="which one to run"
    )
    examples.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    train = commands.add_parser(
        "demo",
        help="train on handwritten digits in Ray actors, beside the loop from Ray's guide",
        description=(
            "Train a small convolutional Keras model on scikit-learn's handwritten digits, "
            "data-parallel in Ray actors on this machine: once exchanging one buffer through "
            "flatweights, once as in Ray's guide, a dict of arrays; and compare."
        ),
    )
    train.set_defaults(command=_demo)
    train.add_argument(
        "--workers",
        type=integer(1, 64),
        default=2,
        metavar="N",
        help="number of Ray actors (default: %(default)s)",
    )
    train.add_argument(
        "--rounds",
        type=integer(1, 100_000),
        metavar="N",
        help=f"averages to take (default: {_by_mode('rounds')})",
    )
    train.add_argument(
        "--local-steps",
        type=integer(1, 100_000),
        metavar="N",
        help=(
            "batches that each worker sees per round: steps of its own optimizer, or gradients "
            f"that it adds up (default: {_by_mode('local_steps')})"
        ),
    )
    train.add_argument(
        "--mode",
        choices=tuple(demo.SCHEDULES),
        default="weights",
        help="what is averaged (default: %(default)s)",
    )
    train.add_argument(
        "--seed",
        type=integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of the data's split, the batches and the weights (default: %(default)s)",
    )
    train.add_argument(
        "--kill-worker",
        action="store_true",
        help=(
            "train our way alone, kill one worker's process half-way, and go on: with the others, "
            "then with all again"
        ),
    )
    train.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE",
        help=f"draw loss, accuracy and the time split ({', '.join(PLOT_SUFFIXES)})",
    )
    return parser


def _by_mode(field: str) -> str:
    return ", ".join(
        f"{getattr(schedule, field)} for {mode}" for mode, schedule in demo.SCHEDULES.items()
    )


if __name__ == "__main__":
    sys.exit(main())
