"""The rendezvous: processes join a group, and get a rank in the order of their arrival.

A rank is free once its old process has left or died. The process group opens when all members are
ready, or enough of them, and the grace is over. A process that is coming in counts as a member; if
it gives up or dies, the process group forgets it. A process that has left comes for the next
process group of this name, and waits for the end of this one, unless members come and go
(``min_size`` below ``size``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, cast

import ray

from flatweights.ray import _clock
from flatweights.ray.channels._driver_channel import Channels
from flatweights.ray.core._deadline import Deadline
from flatweights.ray.core._peer import Peers, PeerState
from flatweights.ray.core._requests import MemberDiedError
from flatweights.ray.members._call_queue import CallQueue
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._sessions import Session
from flatweights.ray.peers._by_agent import AgentClient, Agents
from flatweights.ray.peers._wait import seconds_left

_GRACE = 5.0  # seconds in which the end of a rank's old process may become known
_AGENT_TELLS = 10.0  # seconds: a link that is silent sends again after 5 to 6, through Ray
_EMPTY = 60.0  # seconds for which a process group without members waits for the first one

_log = logging.getLogger("flatweights")


class JoinReply(NamedTuple):
    """The reply to a process that joins.

    Attributes:
        rank: Its rank.
        session: The number of its session.
        address: The address to make a channel to; None, if the member calls through Ray.
        node_agent: On another node, the agent of that node, to which it makes a channel instead.
    """

    rank: int
    session: int
    address: bytes | None
    node_agent: ray.actor.ActorHandle | None = None


class Entry(NamedTuple):
    """A process that wants to be a member.

    Attributes:
        token: The token by which it is recognised.
        rank: The rank that it wants; any, if None.
        config: The configuration that it expects of the process group.
        who: The name of the process in errors.
        node: Its node.
        wants_channel: Whether it can use a channel.
        task: The id of its Ray task; None, if it is in none.
        since: The time of its arrival, by `time.monotonic`.
        join_reply: A future for the reply that it waits for.
        over: A future that is done once it is not, and will not be, a member.
    """

    token: bytes
    rank: int | None
    config: GroupConfig
    who: str
    node: str
    wants_channel: bool
    task: str | None
    since: float
    join_reply: Future[JoinReply]
    over: Future[None]

    def end(self, error: Exception) -> None:
        """Refuse it a join reply."""
        self.join_reply.set_exception(error)
        self.over.set_result(None)


class Rendezvous:
    """The members of a process group, and those that are coming in.

    Attributes:
        peers: The members, as the calls see them.
        present: The present members, by token.
        is_open: Whether all have joined, or enough, and the grace is over.
    """

    def __init__(
        self,
        name: str,
        config: GroupConfig,
        node: str,
        channels: Channels,
        agents: Agents,
        queue: CallQueue,
        on_event: Callable[[Session], object],
        lose: Callable[[Session, MemberDiedError], object],
    ) -> None:
        """Let nobody in yet.

        Args:
            name: The name of the process group.
            config: The configuration that all members expect.
            node: The node of the process group.
            channels: The channels to members on this node.
            agents: The agents of other nodes.
            queue: The calls that the process group's thread makes.
            on_event: A function that handles the request, or the end, of a member.
            lose: A function that counts a member as dead.
        """
        self._name, self._config, self._node = name, config, node
        self._channels, self._agents, self._queue = channels, agents, queue
        self._on_event, self._lose = on_event, lose
        self.peers = Peers()
        self.present: dict[bytes, Session] = {}
        self._has_begun = False  # whether any process has arrived
        self.is_open = False
        self._entries: list[Entry] = []  # processes that wait for a rank
        self._of_next: list[Entry] = []  # processes that have left, and wait for the end
        self._entered = 0  # the number of sessions so far
        self._left: set[str] = set()  # processes that have left, unless members come and go
        self._grace: Deadline | None = None  # runs from the first member that is ready
        self._watched: set[str] = set()  # the tokens of agents
        # Reports of deaths that agents may still correct, and until when.
        self._reports: dict[Session, tuple[float, MemberDiedError]] = {}
        self._empty_until = _clock.now() + _EMPTY

    @property
    def is_in_use(self) -> bool:
        """Whether there are members, or the first is still to come, or is about to come in."""
        if self.present:
            return True
        if not self._has_begun:
            return _clock.now() < self._empty_until
        return not self.sessions and bool(self._entries)

    @property
    def sessions(self) -> dict[int, Session]:
        """By rank, the newest process that has joined, and may have ended, or is coming in."""
        return cast("dict[int, Session]", self.peers.newest)

    def absent(self) -> list[int]:
        """Return the ranks that have not joined."""
        joined = {
            session.rank
            for session in self.present.values()
            if session.state is not PeerState.ENTERING
        }
        return [rank for rank in range(self._config.size) if rank not in joined]

    def awaited_by(self, token: bytes) -> tuple[list[int], bool]:
        """Return the ranks for which a process waits, and whether it waits for them to leave."""
        if any(entry.token == token for entry in self._of_next):
            return [*self.peers.ranks()], True
        return self.absent(), False

    def lost(self) -> list[tuple[str, str]]:
        """Return the tasks and processes of members that died and were not replaced.

        If no member has left by itself, nobody is lost: all may come back.
        """
        newest = [*self.sessions.values()]
        if not any(session.state is PeerState.LEFT for session in newest):
            return []
        dead = [session for session in newest if session.state is PeerState.DEAD]
        return [(one.task, one.who) for one in dead if one.task is not None]

    def ends(self) -> list[float]:
        """Return the times, by `time.monotonic`, at which something is due here."""
        ends = [self._patience_of(entry) for entry in self._entries]
        ends += [end for end, _ in self._reports.values()]
        if not self.sessions:
            ends.append(_clock.now() + _GRACE)
        grace = None if self._grace is None or self.is_open else self._grace.end
        return [*ends, grace] if grace is not None and seconds_left(grace) else ends

    def doubt(self, session: Session, why: MemberDiedError) -> None:
        """Wait for what the agent of a member tells, although Ray reports the member's death."""
        self._reports[session] = _clock.now() + _AGENT_TELLS, why

    def believe_reports(self) -> None:
        """Count members as dead of which agents have told nothing in time."""
        for session, (end, why) in [*self._reports.items()]:
            if session.is_present and _clock.now() < end:
                continue
            del self._reports[session]
            if session.is_present:
                self._lose(session, why)

    def enter(self, entry: Entry) -> None:
        """Queue ``entry``, to get a join reply or an error."""
        self._has_begun = True
        self._entries.append(entry)

    def admit(self) -> None:
        """Give join replies to processes that want to be members."""
        now = _clock.now()
        entries, self._entries = self._entries, []
        for entry in entries:
            if self._has_left(entry):
                self._of_next.append(entry)
                continue
            try:
                join_reply = self._reply_to(entry, now)
            except ValueError as error:
                entry.end(error)
                continue
            if join_reply is None:
                self._entries.append(entry)
            else:
                entry.join_reply.set_result(join_reply)

    def drop(self, token: bytes, why: Exception) -> None:
        """Drop a process that no longer wants to be a member."""
        self._has_begun = True  # it may have given up before it entered
        for waiting in (self._entries, self._of_next):
            for entry in [entry for entry in waiting if entry.token == token]:
                waiting.remove(entry)
                entry.end(why)

    def forget(self, session: Session) -> None:
        """Let go of a member that has left or is dead."""
        del self.present[session.token]
        if session.state is PeerState.LEFT and self._config.min_size == self._config.size:
            self._left.add(session.who)

    def close(self) -> None:
        """Refuse those that wait."""
        for entry in (*self._entries, *self._of_next):
            entry.end(RuntimeError("the process group has ended"))

    def open_for(self, ready: int) -> None:
        """Open if the process group can, with ``ready`` members that wait."""
        self.is_open = self.is_open or self._may_open(ready)

    def _reply_to(self, entry: Entry, now: float) -> JoinReply | None:
        """Return the reply to a process; None while the old process of its rank may be ending.

        Raises:
            ValueError: If it cannot get a join reply.
        """
        self._config.check_same(entry.config)
        if entry.rank is not None and not 0 <= entry.rank < self._config.size:
            raise ValueError(f"rank: expected 0 to {self._config.size - 1}, got {entry.rank}")
        wanted = range(self._config.size) if entry.rank is None else [entry.rank]
        rank = next((rank for rank in wanted if self._is_free(rank)), None)
        if rank is None:
            if now < self._patience_of(entry):
                return None
            if entry.rank is None:
                raise ValueError(
                    f"process group {self._name!r}: all {self._config.size} ranks are taken"
                )
            who = self.sessions[entry.rank].who
            raise ValueError(f"rank: expected one that is free, got {entry.rank}, which is {who}'s")
        self._entered += 1
        before = self.sessions.get(rank)
        session = Session(
            rank, entry.who, entry.token, self._entered, before, over=entry.over, task=entry.task
        )
        self.present[entry.token] = session
        self.peers.add(session)
        if not entry.wants_channel:
            return JoinReply(rank, session.number, None)
        if entry.node == self._node:
            self._channels.expect(entry.token)
            return JoinReply(rank, session.number, self._channels.address)
        agent = session.agent = self._agents.at(entry.node, starts=True)
        assert agent is not None
        if agent.token not in self._watched:
            self._watched.add(agent.token)
            self._queue.watch(agent.handle.stay.remote(), functools.partial(self._lose_all, agent))
        return JoinReply(rank, session.number, None, agent.handle)

    def _has_left(self, entry: Entry) -> bool:
        """Whether the process has left: it begins another training, and the others do not yet."""
        for session in [*self.present.values()]:
            if session.who == entry.who:
                self._hear(session)  # its leave may have come
        return entry.who in self._left

    def _patience_of(self, entry: Entry) -> float:
        """Return until when a process waits for the end of one that has the rank it wants."""
        wanted = [
            end
            for session, (end, _) in self._reports.items()
            if entry.rank in (None, session.rank)  # its agent may still tell that it had left
        ]
        return max([entry.since + _GRACE, *wanted])

    def _is_free(self, rank: int) -> bool:
        """Whether no live process has ``rank``."""
        session = self.sessions.get(rank)
        if session is not None and session.is_present:
            self._hear(session)  # it may just have died
        return session is None or not session.is_present

    def _hear(self, session: Session) -> None:
        """Take what a member has sent, or its end, if that has come."""
        if session.channel is not None:
            session.channel.receive()
            if session.poll():
                self._on_event(session)

    def _lose_all(self, agent: AgentClient, why: str) -> None:
        """Count the members of a dead agent's node as dead; its process may still have to end."""
        agent.give_up()
        for session in [*self.present.values()]:
            if session.agent is agent:
                lost = f"{session.who}: the agent of its node: {why}"
                self._lose(session, MemberDiedError(lost))

    def _may_open(self, ready: int) -> bool:
        if ready and self._grace is None:
            self._grace = Deadline.after(self._config.grace, _clock.now())
        if self._grace is None or ready < self._config.min_size:
            return False
        if ready < self._config.size and seconds_left(self._grace.end) != 0.0:
            return False
        if ready < self._config.size:
            missing = ", ".join(map(str, self.absent()))
            _log.info("process group %r opens without ranks %s", self._name, missing)
        return True
