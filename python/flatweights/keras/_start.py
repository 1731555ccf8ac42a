"""The start of a training: all members get the same variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flatweights.keras._member_handle import (
    MemberHandle,
    calls_are_equal,
    check_in_time,
    out_of_sync_is_error,
)
from flatweights.keras._settings import check_alike
from flatweights.ray import CallsDifferError, OutOfSyncError, Round, Variables, WorkerError


class FitStart(NamedTuple):
    """What a member tells the others at its start.

    Attributes:
        in_step: Whether it is in a step, whose gradients were computed from its own variables.
        epoch: The first epoch of a `fit`; None, if it is not known yet.
        names: A digest of the names of its variables.
        values: A digest of their values.
        settings: The settings by which it decides; see `_settings.settings_of`.
    """

    in_step: bool
    epoch: int | None
    names: bytes
    values: bytes
    settings: dict[str, str]


def start_alike(handle: MemberHandle, variables: Variables, own: Callable[[], FitStart]) -> Round:
    """Give all members the ``variables`` of the lowest rank, unless they have them.

    If the others train already, the member lacks the state afterwards: it will be healed.

    Args:
        handle: The member.
        variables: Its variables.
        own: Returns what it tells the others.

    Returns:
        The round in which the members have compared their variables.

    Raises:
        CallsDifferError: If members begin with different epochs or settings.
        TimeoutError: If all members are needed, and this one is late.
        ValueError: If it is too late to set the variables.
    """
    member = handle.take()

    def compare() -> Round:
        start = own()
        if start.epoch is None:
            return handle.gather(tuple(start), "the start of training", at="start")
        return handle.gather(tuple(start), "the first epoch", at="epoch")

    def give(started: Round) -> Callable[[], object] | None:
        starts = {rank: FitStart(*given) for rank, given in started.weights.items()}
        _check(starts)
        root = min(started.used)
        different = [rank for rank, one in starts.items() if one[2:4] != starts[root][2:4]]
        if not different:
            return None
        have_same_names = len({one.names for one in starts.values()}) == 1
        if have_same_names and any(one.in_step for one in starts.values()):
            raise ValueError(
                "average_gradients: at the first step expected the variables and the optimizer's "
                f"slots of rank 0 in all members, got other values in ranks {different}. Before "
                "fit, build the model, as by model(x[:1]), and call "
                "model.optimizer.build(model.trainable_variables), which sets them, or use the "
                "callback AverageLogs, which calls it for a model that is built"
            )
        return lambda: member.broadcast_variables(variables, root, timeout=handle.timeout)

    return take_from_lowest_rank(handle, "the start of training", compare, give)


def take_from_lowest_rank(
    handle: MemberHandle,
    what: str,
    compare: Callable[[], Round],
    give: Callable[[Round], Callable[[], object] | None],
) -> Round:
    """Give all members what the lowest rank that takes part has.

    If that member dies meanwhile, another one takes its place. With ``min_results``, the others do
    not wait for a late member, which then lacks the state of their training.

    Args:
        handle: The member.
        what: What is compared, for errors.
        compare: Meets the others.
        give: Returns what broadcasts after such a round; None, if that is not needed.

    Returns:
        The last round of ``compare``.

    Raises:
        TimeoutError: If all members are needed, and this one is late.
    """
    member, needs_all = handle.take(), handle.min_results is None
    while True:
        compared = compare()
        if needs_all:
            check_in_time(compared, what)
        elif member.rank in compared.late:
            member.lacks_state = True
            return compared
        broadcast = give(compared)
        if broadcast is None:
            return compared
        try:
            with calls_are_equal(member, "start"), out_of_sync_is_error(member, not needs_all):
                broadcast()
        except OutOfSyncError:  # they have not waited for this member, which may be the root
            member.lacks_state = True
        except WorkerError:
            if needs_all:
                raise
            continue
        return compared


def _check(starts: Mapping[int, FitStart]) -> None:
    """Raise if members begin with different epochs or settings."""
    check_first_epochs({rank: one.epoch for rank, one in starts.items()})
    check_alike(
        "average_gradients: expected optimizers and callbacks that change all members alike",
        {rank: one.settings for rank, one in starts.items()},
    )


def check_first_epochs(epochs: Mapping[int, int | None]) -> None:
    """Raise if members begin with different ``epochs``, by rank."""
    if len({*epochs.values()}) > 1:
        begin = [f"rank {rank} begins with epoch {epoch}" for rank, epoch in epochs.items()]
        raise CallsDifferError(
            f"expected all members to begin with the same epoch, got {', '.join(begin)}. Give fit "
            "the same initial_epoch, and a BackupAndRestore either to all members or to none"
        )
