"""Options that programs share."""

import argparse

from flatweights._arguments import PLOT_SUFFIXES, integer, plot_file


def make_parser(description: str | None, plot: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of a program's command line that has ``--seed``.

    Args:
        description: What ``--help`` says first: the docstring of the program.
        plot: What ``--plot`` draws; None for a program without.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed",
        type=integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of the data and the first weights; default: %(default)s",
    )
    if plot is not None:
        parser.add_argument(
            "--plot",
            type=plot_file,
            metavar="FILE",
            help=f"draw {plot} ({', '.join(PLOT_SUFFIXES)})",
        )
    return parser
