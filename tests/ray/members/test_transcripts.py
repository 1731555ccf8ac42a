"""Transcripts of the core of a process group: what happens, and what it then decides, in text.

Each file of ``transcripts`` is one situation that the documentation describes. A block has events,
a line with four dashes, and what the core says to them; blocks are divided by empty lines. The
members are named by their ranks. `FLATWEIGHTS_TRANSCRIPTS=write` writes what the core says now
into the files, to be read before it is committed.

| event | |
| --- | --- |
| `members N` | N members have joined |
| `request R OPERATION [NAME=VALUE ...]` | rank R makes a call; fields: see `Request` |
| `give R`, `heal R` | it gives its state; asks for the one that it lacks |
| `leave R`, `die R`, `join R` | it leaves; dies; another process joins under its rank |
| `wait S` | S seconds pass |
| `reduced`, `refused` | the call has a result; an error |
| `again` | the call needs weights that are in segments of a GPU through memory of the host |
| `copied N` | the state for response N is copied |
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import TheProcessGroup

from flatweights.ray.core._events import (
    Action,
    CopyState,
    Ended,
    Gave,
    Log,
    LogDeath,
    NobodyHas,
    Reduce,
    Reduced,
    Refused,
    Release,
    RequestAgain,
    Respond,
    Send,
    SendAgain,
    SendKept,
    SendState,
    StateCopied,
    TimeIsUp,
)
from flatweights.ray.core._requests import MemberDiedError, OnGpu, Request

FOLDER = Path(__file__).parent / "transcripts"
SEGMENT: Any = "a segment"
ON_GPU = {"segment": OnGpu(b"GPU", SEGMENT), "host": OnGpu(b"GPU", None)}
FIELDS: dict[str, Callable[[str], Any]] = {
    "root": int,
    "min_results": int,
    "timeout": float,
    "gpu": ON_GPU.__getitem__,
}


def lines_of(action: Action) -> list[str]:
    """Return an action as a transcript shows it; nothing, if only memory depends on it."""
    match action:
        case Reduce():
            parts = [f"reduce {action.first.operation} of {ranks(action.peers)}"]
            parts += [f"late {' '.join(map(str, action.late))}"] if action.late else []
            parts += [f"lost {' '.join(map(str, action.lost))}"] if action.lost else []
        case Send():
            parts = [f"tell {ranks(action.peers)}: response {action.number}"]
            parts += [f"process {action.donor} gives its state"] if action.donor else []
            parts += [f"healed {ranks(action.recovering)}"] if action.recovering else []
            parts += [f"late {' '.join(map(str, action.late))}"] if action.late else []
        case SendAgain():
            parts = [f"have {ranks(action.peers)} send again"]
        case SendKept():
            parts = [f"tell {ranks(action.peers)}: response {action.number}, which is kept"]
        case Respond(peers, None):
            parts = [f"tell {ranks(peers)}: go on"]
        case Respond(peers, error):
            parts = [f"tell {ranks(peers)}: {type(error).__name__}: {error}"]
        case TimeIsUp():
            parts = [f"tell {ranks(action.peers)}: the time is up for {action.others}"]
        case NobodyHas():
            parts = [f"tell {ranks(action.peers)}: nobody has the state"]
        case CopyState():
            parts = [f"copy the state for response {action.number}"]
        case SendState():
            parts = [f"tell {ranks(action.peers)}: the state for response {action.number}"]
        case Release():
            parts = [f"drop the state for response {action.number}"]
        case LogDeath():
            parts = [f"log that {ranks([action.peer])} has died"]
        case Log():
            parts = [f"log: {action.text % action.args}"]
        case _:
            return []
    return ["; ".join(parts)]


def ranks(peers: Any) -> str:
    return " ".join(str(peer.rank) for peer in peers)


def happen(group: TheProcessGroup, event: str) -> list[Action]:
    """Let the event of a line happen; return what follows."""
    verb, *words = event.split()
    rank = int(words[0]) if words and verb != "wait" else 0
    match verb:
        case "members":
            for one in range(rank):
                group.join(one)
        case "join":
            group.join(rank)
        case "request":
            options: dict[str, Any] = {"digest": "weights"}
            for name, is_value, value in (word.partition("=") for word in words[2:]):
                options[name] = FIELDS.get(name, str)(value) if is_value else True
            operation: Any = words[1]
            return group.request(rank, Request(operation), **options)
        case "heal":
            return group.request(rank, Request("heal", "state"))
        case "give":
            group[rank].requests(Request("give", "state"), group.now)
            return group.receive(Gave(group[rank]))
        case "leave":
            return group.receive(Ended(group[rank]))
        case "die":
            return group.receive(Ended(group[rank], MemberDiedError("it has died")))
        case "wait":
            group.now += float(words[0])
            return group.receive()
        case "reduced":
            call = next(one for one in group.done if isinstance(one, Reduce))
            return group.receive(Reduced(sorted(call.requests), 8))
        case "again":
            return group.receive(RequestAgain())
        case "refused":
            return group.receive(Refused())
        case "copied":
            return group.receive(StateCopied(rank))
        case _:
            raise ValueError(f"no such event: {event}")
    return []


def played(text: str) -> str:
    """Return a transcript with what the core says now."""
    group = TheProcessGroup(0)
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        events = lines[: lines.index("----")] if "----" in lines else lines
        said = [
            line
            for event in events
            if not event.startswith("#")
            for action in happen(group, event)
            for line in lines_of(action)
        ]
        is_comment = all(event.startswith("#") for event in events)
        blocks.append("\n".join([*events, *([] if is_comment else ["----"]), *said]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.txt")))
def test_the_core_says_what_the_transcript_says(name: str) -> None:
    file = FOLDER / f"{name}.txt"
    text = file.read_text()
    said = played(text)
    if os.environ.get("FLATWEIGHTS_TRANSCRIPTS") == "write":
        file.write_text(said)
    else:
        assert said == text
