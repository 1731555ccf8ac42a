"""Every order of events of a core, within a budget of faults: `python -m tests.sim --orders`.

A schedule tries one order with all of the package, an order here only what decides. So there are
thousands a second, and a state to which several orders lead is looked at once: the result is no
sample, but all orders of the events of a `Setup`. The first one that breaks a promise is one of the
shortest, and its moves are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from tests.sim import mutants

# What imports the package is imported in functions, since a mutant changes the package before.

Move = tuple[Any, ...]

# The files of the core of members' calls.
CORE = tuple(
    f"core/_{name}.py" for name in ("calls", "healing", "peer", "response_cache", "waiting")
)

# No setup has two models of one layout.
_OF_TWINS = ("a twin's response is not noted", "members at the other twin go on")

_FEW = 100  # random orders of each setup in which most wrong changes are found


class WrongError(AssertionError):
    """A core has broken a promise."""


class Model(Protocol):
    """A core, and all that may happen to it.

    Attributes:
        entities: The class of objects that have a number, and refer to each other.
        values: A class of values whose texts tell them apart.
    """

    entities: ClassVar[type]
    values: ClassVar[type]

    def moves(self) -> Iterator[Move]:
        """Yield all that may happen next."""

    def make(self, move: Move) -> None:
        """Let it happen.

        Raises:
            WrongError: If the core breaks a promise.
        """

    def recovers(self) -> bool:
        """Go on without faults; return whether all take part in one round then."""


class Order(NamedTuple):
    """An order that has led to an error."""

    moves: list[Move]
    error: BaseException


class Explored(NamedTuple):
    """What was looked at.

    Attributes:
        states: The number of states that differ.
        steps: The number of moves that were made.
        depth: The number of moves of the longest orders.
        is_all: Whether no order is left.
        wrong: The first order that has led to an error.
    """

    states: int
    steps: int
    depth: int
    is_all: bool
    wrong: Order | None

    def __str__(self) -> str:
        """Return the figures in a line."""
        whole = "all orders" if self.is_all else f"all orders of {self.depth} events"
        return f"{whole}: {self.states:,} states, {self.steps:,} steps"


def explore(first: Model, most: int = sys.maxsize) -> Explored:
    """Look at all orders, the shortest first, until there are ``most`` states."""
    parents: list[tuple[int, Move]] = [(-1, ())]
    seen = {_key(first)}
    frontier = [(0, pickle.dumps(first))]
    steps = depth = 0
    while frontier and len(seen) < most:
        reached: list[tuple[int, bytes]] = []
        for parent, state in frontier:
            for move in [*pickle.loads(state).moves()]:
                model = pickle.loads(state)
                steps += 1
                try:
                    model.make(move)
                except Exception as error:
                    wrong = Order([*_way(parents, parent), move], error)
                    return Explored(len(seen), steps, depth, False, wrong)
                key = _key(model)
                if key not in seen:
                    seen.add(key)
                    parents.append((parent, move))
                    reached.append((len(parents) - 1, pickle.dumps(model)))
        frontier, depth = reached, depth + 1
    return Explored(len(seen), steps, depth, not frontier, None)


def walk(first: bytes, seed: int, most: int) -> tuple[int, Order | None]:
    """Make moves at random, and then go on without faults; return their number, and an error."""
    chance, model, moves = random.Random(seed), pickle.loads(first), list[Move]()
    try:
        while len(moves) < most and (there := [*model.moves()]):
            moves.append(chance.choice(there))
            model.make(moves[-1])
        if not model.recovers():
            raise WrongError("no call of all comes after the faults")
    except Exception as error:
        return len(moves), Order(moves, error)
    return len(moves), None


def _way(parents: list[tuple[int, Move]], at: int) -> list[Move]:
    """Return the moves that lead to a state."""
    moves: list[Move] = []
    while at > 0:
        at, move = parents[at]
        moves.append(move)
    return moves[::-1]


def _key(model: Model) -> bytes:
    """Return a digest of a state, equal for equal states, whichever of their objects are the same.

    An entity stands there by its number, and follows at the end.
    """
    file, entities, known = io.BytesIO(), list[Any](), set[int]()

    def reduced(entity: Any) -> Any:
        if entity.number not in known:
            known.add(entity.number)
            entities.append(entity)
        return int, (entity.number,)

    pickler = pickle.Pickler(file, 5)
    pickler.fast = True  # without references to what was pickled before
    texts = {model.values: lambda value: (str, (str(value[:]),))}
    pickler.dispatch_table = {model.entities: reduced, **texts}
    pickler.dump(vars(model))
    for entity in entities:  # which grow meanwhile
        pickler.dump([value for name, value in vars(entity).items() if name != "peers"])
    return hashlib.blake2b(file.getvalue(), digest_size=12).digest()


def main(arguments: Sequence[str]) -> None:
    """Look at all orders of the setups, or at some at random, or try mutants."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim --orders", description=__doc__)
    parser.add_argument("names", nargs="*", help="setups, or mutants; all, if there is none")
    parser.add_argument("--states", type=int, default=200_000, help="most states of each setup")
    parser.add_argument(
        "--random", type=int, default=0, help="so many random orders of each instead"
    )
    parser.add_argument("--moves", type=int, default=80, help="most moves of a random order")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first random order")
    parser.add_argument("--mutants", action="store_true", help="how soon wrong changes are found")
    parser.add_argument("--mutant", help="look at the orders of this wrong change")
    args = parser.parse_args(arguments)
    if args.mutants:
        sys.exit(0 if _try_mutants(args.names, args.random or 2000) else 1)
    if args.mutant is not None:
        mutants.install(args.mutant)
    from tests.sim.call_orders import SETUPS, CallsModel

    unknown = {*args.names} - SETUPS.keys()
    if unknown:
        parser.error(f"names: expected some of {', '.join(SETUPS)}, got {', '.join(unknown)}")
    for name in args.names or SETUPS:
        begin, model = time.process_time(), CallsModel(SETUPS[name])
        if args.random:
            seeds = range(args.first, args.first + args.random)
            found, text = _walks(pickle.dumps(model), seeds, args.moves)
        else:
            explored = explore(model, args.states)
            found, text = explored.wrong, str(explored)
        print(f"{name}: {text}, {time.process_time() - begin:.1f} s", flush=True)
        if found is not None:
            print(f"  {type(found.error).__name__}: {found.error}")
            print(*(f"    {' '.join(map(str, move))}" for move in found.moves), sep="\n")
            sys.exit(1)


def _walks(first: bytes, seeds: Iterable[int], most: int) -> tuple[Order | None, str]:
    steps = count = 0
    for seed in seeds:
        moves, wrong = walk(first, seed, most)
        steps, count = steps + moves, count + 1
        if wrong is not None:
            return wrong, f"wrong in random order {seed}"
    return None, f"{count:,} random orders, {steps:,} steps"


def _try_mutants(names: Sequence[str], count: int) -> bool:
    """Look for mutants of the core in random orders; return whether all are found."""
    names = names or [
        k for k, one in mutants.MUTANTS.items() if one.file in CORE and k not in _OF_TWINS
    ]
    found = 0
    for name in names:
        command = [sys.executable, "-W", "ignore", "-m", "tests.sim", "--orders", "--mutant", name]
        for few in (_FEW, count):  # most are found at once, but each by another setup
            ran = subprocess.run(
                [*command, "--random", str(few)], capture_output=True, text=True, check=False
            )
            if ran.returncode:
                break
        how = re.search(r"^(.*): wrong in random order (\d+), .*\n *(.*)", ran.stdout, re.MULTILINE)
        if how is None:
            print(f"{name}: NOT FOUND{ran.stderr[-300:]}", flush=True)
        else:
            found += 1
            print(f"{name}: {how[1]!r}, order {how[2]}: {how[3][:80]}", flush=True)
    print(f"{found} of {len(names)} mutants are found")
    return found == len(names)
