"""The command `flatweights`."""

import argparse
import functools
import importlib
import importlib.util
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import flatweights
from flatweights import demo, examples
from flatweights.demo._arguments import PLOT_SUFFIXES, integer, plot_file

_NEEDED = ("tensorflow", "ray", "sklearn", "rich", "matplotlib", "scipy", "gymnasium")
_SAID = "flatweights: "  # before a line that is not TensorFlow's


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The arguments after the command's name; those of `sys.argv` if None.

    Returns:
        The exit code: 0, 1 if something failed, 2 if something is not installed.

    Raises:
        SystemExit: With code 2 for invalid arguments, 0 after ``--help``; at the end of the demo
            or an example, with its code: 130 if it was interrupted.
    """
    if sys.stdout is None:
        print("flatweights: the standard output is closed", file=sys.stderr)
        return 1
    parser = _parser()
    try:
        try:
            options = parser.parse_args(arguments)
            code: int = options.command(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not _lacks_output():
            raise
        if not isinstance(error, BrokenPipeError):  # a reader such as `head` ended
            print(f"flatweights: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _lacks_output() -> bool:
    """Whether the standard output cannot be written; if so, redirect it to the null device."""
    try:
        print(flush=True)  # if output is not buffered, a flush alone writes nothing
    except OSError:
        # Python would flush it once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _programs() -> list[str]:
    """Return the names of the examples."""
    names = (module.name for module in pkgutil.iter_modules(examples.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def _info(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print versions, threads and the code paths in use."""
    config = flatweights.show_config()
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    if has_tensorflow and "flatweights.tensorflow.library._load" not in sys.modules:
        config |= _of_tensorflow()
    width = max(map(len, config))
    for key, value in config.items():
        print(f"{key:<{width}}  {value}")
    return 0


def _of_tensorflow() -> dict[str, str]:
    """Return the code paths that move weights to and from TensorFlow and GPUs, with reasons.

    Only TensorFlow knows its build. A separate process imports it, since TensorFlow writes to
    stderr, and a broken installation may kill the process.
    """
    program = (
        f"say = lambda status: print({_SAID!r} + status(), flush=True)\n"
        "from flatweights.tensorflow.library._load import status; say(status)\n"
        "from flatweights.tensorflow._gpus import status; say(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    names = ("tensorflow path", "GPUs")
    lines = done.stdout.splitlines()
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    paths = dict(zip(names, said, strict=False))
    if done.returncode != 0 and len(paths) < len(names):
        lines = done.stderr.strip().splitlines()
        last = lines[-1] if lines else f"exit code {done.returncode}"
        why = "none, since tensorflow cannot be imported" if not paths else "none, since it failed"
        paths[names[len(paths)]] = f"{why}: {last}"
    return paths


def _build_tf(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compile the library that moves weights without TensorFlow's operations; print its path.

    The first use does the same; this command tries again after a failure.
    """
    if not _is_installed("build-tf", "tensorflow", "tensorflow"):
        return 2
    from flatweights.tensorflow.library._compile import LibraryError
    from flatweights.tensorflow.library._load import build_library

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so that it can clean up
    try:
        print(build_library())
    except LibraryError as error:
        print(f"flatweights build-tf: {error}", file=sys.stderr)
        return 1
    return 0


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Train a Keras model of 22 MB on handwritten digits, data-parallel in Ray actors.

    The digits come from scikit-learn, and the actors run on this machine. Each round is exchanged
    in three ways: as one buffer through shared memory, as one buffer through Ray's object store,
    and as a dict of arrays, as in Ray's guide. Then the actors exchange arrays of other sizes.
    """
    demo.check_options(parser, options)
    if _is_installed("demo", "all", *_NEEDED):
        examples.run(lambda: demo.run(options))
    return 2


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the cost of a round between nodes, for each way that it can take.

    The cost is the number of bytes on the busiest link and the time of a round. The command also
    names the way that a group chooses by itself.
    """
    if not _is_installed("plan", "ray", "ray"):
        return 2
    from flatweights.ray import plan

    arguments = {name: getattr(options, name) for name in ("model", "link", "dtype", "memory")}
    try:
        print(plan(nodes=options.nodes, workers=options.workers, **arguments))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return 0


def _examples(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """List the programs of flatweights.examples, run one, or show its source."""
    asked, name = options.asked, options.name
    if options.plot and (asked is not None or name is None):
        parser.error("--plot: expected the NAME of a program to run")
    if asked == "list" or (asked is None and name is None):
        if name is not None:
            parser.error(f"--list: expected no NAME, got {name!r}")
        for each in _programs():
            print(f"{each:<26}{_first_line(each)}")
        print(
            "\nTo run one: flatweights examples NAME; its options: NAME --help; source: --show NAME"
        )
        return 0
    if asked is not None:
        if name is None:
            parser.error(f"--{asked}: expected the NAME of an example")
        if options.options:
            parser.error(f"--{asked}: expected nothing after NAME, got {options.options[0]!r}")
        source = _source(name)
        print(source if asked == "path" else source.read_text(encoding="utf-8").rstrip())
        return 0
    if not _is_installed("examples", "all", *_NEEDED):
        return 2
    sys.argv = [f"flatweights examples {name}"]  # the name that argparse gives the program

    def program() -> None:
        main = importlib.import_module(f"flatweights.examples.{name}").main
        curves = main(options.options)
        if options.plot and curves is None:
            print(f"plot: none, since {name} has no curves")
        elif options.plot:
            examples.draw(options.plot, _first_line(name), curves)
            print(f"plot: {options.plot}")

    return examples.run(program)


def _first_line(name: str) -> str:
    """Return the first line of an example's docstring, without importing it."""
    with _source(name).open(encoding="utf-8") as source:
        return source.readline().strip().strip('"')


def _source(name: str) -> Path:
    """Return the file of an example."""
    return Path(examples.__path__[0], f"{name}.py")


def _is_installed(command: str, extra: str, *needed: str) -> bool:
    """Return whether all modules that ``command`` needs are installed; if not, print the remedy."""
    missing = ", ".join(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        remedy = f"pip install 'flatweights[{extra}]'"
        print(f"flatweights {command}: {missing} not installed: {remedy}", file=sys.stderr)
    return not missing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flatweights", description=flatweights.__doc__)
    version = f"flatweights {flatweights.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[..., int], help_: str) -> argparse.ArgumentParser:
        """Add a command, which the docstring of its function describes."""
        command = commands.add_parser(name, help=help_, description=run.__doc__)
        command.set_defaults(command=functools.partial(run, command))
        return command

    add("info", _info, "print versions, threads and code paths in use")

    ahead = "compile the op library for the installed TensorFlow, ahead of its first use"
    add("build-tf", _build_tf, ahead)

    programs = add("examples", _examples, "list the programs to read and to change, or run one")
    programs.usage = (
        "flatweights examples [-h] [--plot FILE] [NAME [options of the program]]\n"
        "       flatweights examples --list | --show NAME | --path NAME"
    )
    plot = f"draw the results of the program ({', '.join(PLOT_SUFFIXES)})"
    programs.add_argument("--plot", type=plot_file, metavar="FILE", help=plot)
    asked = {
        "list": "list the programs, as without arguments",
        "show": "print the source of a program",
        "path": "print the path of the source of a program",
    }
    for option, help_ in asked.items():
        programs.add_argument(
            f"--{option}", dest="asked", action="store_const", const=option, help=help_
        )
    name = "the program to run"
    programs.add_argument("name", nargs="?", choices=_programs(), metavar="NAME", help=name)
    programs.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    costs = add(
        "plan", _plan, "print the cost of a round between nodes, for each way that it can take"
    )
    count = integer(1, 10**6)
    costs.add_argument("--nodes", type=count, required=True, help="nodes with workers")
    costs.add_argument("--workers", type=count, required=True, help="workers on each node")
    costs.add_argument("--model", required=True, metavar="SIZE", help="size of a model: 500MB")
    rate = "rate of a node's link, if there are several nodes: 10Gbit"
    costs.add_argument("--link", metavar="RATE", help=rate)
    costs.add_argument("--dtype", default="float32", help="dtype of most weights (float32)")
    memory = "bytes that a node's processes move per second (50GB over channels, else 10GB)"
    costs.add_argument("--memory", metavar="SIZE", help=memory)

    guide = "train on handwritten digits in Ray actors, compared with the loop of Ray's guide"
    demo.add_options(add("demo", _demo, guide))
    return parser
