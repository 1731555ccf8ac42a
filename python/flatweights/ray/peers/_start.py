"""The weights that all workers of a group start from, until others were sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import ray

from flatweights._layout import Layout
from flatweights._weights import FlatWeights
from flatweights.ray.peers._latest import (
    Latest,
    check_follows,
    check_names,
    is_change,
    merged,
    model_of,
)
from flatweights.ray.peers._platform import PLATFORM, GroupPlatform
from flatweights.ray.results._result import copied
from flatweights.ray.support._errors import WorkerError


class GroupStart:
    """The initial weights of a group, and weights that were published before its first call.

    Attributes:
        initial: The initial weights, or "lowest" for those of the lowest healthy rank; None once
            they are not needed any more.
        was_sent: Whether they may have been sent: if all workers refused them or were late, some
            may have them nevertheless, or a half of them.
        published: The latest weights, if they were published first and may be a subset.
        layout: The layout of all weights of the workers; None if unknown.
    """

    def __init__(self, initial: Any, platform: GroupPlatform = PLATFORM) -> None:
        """Take the argument of `WorkerGroup`, and what it uses of Ray."""
        self._get = platform.get
        initial = model_of(initial)
        if isinstance(initial, Mapping) and not isinstance(initial, FlatWeights):
            initial = dict(initial)
        self.initial = copied(initial)  # the caller's weights may change before the first call
        self.was_sent = False
        self.published: Latest | None = None
        self.layout: Layout | None = None

    def weights_with(
        self, weights: Any, latest: Latest, lowest: Callable[[], Any], timeout: float | None
    ) -> Any:
        """Return the first weights to send: all workers start from the same weights.

        Args:
            weights: The weights that the call sends; None for the initial ones. A subset is
                completed by the initial weights.
            latest: The latest weights, which learn all names.
            lowest: A function that returns the weights of the lowest healthy rank.
            timeout: Seconds to get weights that were given by reference.

        Raises:
            WorkerError: If ``weights`` are None, and no rank can give its weights.
        """
        initial = self.initial
        if isinstance(initial, str):
            try:
                initial = lowest()
            except WorkerError:
                if weights is None:
                    raise
                return weights
        model = model_of(weights)
        if isinstance(model, ray.ObjectRef):  # perhaps to a subset
            with contextlib.suppress(Exception):  # the workers say why it cannot be read
                model = self._get(model, timeout)
        if isinstance(initial, ray.ObjectRef) and isinstance(model, Mapping):
            initial = self._get(initial, timeout)  # the model may be a subset
        if isinstance(model, Mapping):
            check_follows(model, initial)
        are_all = isinstance(self.initial, str)  # a user's may be a subset
        if are_all:
            latest.learn(initial)
            if isinstance(initial, FlatWeights):
                self.layout = initial.layout
            elif isinstance(initial, Mapping):
                self.layout = Layout.of(initial)
        if weights is None:
            return initial
        if not isinstance(initial, Mapping) or not is_change(
            model, tuple(initial), are_all, lambda: initial
        ):
            return weights
        if not model.keys() <= initial.keys():
            with contextlib.suppress(WorkerError):
                latest.learn(lowest())
            check_names(initial, latest.own, model)
        return merged(initial, model)

    def publication(self, weights: Any, latest: Latest) -> Any:
        """Return the weights to publish, with those that were published before the first call.

        Raises:
            ValueError: If they do not follow the initial weights.
        """
        model, is_first = model_of(weights), latest is self.published
        if (is_first or latest.version is None) and isinstance(model, ray.ObjectRef):
            weights = model = self._get(model)
        if is_first and isinstance(model, Mapping):
            earlier = latest.model()  # perhaps another subset, of names that are not known
            weights = {**earlier, **model} if isinstance(earlier, Mapping) else model
        if (is_first or latest.version is None) and isinstance(model, Mapping):
            if isinstance(self.initial, ray.ObjectRef):
                self.initial = self._get(self.initial)
            check_follows(model_of(weights), self.initial)
        return weights

    def note_published(self, before: Latest, latest: Latest) -> None:
        """Note that ``latest`` were published after ``before``."""
        is_open = self.initial is not None or not latest.own
        if is_open and (before.version is None or before is self.published):
            self.published = latest
