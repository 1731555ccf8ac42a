"""`flatweights demo`: handwritten digits, trained data-parallel in Ray actors.

In each round, the actors train on their shares of the digits. Then their weights or gradients are
averaged, and all actors continue from the average. The demo does that exchange in three ways, from
the same weights: by a `flatweights.ray.WorkerGroup`, through Ray's object store by
`flatweights.ray.average`, and by the loop over dicts of arrays from Ray's guide. Afterwards,
the same actors exchange the same number of variables in other sizes. With ``--kill-worker``, the
demo instead kills one worker's process half-way, and the training goes on.

Importing this package imports neither TensorFlow nor Ray; `run` does.
"""

import argparse
from typing import NamedTuple

from flatweights.demo._arguments import PLOT_SUFFIXES, integer, plot_file

__all__ = ["SIZES", "add_options", "check_options", "run"]


class Size(NamedTuple):
    """The network's width and residual layers; megabytes exchanged without it, and how often."""

    width: int
    depth: int
    others: tuple[float, ...]
    repeats: int


SIZES = {"full": Size(336, 48, (1.0, 100.0), 5), "small": Size(48, 8, (0.1, 1.0), 2)}
SCHEDULES = {"weights": (20, 20), "gradients": (200, 1)}
"""By mode, the rounds and local steps that reach 95 % on two workers."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo."""
    add = parser.add_argument
    many, weights, gradients = integer(1, 100_000), SCHEDULES["weights"], SCHEDULES["gradients"]
    add("--workers", type=integer(1, 64), default=2, help="Ray actors; default: %(default)s")
    rounds = f"averages to take; default: {weights[0]}, with gradients {gradients[0]}"
    add("--rounds", type=many, help=rounds)
    steps = f"batches of a worker in a round; default: {weights[1]}, with gradients {gradients[1]}"
    add("--local-steps", type=many, help=steps)
    seed = "seed of the data's split, the batches and the weights"
    add("--seed", type=integer(0, 2**32 - 1), default=0, help=seed)
    mode = "the values to average; default: %(default)s"
    add("--mode", choices=tuple(SCHEDULES), default="weights", help=mode)
    size = "the network: 22 MB in 100 variables or 0.1 MB in 20; default: %(default)s"
    add("--size", choices=tuple(SIZES), default="full", help=size)
    kill = "kill a worker's process half-way, go on without it, take it back; only our exchange"
    add("--kill-worker", action="store_true", help=kill)
    plot = f"picture of the results ({', '.join(PLOT_SUFFIXES)}); default: %(default)s"
    add("--plot", type=plot_file, default="flatweights-demo.png", metavar="FILE", help=plot)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the mode, and refuse options that exclude others."""
    rounds, local_steps = SCHEDULES[options.mode]
    options.rounds = options.rounds or rounds
    options.local_steps = options.local_steps or local_steps
    if not options.kill_worker:
        return
    for name in ("workers", "rounds"):
        if getattr(options, name) < 2:
            parser.error(f"--kill-worker: expected at least 2 {name}, got 1")
    if options.mode != "weights":
        parser.error(f"--kill-worker: expected --mode weights, got {options.mode}")


def run(options: argparse.Namespace) -> None:
    """Train; print progress, a table and the weights' digest; draw a picture.

    Raises:
        SystemExit: If Ray did not start.
        flatweights.ray.WorkerError: If a worker failed.
        OSError: If the plot could not be written.
    """
    from flatweights.demo._training import train

    train(options)
