"""A call of many members of one node, against the number of members.

``python -m bench.bench_many_members [--members 125 250 500 1000] [--json FILE]``

There is no Ray: the coordinator is a thread of this process, and each member is a process, forked
from one that has no TensorFlow. Each member averages a model of 4 kB. "repeated" calls are the same
again and again, which C++ makes; "general" ones differ from one to the next in ``min_results``, so
Python decides. All results are checked.
"""

import argparse
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

import flatweights as fw
from bench import machine
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._member import Member
from flatweights.ray.members._process_group import ProcessGroup
from flatweights.ray.members._rendezvous import Entry, JoinReply

_ELEMENTS = 1000
_CALLS = {"repeated": 20, "general": 8}
_UNTIMED = 4
_PATIENCE = 300.0


class _Weights:
    """Variables of one array."""

    def __init__(self) -> None:
        self.values = np.zeros(_ELEMENTS, np.float32)
        self.layout = fw.Layout.of([self.values])

    def gather_into(self, buffer: Any) -> None:
        self.layout.packed_views(buffer)[0][:] = self.values

    def scatter(self, buffer: Any) -> None:
        self.values[:] = self.layout.packed_views(buffer)[0]


def _average(member: Member, size: int) -> dict[str, list[float]]:
    """Call averages of each kind; return their times, and how many results were wrong."""
    found: dict[str, list[float]] = {"wrong": [0.0]}
    weights = _Weights()
    wanted = np.float32((size - 1) / 2)  # sums of whole numbers are exact
    for kind, calls in _CALLS.items():
        times = found[kind] = []
        for call in range(_UNTIMED + calls):
            weights.values[:] = member.rank
            least = 1 + call % 2 if kind == "general" else 1
            begin = time.perf_counter()
            member.average_variables(weights, min_results=least, timeout=_PATIENCE)
            times.append(time.perf_counter() - begin)
            found["wrong"][0] += not (weights.values == wanted).all()
        del times[:_UNTIMED]
    return found


def be_members() -> None:
    """Fork the members that the parent tells of on the standard input."""
    told = json.loads(sys.stdin.readline())
    links: list[TextIO] = []
    for rank, session, address, token in told["members"]:
        reader, writer = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writer, "w") as link:
                _be_member(rank, session, bytes.fromhex(address), bytes.fromhex(token), told, link)
            os._exit(0)
        os.close(writer)
        links.append(os.fdopen(reader))
    for _ in range(2):  # the mailboxes, then the times
        print(json.dumps([json.loads(link.readline()) for link in links]), flush=True)


def _be_member(
    rank: int, session: int, address: bytes, token: bytes, told: dict[str, Any], link: TextIO
) -> None:
    channel = MemberChannel(address, token)
    print(json.dumps(channel.mailbox.nonce.hex()), file=link, flush=True)
    client = ChannelClient(None, Identity(token, f"rank {rank}"), channel, session)
    reply = JoinReply(rank, session, None)
    with Member("many", client, reply, client.start(_PATIENCE)) as member:
        print(json.dumps(_average(member, told["size"])), file=link, flush=True)


def measure(size: int) -> dict[str, Any]:
    """Let ``size`` members join, and time their calls."""
    config = GroupConfig.of(size)
    group = ProcessGroup("many", config, "here", None)
    thread = threading.Thread(target=group.run)
    thread.start()
    begin = time.perf_counter()
    entries = []
    for rank in range(size):
        token = secrets.token_bytes(16)
        who, now = f"rank {rank}", time.monotonic()
        entries.append(Entry(token, rank, config, who, "here", True, None, now, Future(), Future()))
        group.queue.post(group.rendezvous.enter, entries[-1])
    replies = [entry.join_reply.result(_PATIENCE) for entry in entries]
    members = [
        [reply.rank, reply.session, (reply.address or b"").hex(), entry.token.hex()]
        for entry, reply in zip(entries, replies, strict=True)
    ]
    command = [sys.executable, "-c", "from bench.bench_many_members import *; be_members()"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"size": size, "members": members}) + "\n")
    child.stdin.flush()
    for entry, nonce in zip(entries, json.loads(child.stdout.readline()), strict=True):
        group.queue.call(group.attach, entry.token, bytes.fromhex(nonce))
    joined = time.perf_counter() - begin
    found = json.loads(child.stdout.readline())
    child.wait()
    thread.join()
    row: dict[str, Any] = {"members": size, "joined": joined}
    # A call takes as long as its slowest member: the largest time of each call.
    for kind in _CALLS:
        row[kind] = statistics.median(map(max, zip(*(one[kind] for one in found), strict=True)))
    row["wrong"] = int(sum(one["wrong"][0] for one in found))
    return row


def run(options: argparse.Namespace) -> None:
    """Run all sizes, and print a table."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [measure(size) for size in options.members]
    table = Table("members", "joined", "repeated call", "general call", "wrong")
    for row in rows:
        times = [f"{row['joined']:.2f} s", *(f"{1e3 * row[kind]:.1f} ms" for kind in _CALLS)]
        table.add_row(str(row["members"]), *times, str(row["wrong"]))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine.describe(), "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[125, 250, 500, 1000])
    parser.add_argument("--json", type=Path)
    run(parser.parse_args())
