"""A meeting whose host is no actor: what it counts, and members whose host is killed."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from reference import clean_environment

from flatweights.ray import MemberError, _failpoints
from flatweights.ray._report import METRICS, RECEIVED, ROUND, SENT
from flatweights.ray.lanes._member_lane import MemberLane
from flatweights.ray.members._host_end import HostByLane
from flatweights.ray.members._meeting import Entry, Meeting, Ticket
from flatweights.ray.members._member import Member
from flatweights.ray.nodes._plan import Sums, check_sums

pytestmark = pytest.mark.ray

HOST = """
import json, os, signal, time
from concurrent.futures import Future
from flatweights.ray import _failpoints
from flatweights.ray.members._meeting import Entry, Meeting

orders = open(0, "rb", buffering=0)  # children read on where their siblings have stopped
for point in _failpoints.HOST:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    meeting, tickets = Meeting("doomed", 2, "float64", "here", None), [Future(), Future()]
    for rank, ticket in enumerate(tickets):
        who, now = f"member {rank}", time.monotonic()
        meeting.enter(Entry(rank, 2, "float64", who, "here", True, now, ticket))
    meeting._read_news()
    tickets = [ticket.result() for ticket in tickets]
    print(json.dumps([[t.address.hex(), t.token.hex()] for t in tickets]), flush=True)
    for ticket, nonce in zip(tickets, json.loads(orders.readline())):
        meeting.attach(ticket.token, bytes.fromhex(nonce))

    def die(reached):
        if reached == point and meeting._number >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    _failpoints.hook = die
    meeting.run()
"""


def connect(tickets: list[Ticket]) -> list[MemberLane]:
    lanes = []
    for ticket in tickets:
        assert ticket.address is not None
        lanes.append(MemberLane(ticket.address, ticket.token))
    return lanes


def member_of(ticket: Ticket, lane: MemberLane) -> Member:
    host = HostByLane(None, ticket, lane)
    return Member("meeting", ticket.rank, host.start(60.0), host)


def test_members_of_a_killed_host_are_told() -> None:
    def call_till_the_end(rank: int, ticket: Ticket, lane: MemberLane) -> int:
        member = member_of(ticket, lane)
        weights = {"w": np.full(500, float(rank))}
        calls = 0
        while True:
            try:
                assert member.average(weights).weights["w"][0] == 0.5
            except MemberError:
                break
            calls += 1
            time.sleep(0.001 * rank)  # so that the host waits, too
        with pytest.raises(MemberError, match="the host"):
            member.average(weights)
        return calls

    host = subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert host.stdin is not None
    assert host.stdout is not None
    with host, ThreadPoolExecutor(2) as threads:
        for _ in _failpoints.HOST:
            told = json.loads(host.stdout.readline())
            tickets = [
                Ticket(k, bytes.fromhex(b), bytes.fromhex(a)) for k, (a, b) in enumerate(told)
            ]
            lanes = connect(tickets)
            host.stdin.write(json.dumps([lane.mailbox.nonce.hex() for lane in lanes]) + "\n")
            host.stdin.flush()
            calls = list(threads.map(call_till_the_end, range(2), tickets, lanes))
            assert min(calls) >= 2
        host.stdin.close()
    assert host.returncode == 0


def test_members_agree_on_their_number_and_sums() -> None:
    meeting = Meeting("agreed", 2, "float32", "here", None)
    refused: list[tuple[int, Sums, str]] = [
        (3, "float32", "size: expected 2, as the others, got 3"),
        (2, "float64", "sums: expected 'float32', as the others, got 'float64'"),
    ]
    for size, sums, said in refused:
        ticket = Future[Ticket]()
        meeting.enter(Entry(0, size, sums, "member 0", "here", True, time.monotonic(), ticket))
        meeting._read_news()
        assert str(ticket.exception()) == said
    meeting._lanes.close()
    with pytest.raises(ValueError, match="sums: expected 'float64' or 'float32', got 'f4'"):
        check_sums("f4")


def test_a_host_sleeps_while_members_are_still_to_join() -> None:
    meeting, ticket = Meeting("quiet", 2, "float64", "here", None), Future[Ticket]()
    meeting.enter(Entry(0, 2, "float64", "member 0", "here", True, time.monotonic(), ticket))
    meeting._read_news()
    (lane,) = connect([ticket.result()])
    meeting.attach(ticket.result().token, lane.mailbox.nonce)
    sleeps, poll = [], meeting._lanes._poll

    class Poll:
        def poll(self, seconds: float) -> Any:
            sleeps.append(seconds)
            meeting.news.tell(lambda: None)  # so that it wakes
            return poll.poll(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting._lanes, "_poll", Poll())
        meeting._gather()
    assert len(sleeps) == 1
    lane.close()
    meeting._lanes.close()


def test_a_host_counts_its_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(METRICS, "add", lambda *values: counted.append(values))
    meeting, ticket = Meeting("counted", 1, "float64", "here", None), Future[Ticket]()
    meeting.enter(Entry(0, 1, "float64", "this process", "here", True, time.monotonic(), ticket))
    meeting._read_news()
    (lane,) = connect([ticket.result()])
    meeting.attach(ticket.result().token, lane.mailbox.nonce)
    thread = threading.Thread(target=meeting.run)
    thread.start()
    member = member_of(ticket.result(), lane)
    member.average({"w": np.ones(500)})
    member.broadcast({"w": np.ones(500)})
    member.leave()
    thread.join()
    (counts, seconds, used), sent = counted
    assert (used, sent) == (1, ({SENT: 4032},))
    assert counts == {ROUND: 1, RECEIVED: 4032, ("ways", "way", "lane"): 1}
    assert {"wait", "average"} <= seconds.keys()
