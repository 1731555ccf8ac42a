"""Averages of the results of Ray actors, and actors whose weights travel as one buffer.

It imports Ray and no other framework: it reaches a model's weights through `Variables`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatweights.ray._average import average
from flatweights.ray._group import WorkerGroup
from flatweights.ray._worker import FlatWorker
from flatweights.ray.core._requests import (
    CallsDifferError,
    MemberDiedError,
    MemberError,
    MemberRaisedError,
    OutOfSyncError,
)
from flatweights.ray.members._member import Member, NotInTrainError, join
from flatweights.ray.members._train import is_replaceable
from flatweights.ray.nodes._costs import CostEstimate, TransportCost, plan
from flatweights.ray.publishing._errors import StaleWeightsError, SupersededError
from flatweights.ray.publishing._publisher import Publisher
from flatweights.ray.publishing._subscriber import Subscriber
from flatweights.ray.results._round import Round
from flatweights.ray.results._variables import Saved, Variables
from flatweights.ray.support._errors import (
    RefusedWeightsError,
    StaleWorkerError,
    StoreTooSmallError,
    WorkerError,
)

if TYPE_CHECKING:
    from flatweights.ray.members._replace import ReplaceWorkers

__all__ = [
    "CallsDifferError",
    "OutOfSyncError",
    "CostEstimate",
    "FlatWorker",
    "Member",
    "MemberDiedError",
    "MemberError",
    "Publisher",
    "MemberRaisedError",
    "NotInTrainError",
    "RefusedWeightsError",
    "ReplaceWorkers",
    "Round",
    "Saved",
    "StaleWeightsError",
    "StaleWorkerError",
    "StoreTooSmallError",
    "Subscriber",
    "SupersededError",
    "Variables",
    "TransportCost",
    "WorkerError",
    "WorkerGroup",
    "average",
    "is_replaceable",
    "join",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Import what needs Ray Train when it is first used: it takes seconds, or is not installed."""
    if name == "ReplaceWorkers":
        from flatweights.ray.members._replace import ReplaceWorkers

        return ReplaceWorkers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
