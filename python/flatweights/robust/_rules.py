"""The base of all rules: it reads the sources, leaves some out, and reports which were used."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flatweights import _core
from flatweights._average import Job, Nonfinite

Source = TypeVar("Source")
"""An array, `FlatWeights`, a mapping of arrays, or a sequence of arrays."""


@dataclass(frozen=True)
class Aggregate(Generic[Source]):
    """The result of a rule.

    Attributes:
        weights: The model.
        used: The positions of the sources that the rule used: those that it selected, or all
            that were not left out for NaN and infinity.
        scores: The number for each source by which the rule selected or weighed it; NaN for sources
            left out for NaN and infinity; None for rules by coordinate.
    """

    weights: Source
    used: list[int]
    scores: list[float] | None = None


class Rule(ABC):
    """Combines several models into one that a few wrong models cannot spoil.

    A rule is called with sources, like `flatweights.average`, and replaces the mean wherever this
    package has a ``rule=``. Any function from a list of sources to a model can replace it, too, but
    a rule also reports which sources it used.
    """

    takes_weights = False

    @staticmethod
    def of(rule: AnyRule) -> Rule:
        """Return a value of ``rule=`` as a rule: ``rule`` itself, or a rule that calls it.

        >>> Rule.of(lambda models: models[0])([np.ones(2), np.zeros(2)])
        array([1., 1.])

        Args:
            rule: A rule, or a function from a list of models to one of their kind.

        Raises:
            TypeError: If it cannot be called.
        """
        if isinstance(rule, Rule):
            return rule
        if isinstance(rule, type) or not callable(rule):
            raise TypeError(
                "rule: expected a value such as flatweights.robust.Median(), or a function of a "
                f"list of models, got {rule!r}"
            )
        return Calling(rule)

    @property
    def name(self) -> str:
        """How errors name it."""
        return type(self).__name__

    def __repr__(self) -> str:
        """The name and the options, by which members compare their rules."""
        return self.name

    def converted(self, convert: Callable[[Any, str], Any]) -> Rule:
        """Return this rule for sources that were converted, as its own models are by ``convert``.

        Sources may travel in another form: packed, or as differences from a model. A rule that
        holds models, such as a centre, returns a copy that holds these in the same form.

        Args:
            convert: A function of a model and of its name in errors.
        """
        return self

    def __call__(
        self,
        sources: Iterable[Source],
        weights: Iterable[float] | None = None,
        *,
        out: Source | None = None,
        nonfinite: Nonfinite = "propagate",
    ) -> Source:
        """Return the model that this rule makes of ``sources``.

        Args:
            sources: Models, all of one kind, as for `flatweights.average`.
            weights: One weight per source, for a rule that has weights.
            out: Model to write to. It may be one of the sources.
            nonfinite: As for `flatweights.average`.

        Raises:
            TypeError: As `flatweights.average`; or for ``weights``, if the rule has none.
            ValueError: As `flatweights.average`; or if there are too few sources.
        """
        return self.apply(sources, weights, out=out, nonfinite=nonfinite).weights

    def apply(
        self,
        sources: Iterable[Source],
        weights: Iterable[float] | None = None,
        *,
        out: Source | None = None,
        nonfinite: Nonfinite = "propagate",
        names: Sequence[str] | None = None,
    ) -> Aggregate[Source]:
        """Return the result of calling the rule, with the sources used and their scores.

        Args:
            sources: As for the call.
            weights: As for the call.
            out: As for the call.
            nonfinite: As for the call.
            names: The names of the sources in errors, if not numbers.
        """
        if weights is not None and not self.takes_weights:
            raise TypeError(f"{self.name} has no weights: all sources count alike")
        job = Job(sources, weights, out, nonfinite, names)
        used, scores = self._run(job)
        return Aggregate(job.result, used, scores)

    @abstractmethod
    def _run(self, job: Job) -> tuple[list[int], list[float] | None]:
        """Write the result; return the positions of the sources used, and scores."""


AnyRule = Rule | Callable[[list[Any]], Any]
"""A value of ``rule=``: a rule, or a function from a list of models to one of their kind."""


class Calling(Rule):
    """A rule that calls a function from a list of models to one of their kind."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        """Take the function."""
        self._function = function

    @property
    def name(self) -> str:
        """The name of the function, or of the class of another object that can be called."""
        function = self._function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__name__", type(function).__name__)

    def _run(self, job: Job) -> tuple[list[int], list[float] | None]:
        job.check(job.parts)
        used = job.everything if job.nonfinite == "propagate" else job.finite()
        # A copy: the function may return one of its sources, or keep the model that it returns.
        made = self._function([job.models[k] for k in used])
        job.template.match(made, "the result of the rule")
        parts = job.template.read(made, "the result of the rule")
        try:
            job.check([parts])
        except ValueError:  # they are other parts of `out`, or of the source that it is
            parts = [part.copy() for part in parts]
        _core.move_parts(job.written, parts)
        return used, None


def set_checked(rule: Rule, **options: float) -> None:
    """Set options of a frozen rule to checked numbers: equal ones have one `repr`."""
    for name, value in options.items():
        object.__setattr__(rule, name, value)


class CoordinateRule(Rule):
    """A rule that treats each number of the models independently of the others."""

    @abstractmethod
    def ranks(self, count: int) -> tuple[int, int, int]:
        """Return which of ``count`` sorted numbers to average.

        The first two results are the begin and the end of a range of ranks. If the third is not 0,
        that many numbers nearest to the median are averaged instead.
        """

    def _run(self, job: Job) -> tuple[list[int], list[float] | None]:
        self.ranks(len(job.parts))
        return job.screened(lambda used: write_ranks(job, used, *self.ranks(len(used)))), None


def write_ranks(job: Job, used: Sequence[int], first: int, last: int, nearest: int) -> bool:
    """Write the mean of some ranks of the sources ``used``; return whether these are finite."""
    return _core.order_into(
        job.template.layout.core,
        job.template.packed,
        job.written,
        [job.parts[k] for k in used],
        first,
        last,
        nearest,
    )
