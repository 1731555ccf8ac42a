"""The command line of `resnet`, and the images that it asks for."""

import argparse
from pathlib import Path
from typing import Any

from flatweights._arguments import fraction, integer, positive
from flatweights.examples._cifar import FORMATS, Cifar
from flatweights.examples._images import Digits, Images
from flatweights.examples._options import make_parser

ENOUGH = 0.95  # of digits


def parse_options(description: str | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: What ``--help`` says first: the docstring of the program.
    """
    parser = make_parser(description, plot="loss and accuracy by round")

    def number(name: str, kind: Any, default: Any, text: str) -> None:
        text = f"{text}; default: %(default)s"
        parser.add_argument(name, type=kind, default=default, metavar="N", help=text)

    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num-gpus", type=integer(1), metavar="N", help="one worker on each")
    where.add_argument(
        "--num-workers", type=integer(1), default=2, metavar="N", help="on the CPU; default: 2"
    )
    parser.add_argument("--mode", choices=("eager", "graph"), default="eager", help="graph: of TF1")
    parser.add_argument("--train-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    parser.add_argument("--eval-data-path", metavar="FILES", help="of CIFAR, with * and ?")
    parser.add_argument("--dataset", choices=tuple(FORMATS), help="default: told by the files")
    number("--num-residual-units", integer(1), 5, "in each of three stages")
    number("--rounds", integer(1), 30, "how often to average")
    number("--steps", integer(1), 10, "that each worker takes in a round")
    number("--batch-size", integer(1), 32, "images that each worker takes in a step")
    number("--learning-rate", positive(), 0.05, "a tenth from half, and from 3/4 of the rounds")
    number("--eval-every", integer(1), 5, "rounds, unless the one before still runs")
    number("--save-every", integer(1), 10, "rounds")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=Path("resnet-checkpoints"),
        metavar="DIR",
        help="default: %(default)s",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint there")
    parser.add_argument("--log-dir", metavar="DIR", help="write summaries for TensorBoard")
    parser.add_argument(
        "--enough",
        type=fraction,
        metavar="ACCURACY",
        help=f"fail if it is below; default: {ENOUGH} for digits, 0 for files",
    )
    options = parser.parse_args()
    if (options.train_data_path is None) != (options.eval_data_path is None):
        parser.error("--train-data-path, --eval-data-path: expected both or none")
    if options.dataset and options.train_data_path is None:
        parser.error("--dataset: expected --train-data-path and --eval-data-path with it")
    if options.enough is None:
        options.enough = ENOUGH if options.train_data_path is None else 0.0
    return options


def find_images(options: argparse.Namespace) -> tuple[Images, Images]:
    """Return what to train and what to evaluate on.

    Raises:
        CifarError: If files are not as they should be.
    """
    if options.train_data_path is None:
        return Digits(options.seed), Digits(options.seed, held_out=True)
    train = Cifar.find(options.train_data_path, options.dataset)
    return train, Cifar.find(options.eval_data_path, train.name)


def settings_of(options: argparse.Namespace, train: Images) -> dict[str, Any]:
    """Return what may not change when a training is resumed: the network and how it is trained."""
    names = ("num_residual_units", "rounds", "steps", "batch_size", "learning_rate", "seed")
    settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    return settings | {"images": train.name, "number of images": train.size}
