"""A process group without Ray: its thread and its members in this process, with real channels."""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.core._events import Action, SendState
from flatweights.ray.core._peer import PeerState
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._member import Member
from flatweights.ray.members._process_group import ProcessGroup
from flatweights.ray.members._rendezvous import Entry, JoinReply
from flatweights.ray.members._repetitions import Series
from flatweights.ray.members._sessions import Session


def entry_of(rank: int | None, config: GroupConfig) -> Entry:
    """Return the entry of a process of this node that wants to be a member."""
    token, who, now = secrets.token_bytes(16), f"process of rank {rank}", time.monotonic()
    return Entry(token, rank, config, who, "here", True, None, now, Future(), Future())


def with_sessions(group: ProcessGroup, *ranks: int) -> list[tuple[Entry, JoinReply]]:
    """Give ``ranks`` join replies, while no thread runs the process group."""
    entries = [entry_of(rank, group._config) for rank in ranks]
    for entry in entries:
        group.rendezvous.enter(entry)
    group.rendezvous.admit()
    return [(entry, entry.join_reply.result()) for entry in entries]


class Watched(ProcessGroup):
    """A process group that knows whether a member has been healed."""

    states_sent = 0

    @property
    def heals(self) -> bool:
        """Whether a healing is under way, or was."""
        return bool(self.calls.healings or self.states_sent)

    def _do(self, action: Action) -> bool:
        self.states_sent += isinstance(action, SendState)
        return super()._do(action)


class LocalProcessGroup:
    """A process group and the thread that runs it."""

    def __init__(self, size: int, min_size: int | None = None, grace: float | None = None) -> None:
        self.size = size
        self.config = GroupConfig.of(size, min_size=min_size, grace=grace)
        self.group = Watched("local", self.config, "here", None)
        self.thread = threading.Thread(target=self.group.run, daemon=True)
        self.thread.start()

    def enter(self, rank: int | None) -> Entry:
        """Ask for a join reply."""
        entry = entry_of(rank, self.config)
        self.group.queue.post(self.group.rendezvous.enter, entry)
        return entry

    def channel(self, entry: Entry) -> MemberChannel:
        """Make the channel for the join reply."""
        join_reply = entry.join_reply.result()
        assert join_reply.address is not None
        channel = MemberChannel(join_reply.address, entry.token)
        try:
            self.group.queue.call(self.group.attach, entry.token, channel.mailbox.nonce)
        except BaseException:
            channel.close()
            raise
        return channel

    def member(self, entry: Entry, channel: MemberChannel) -> Member:
        """Wait for the first response."""
        join_reply = entry.join_reply.result()
        coordinator = ChannelClient(
            None, Identity(entry.token, entry.who), channel, join_reply.session
        )
        return Member("local", coordinator, join_reply, coordinator.start(60.0))

    def join(self, rank: int | None = None) -> Member:
        """Join, as `flatweights.ray.join` does."""
        entry = self.enter(rank)
        return self.member(entry, self.channel(entry))

    def join_all(self) -> list[Member]:
        """Return a member for each rank."""
        entries = [self.enter(rank) for rank in range(self.size)]
        channels = [self.channel(entry) for entry in entries]
        return [
            self.member(entry, channel) for entry, channel in zip(entries, channels, strict=True)
        ]

    def watch_series(self, note: Callable[[Series], object]) -> None:
        """Call ``note`` after each series of calls that were made in C++."""
        repetitions: Any = self.group._repetitions
        run = repetitions.run

        def watched(*args: Any) -> Series:
            series: Series = run(*args)
            note(series)
            return series

        repetitions.run = watched

    def lose(self, entry: Entry, why: Any) -> None:
        """Count a process as lost, as the coordinator does when it gives up."""
        self.group.queue.post(self.group.lose, entry.token, why)

    def last_call(self) -> int:
        """Return the number of the last call, with those of a series that is made in C++ now."""
        number: int = self.group.queue.call(lambda: self.group.calls.number)
        return number

    def wait_until(self, is_true: Any) -> None:
        """Wait until ``is_true(group)`` holds in the thread of the process group.

        It looks ever less often: each look takes the interpreter from threads that trace a model,
        and on a busy machine they get it back late.
        """
        pause = 0.001
        while not self.group.queue.call(is_true, self.group):
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)

    def until_one_is_back(self) -> None:
        """Wait until a member that lacks the state waits for it, or has got it."""
        self.wait_until(lambda group: group.calls.waiting.recovering or group.heals)

    def until_asked(self, *ranks: int) -> None:
        """Wait until the open call consists of the requests of ``ranks``, which may be unread."""

        def has_asked(session: Session) -> bool:
            if session in self.group.calls.waiting.asking:
                return True
            return (
                session.state is PeerState.WORKING
                and session.channel is not None
                and session.channel.is_answered
            )

        self.wait_until(
            lambda group: sorted(ranks) == [s.rank for s in by_rank(group) if has_asked(s)]
        )


def by_rank(group: ProcessGroup) -> list[Session]:
    """Return the present members, in the order of their ranks."""
    return sorted(group.rendezvous.present.values(), key=lambda session: session.rank)


def kill(member: Member) -> None:
    """Close the socket of a member, as the death of its process does."""
    coordinator = member._coordinator
    assert isinstance(coordinator, ChannelClient)
    coordinator._channel.connection.shutdown(socket.SHUT_RDWR)
