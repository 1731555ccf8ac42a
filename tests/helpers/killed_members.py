"""Members that are killed and stopped at random moments of calls that they repeat.

``python tests/helpers/killed_members.py FAULTS SEED`` prints what came of it. The coordinator is a
thread of this process, and members are forks of a process without threads. A member replaces each
one that was killed. No Ray is started. With ``steps`` as a third argument, members call from steps
of TensorFlow, which repeat calls without Python.
"""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any, NoReturn

import numpy as np
from process_groups import LocalProcessGroup

import flatweights as fw
from flatweights.ray import MemberDiedError, MemberError
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._member import Member
from flatweights.ray.members._rendezvous import JoinReply
from flatweights.ray.members._repetitions import Series

Tell = Callable[[dict[str, Any]], object]

SIZE = 4
TIMEOUT = 0.5  # seconds for which members wait for one that was stopped
STUCK = 30.0  # seconds without a call


class Weights:
    """A vector as `Variables`; all its numbers are 2**rank, so a sum tells its ranks."""

    def __init__(self, rank: int) -> None:
        self.own = 2.0**rank
        self.values = np.full(700, self.own)
        self.layout = fw.Layout.of([self.values])

    def gather_into(self, buffer: Any) -> None:
        self.layout.packed_views(buffer)[0][:] = self.own

    def scatter(self, buffer: Any) -> None:
        self.values[:] = self.layout.packed_views(buffer)[0]


def be_member(told: dict[str, Any], to: str) -> None:
    """Take part until this process is killed, or its coordinator ends; tell of wrong averages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(to)
        token, join_reply = (
            bytes.fromhex(told["token"]),
            JoinReply(told["rank"], told["session"], None),
        )
        channel = MemberChannel(bytes.fromhex(told["address"]), token)
        link.send(
            json.dumps({"token": told["token"], "nonce": channel.mailbox.nonce.hex()}).encode()
        )
        coordinator = ChannelClient(
            None, Identity(token, f"process {os.getpid()}"), channel, join_reply.session
        )
        member = Member("local", coordinator, join_reply, coordinator.start(STUCK))
        call = take_steps if told["steps"] else average
        with contextlib.suppress(MemberError):
            call(member, told["rank"], lambda what: link.send(json.dumps(what).encode()))


def mean_of(ranks: Any) -> float:
    total: float = sum(2.0**rank for rank in ranks)
    return total / len(ranks)


def average(member: Member, rank: int, tell: Tell) -> None:
    """Average variables for ever."""
    weights = Weights(rank)
    while True:
        result = member.average_variables(weights, timeout=TIMEOUT, min_results=1)
        if not (weights.values == mean_of(result.used)).all():
            tell({"wrong": f"{result!r}: got {weights.values[:3]}"})


def take_steps(member: Member, rank: int, tell: Tell) -> None:
    """Average a tensor in steps for ever.

    A step that enters no Python has no `Round`: its average is that of some ranks, with this one.
    """
    import tensorflow as tf

    from flatweights.keras._exchange import Exchange
    from flatweights.tensorflow._python_op import compute_in_python

    exchange, results = Exchange(["w"], [(700,)], [np.float64]), list[Any]()

    def compute(called: Any) -> None:
        with exchange.of(called):
            result = member.average_variables(exchange, timeout=TIMEOUT, min_results=1)
            results.append(result)

    step = tf.function(lambda own: compute_in_python(compute, [own])[0])
    own = tf.fill(700, tf.constant(2.0**rank, tf.float64))
    others = [one for one in range(SIZE) if one != rank]
    possible = {
        mean_of((rank, *some)) for count in range(SIZE) for some in combinations(others, count)
    }
    steps = 0
    while True:
        results.clear()
        try:
            values = step(own).numpy()
        except tf.errors.OpError as error:
            raise MemberError(str(error)) from error
        expected = {mean_of(results[0].used)} if results else possible
        if not (values == values[0]).all() or values[0] not in expected:
            tell({"wrong": f"{results}: expected one of {expected}, got {values[:3]}"})
        if not results:
            steps += 1
            if steps % 20 == 0:
                tell({"steps": 20})


def fork_members(orders: socket.socket, to: str, *, steps: bool) -> NoReturn:
    """Fork a member for each order, and answer with its process."""
    if steps:  # nothing here calls TensorFlow, which would start threads
        import flatweights.keras

        assert flatweights.keras
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while order := orders.recv(4096):
        child = os.fork()
        if child == 0:
            orders.close()
            try:
                be_member(json.loads(order), to)
            finally:
                os._exit(0)
        orders.send(str(child).encode())
    os._exit(0)


class Run:
    """The coordinator, and what it is told."""

    def __init__(self, orders: socket.socket, inbox: socket.socket, *, steps: bool) -> None:
        self.orders, self.inbox, self.in_steps = orders, inbox, steps
        self.steps = 0  # without Python
        self.group = LocalProcessGroup(SIZE)
        self.wrong: list[str] = []
        self.members: dict[int, int] = {}  # by rank, the process
        self.made = 0
        self.group.watch_series(self._count)
        threading.Thread(target=self._listen, daemon=True).start()

    def _count(self, series: Series) -> None:
        self.made += series.calls

    def _listen(self) -> None:
        group = self.group.group
        while True:
            said = json.loads(self.inbox.recv(4096))
            self.steps += said.get("steps", 0)
            if "wrong" in said:
                self.wrong.append(said["wrong"])
            if "token" not in said:
                continue
            with contextlib.suppress(Exception):  # it was killed meanwhile
                token, nonce = bytes.fromhex(said["token"]), bytes.fromhex(said["nonce"])
                group.queue.call(group.attach, token, nonce)

    def start(self, rank: int) -> None:
        """Start a member."""
        entry = self.group.enter(rank)
        join_reply = entry.join_reply.result(STUCK)
        assert join_reply.address is not None
        order = {"token": entry.token.hex(), "rank": rank, "session": join_reply.session}
        order |= {"address": join_reply.address.hex(), "steps": self.in_steps}
        self.orders.send(json.dumps(order).encode())
        self.members[rank] = int(self.orders.recv(64))

    def kill(self, rank: int) -> None:
        """Kill a member, and start another one."""
        process = self.members[rank]
        os.kill(process, signal.SIGKILL)
        group = self.group.group
        for session in [*group.rendezvous.present.values()]:
            if session.rank == rank and session.channel is None:  # it had not connected
                group.queue.post(group.lose, session.token, MemberDiedError("killed"))
        self.start(rank)

    def stop(self, rank: int, seconds: float) -> None:
        """Stop a member for a while."""
        os.kill(self.members[rank], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.members[rank], signal.SIGCONT)

    def number(self) -> int:
        """Return the number of calls so far."""
        return self.group.group.queue.called(lambda: self.group.group.calls.number).result(STUCK)


def main(faults: int, seed: int, *, steps: bool) -> None:
    """Let ``faults`` befall members, and print what came of it."""
    to = f"\0flatweights-killed-{os.getpid()}"
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(to)
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        orders.close()
        fork_members(theirs, to, steps=steps)
    theirs.close()
    run, rng = Run(orders, inbox, steps=steps), random.Random(seed)
    for rank in range(SIZE):
        run.start(rank)
    last, since, kills = 0, time.monotonic(), 0
    for _ in range(faults):
        pauses = (0.0, 0.1, 1.0, 2.0) if steps else (0.0, 0.005, 0.05, 0.1)
        time.sleep(rng.choice(pauses) * rng.random())
        if rng.random() < 0.7:
            run.kill(rng.randrange(SIZE))
            kills += 1
        else:
            run.stop(rng.randrange(SIZE), rng.choice((0.001, 0.01, 0.01, 1.2)) * rng.random())
        number = run.number()
        if number > last:
            last, since = number, time.monotonic()
        if time.monotonic() > since + STUCK:
            run.wrong.append(f"no call since {STUCK} s")
            break
    end = time.monotonic() + STUCK
    while run.number() < last + 200 and time.monotonic() < end:  # all go on
        time.sleep(0.01)
    if run.number() < last + 200:
        run.wrong.append("the members do not go on")
    told = {"calls": run.number(), "in C++": run.made, "kills": kills, "wrong": run.wrong}
    told["steps"] = run.steps
    for process in run.members.values():
        os.kill(process, signal.SIGKILL)
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), steps="steps" in sys.argv)
