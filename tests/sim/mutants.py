"""Small wrong changes of the package, each of which the oracle has to find.

A mutant is one exact piece of text, which occurs once in one file, and what stands there instead.
Each runs in a process of its own, whose import of that file changes it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from tests.sim.fit_mutants import FIT
from tests.sim.group_mutants import ASYNCHRONOUS, GROUP
from tests.sim.nodes_mutants import NODES


class Mutant(NamedTuple):
    """One wrong change.

    Attributes:
        file: The file, in the folder of the package.
        old: The text that is there, once.
        new: The text that takes its place.
        protocols: The protocols whose schedules find it.
        package: The package.
    """

    file: str
    old: str
    new: str
    protocols: tuple[str, ...] = ("members",)
    package: str = "flatweights.ray"

    @property
    def module(self) -> str:
        """The name of the module in the file."""
        return f"{self.package}.{self.file.removesuffix('.py').replace('/', '.')}"


MUTANTS = {
    # Who comes in.
    "a rank is free while its process lives": Mutant(
        "members/_rendezvous.py",
        "return session is None or not session.is_present",
        "return True",
    ),
    "a rank is refused at once": Mutant(
        "members/_rendezvous.py",
        "            if now < self._patience_of(entry):\n",
        "            if False:\n",
    ),
    "a group opens with too few": Mutant(
        "members/_rendezvous.py",
        "if self._grace is None or ready < self._config.min_size:",
        "if not ready:",
    ),
    "nobody waits for the grace": Mutant(
        "members/_rendezvous.py",
        "if ready < self._config.size and seconds_left(self._grace.end) != 0.0:",
        "if False:",
    ),
    "the grace is never over": Mutant(
        "members/_process_group.py",
        "        ends = [*self.rendezvous.ends(), *(",
        "        ends = [*(",
    ),
    "a group of all waits for its grace": Mutant(
        "members/_rendezvous.py",
        "        if ready < self._config.size and seconds_left",
        "        if seconds_left",
    ),
    "a process that gives up to join leaves a trace": Mutant(
        "core/_peer.py",
        "        if not peer.has_joined:\n",
        "        if False:\n",
    ),
    "a process that gives up to join gets a rank": Mutant(
        "members/_rendezvous.py",
        "                waiting.remove(entry)\n",
        "                pass\n",
    ),
    "a predecessor is forgotten": Mutant(
        "core/_peer.py",
        "                self.newest[peer.rank] = peer.before\n",
        "                pass\n",
    ),
    "others miss a process that still joins": Mutant(
        "core/_peer.py",
        "for peer in self.present.values() if peer.is_missed}",
        "for peer in self.present.values()}",
    ),
    "a group ends before the first comes in": Mutant(
        "members/_rendezvous.py",
        "        return not self.sessions and bool(self._entries)\n",
        "        return False\n",
    ),
    "a group waits for others that were joining": Mutant(
        "members/_rendezvous.py",
        "        return not self.sessions and bool(self._entries)\n",
        "        return not self.sessions\n",
    ),
    "a request makes nobody a member": Mutant(
        "core/_peer.py",
        "        self._move(PeerState.ASKING)\n        self.join()\n",
        "        self._move(PeerState.ASKING)\n",
    ),
    # When a call is closed, and with whom.
    "a call does not wait for members on time": Mutant(
        "core/_calls.py",
        "        if self.peers.on_time(self.number):\n",
        "        if False:\n",
    ),
    "late members count as on time": Mutant(
        "core/_calls.py",
        "if self.peers.on_time(self.number):\n",
        "if self.peers.working():\n",
    ),
    "a call never ends by time": Mutant(
        "core/_calls.py",
        "        if self.waiting.deadline().is_over(now):\n            return True\n",
        "",
    ),
    "the latest deadline counts": Mutant(
        "core/_waiting.py",
        "end < first.end",
        "end > first.end",
    ),
    "one member is enough": Mutant(
        "core/_calls.py",
        "return len(requests) >= min(first.min_results, self._count_of_whole())",
        "return bool(requests)",
    ),
    "a call of all needs one": Mutant(
        "core/_calls.py",
        "return len(requests) >= len(self.peers.missed()) - len(self.waiting.out_of_sync)",
        "return bool(requests)",
    ),
    "members that wait for another call are waited for": Mutant(
        "core/_calls.py",
        "return len(self.peers.present) - len(self.waiting.out_of_sync)",
        "return len(self.peers.present)",
    ),
    "a broadcast does not need its root": Mutant(
        "core/_calls.py",
        "return first.root in requests or first.root not in self.peers.ranks()",
        "return True",
    ),
    "a dead member's request stays": Mutant(
        "core/_calls.py",
        "        self.waiting.drop([peer])\n        peer.ends(why)\n",
        "        peer.ends(why)\n",
    ),
    "the request of a dead member is kept": Mutant(
        "members/_sessions.py",
        "        self.announced = None\n        self._drop_request()\n",
        "        self.announced = None\n",
    ),
    "a member that has left is still there": Mutant(
        "core/_peer.py",
        "        del self.present[peer.number]\n",
        "        if peer.why is not None:\n            del self.present[peer.number]\n",
    ),
    "two kinds of call are one": Mutant(
        "members/_process_group.py",
        "        if len(alike) > 1:\n",
        "        if len(alike) > 2:\n",
    ),
    "all weights are equal": Mutant(
        "members/_process_group.py",
        "tuple(requests[k].weight if k in requests",
        "tuple(1.0 if k in requests",
    ),
    "a member that waits for state is late": Mutant(
        "core/_calls.py",
        "            late.difference_update(ranks_of(waiting.out_of_sync))\n",
        "",
    ),
    "urgent requests wait": Mutant(
        "members/_sessions.py",
        "    return session.answer.request.is_urgent\n",
        "    return False\n",
    ),
    "queue wait for requests": Mutant(
        "members/_sessions.py",
        "if len(heard) >= enough or left <= 0 or queue or any",
        "if len(heard) >= enough or left <= 0 or any",
    ),
    "the first response comes too soon": Mutant(
        "members/_process_group.py",
        "        if ready and self.rendezvous.is_open:\n",
        "        if ready:\n",
    ),
    "a silent death is not noticed": Mutant(
        "members/_sessions.py",
        "        if self.channel is None or not self.channel.is_closed or not self.is_present:\n",
        "        if self.state is not PeerState.ASKING or not self.channel or not self.channel.is_closed:\n",
    ),
    "calls are repeated without a member that has joined": Mutant(
        "members/_repetitions.py",
        "        if self._ready and not self._are_all(present):\n",
        "        if False:\n",
    ),
    "a death that Ray reports is not noticed": Mutant(
        "members/_coordinator.py",
        "            self._group.queue.post(self._group.note_death, token, why)\n",
        "            pass\n",
    ),
    "a leave is taken for a death": Mutant(
        "members/_process_group.py",
        "        if session is not None and session.poll():  # it may have left before\n",
        "        if False:\n",
    ),
    # Late members.
    "one number per session": Mutant(
        "core/_response_cache.py",
        "return peer.number not in made.peers",
        "return made.number > peer.has",
    ),
    "late by one takes part": Mutant(
        "core/_response_cache.py",
        "kept.number <= peer.has:",
        "kept.number <= peer.has + 1:",
    ),
    "nobody waits for the newest": Mutant(
        "core/_response_cache.py",
        "            kept = None  # it takes part in the open call, or waits for it\n",
        "            pass\n",
    ),
    "a response that was got late is not noted": Mutant(
        "core/_response_cache.py",
        "            made.peers.add(peer.number)\n",
        "",
    ),
    "a late root stays behind": Mutant(
        "core/_waiting.py",
        "                self.behind.remove(root)\n                self._add(root)\n",
        "",
    ),
    "a late member is told nothing of the next call": Mutant(
        "core/_waiting.py",
        "return [peer for peer in self.behind if peer.request.kind == first.kind]",
        "return []",
    ),
    "late members are told twice": Mutant(
        "core/_calls.py",
        "        told = [*reversed(asking), *healed, *served]\n",
        "        told = [*reversed(asking), *healed]\n",
    ),
    "late members that are left wait for ever": Mutant(
        "core/_calls.py",
        "        if waiting.behind and not self._count_of_whole():\n",
        "        if False:\n",
    ),
    "late members that are left make an old call anew": Mutant(
        "core/_calls.py",
        "            if kept is not None and kept.reaches(peer):\n                self.waiting.drop([peer])\n",
        "            if False:\n                self.waiting.drop([peer])\n",
    ),
    "the time of late members is never up": Mutant(
        "core/_calls.py",
        "        self._give_up_waiting(now)\n",
        "",
    ),
    "late members are not named": Mutant(
        "core/_calls.py",
        "            if missed or waiting.behind:\n",
        "            if False:\n",
    ),
    "a response is not kept": Mutant(
        "core/_response_cache.py",
        "        self._kept[kind] = made\n",
        "        if made.number % 3:\n            self._kept[kind] = made\n",
    ),
    "a late member calls itself on time": Mutant(
        "members/_member.py",
        "            result.late = tuple(sorted({*result.late, self.rank}))\n",
        "",
    ),
    # Twins.
    "a twin's response is not noted": Mutant(
        "core/_response_cache.py",
        "            made.late.add(peer.number)\n",
        "",
    ),
    "members at the other twin go on": Mutant(
        "core/_calls.py",
        "            for other, why in self._cache.note_twins(request.twins, self.waiting.asking):\n",
        "            for other, why in ():\n",
    ),
    "late twins get any model": Mutant(
        "core/_response_cache.py",
        "        elif is_twin and (kept is not None or self.is_behind(peer) or self._was_late(peer)):\n",
        "        elif False:\n",
    ),
    # Healing.
    "the highest rank gives": Mutant(
        "core/_calls.py",
        "donor = min((peer for peer",
        "donor = max((peer for peer",
    ),
    "states are not noted": Mutant(
        "core/_response_cache.py",
        "                peer.states[request.state] = made.number\n",
        "                pass\n",
    ),
    "a missed state does not count": Mutant(
        "core/_response_cache.py",
        "            if peer.states.get(request.state, 0) < before:\n",
        "            if False:\n",
    ),
    "a member that has missed one call lacks the state": Mutant(
        "core/_response_cache.py",
        "if kept is None else kept.previous\n",
        "if True else 0\n",
    ),
    "a lost state is not forgotten": Mutant(
        "core/_calls.py",
        "            self._do(Keep(self._cache.forget(peer.request.state)))\n",
        "            pass\n",
    ),
    "healed by any call": Mutant(
        "core/_waiting.py",
        "return [peer for peer in self.recovering if peer.request.kind == first.kind]",
        "return [*self.recovering]",
    ),
    "healed by no call": Mutant(
        "core/_waiting.py",
        "return [peer for peer in self.recovering if peer.request.kind == first.kind]",
        "return []",
    ),
    "a lost donor is not noticed": Mutant(
        "core/_healing.py",
        '            self._fail("is gone")\n',
        "            pass\n",
    ),
    "a late donor is waited for": Mutant(
        "core/_healing.py",
        '            self._fail("is late")\n',
        "            pass\n",
    ),
    "a state that was given is lost with its donor": Mutant(
        "core/_healing.py",
        "        if peer is self.donor and not self.is_given:\n",
        "        if peer is self.donor:\n            self.is_given = False\n",
    ),
    "a state is given once": Mutant(
        "core/_calls.py",
        "if one.donor is peer and one.is_waited_for)",
        "if one.donor is peer)",
    ),
    "those that were lost are healed": Mutant(
        "core/_healing.py",
        "            if peer in peers:\n",
        "            if False:\n",
    ),
    "one of several is healed": Mutant(
        "core/_calls.py",
        "            self._do(SendState(healing.number, peers))\n",
        "            self._do(SendState(healing.number, peers[:1]))\n",
    ),
    "a state that nobody has is waited for": Mutant(
        "core/_calls.py",
        "        elif waiting.recovering and not self._count_of_whole():\n",
        "        elif False:\n",
    ),
    "a healed member keeps its own state": Mutant(
        "members/_member.py",
        "                    state.scatter(got)\n",
        "",
    ),
    # What goes through Ray.
    "an announced response is dropped": Mutant(
        "members/_sessions.py",
        "        session.announced = self._announced\n",
        "",
    ),
    "a request beside the channel is not read": Mutant(
        "members/_sessions.py",
        '        if self._store_requests and (channel is None or body == b""):\n',
        "        if self._store_requests and channel is None:\n",
    ),
    # Interrupted members.
    "an interrupted member may stay": Mutant(
        "members/_member.py",
        'elif self._coordinator.stage != "idle":',
        'elif self._coordinator.stage == "asking":',
    ),
    "an interrupted member has the state": Mutant(
        "members/_member.py",
        "            self.lacks_state = True\n        elif",
        "            pass\n        elif",
    ),
    # Repetitions; tests/ray/members/test_repetitions.py has more of their rules.
    "a series goes on with the dead": Mutant(
        "members/_repetitions.py",
        "                or session.channel.is_closed\n",
        "",
    ),
    "a series goes on without newcomers": Mutant(
        "members/_repetitions.py",
        "        if self._ready and not self._are_all(present):\n",
        "        if False:\n",
    ),
    "calls without some are repeated": Mutant(
        "members/_repetitions.py",
        "        if send.late or send.recovering or call.lost or result.failed or ",
        "        if ",
    ),
    "a series does not count": Mutant(
        "core/_calls.py",
        "        self.number += event.calls\n",
        "",
    ),
    "members do not have the responses of a series": Mutant(
        "core/_calls.py",
        "        for peer in peers:\n            peer.told(self.number)\n",
        "",
    ),
    "the cache does not know of a series": Mutant(
        "core/_calls.py",
        "            self._do(Keep(self._cache.keep(request, kept, peers)))\n",
        "            pass\n",
    ),
    "a series takes late members along": Mutant(
        "core/_calls.py",
        "        return not self._cache.has_twins and on_time == len(self.peers.present)\n",
        "        return not self._cache.has_twins\n",
    ),
    "the responses of a series are not kept": Mutant(
        "members/_process_group.py",
        "            self._kept[number] = _Encoded(pickle.dumps(response.fields), weights)\n",
        "            self._kept.setdefault(number, next(reversed(self._kept.values())))\n",
    ),
    "the time of a call begins with its last reading": Mutant(
        "members/_sessions.py",
        "        self.requests(answer.request, since or _clock.now())\n",
        "        self.requests(answer.request, _clock.now())\n",
    ),
    "a member repeats with its first weight": Mutant(
        "members/_sessions.py",
        "known.request._replace(weight=weight)",
        "known.request",
    ),
    "a member takes the ranks of an older response": Mutant(
        "members/_client.py",
        "            elif not (signature in self._prepared and self._prepared[signature].was_repeated):\n",
        "            elif signature not in self._prepared:\n",
    ),
    "a member rings no bell in general calls": Mutant(
        "members/_client.py",
        "        is_urgent = request.is_urgent and not known.was_repeated\n",
        "        is_urgent = False\n",
    ),
    "a member repeats with other arguments": Mutant(
        "members/_member.py",
        " or again.arguments != arguments:\n",
        ":\n",
    ),
    "a member repeats a broadcast and does not set it": Mutant(
        "members/_member.py",
        "if again.sets or (response",
        "if (response",
    ),
    "a root that has joined again keeps what it sent": Mutant(
        "members/_member.py",
        "if sets or self._session not in response.sessions:",
        "if sets:",
    ),
    "a member repeats a broadcast of another root": Mutant(
        "members/_member.py",
        "self._again.get((id(key), root))",
        "next((one for (of, _), one in self._again.items() if of == id(key)), None)",
    ),
    "a member repeats what its coordinator does not": Mutant(
        "members/_repeated_call.py",
        " and self.known.was_repeated and ",
        " and ",
    ),
    # Others.
    "those that missed a call with a state go on": Mutant(
        "core/_calls.py",
        "        if missed:\n",
        "        if False:\n",
    ),
    "the donor is not asked for": Mutant(
        "core/_calls.py",
        "            self._do(CopyState(healing.number))\n",
        "            pass\n",
    ),
    "a late response is not noted": Mutant(
        "core/_peer.py",
        "PeerState.WORKING, max(number, self.has))\n",
        "PeerState.WORKING, self.has or number)\n",
    ),
    "a member that was healed waits for rows and moments of the others": Mutant(
        "core/_response_cache.py",
        "        if request.from_state and self._has_states(peer, made.number):\n",
        "        if False:\n",
        ("fit",),
    ),
    "weights of a member that was healed take part at once": Mutant(
        "core/_response_cache.py",
        "        if request.from_state and self._has_states(peer, made.number):\n",
        "        if self._has_states(peer, made.number):\n",
    ),
}
"""By name. The names say what is wrong."""

MUTANTS |= {name: Mutant(*texts, ("nodes",)) for name, texts in NODES.items()}
MUTANTS |= {name: Mutant(*texts, ("group",)) for name, texts in GROUP.items()}
MUTANTS |= {name: Mutant(*texts, ("asynchronous",)) for name, texts in ASYNCHRONOUS.items()}
MUTANTS |= {name: Mutant(*texts, ("fit",), "flatweights.keras") for name, texts in FIT.items()}


def changed(mutant: Mutant, source: str) -> str:
    """Return the source with the change.

    Raises:
        ValueError: If the text does not occur exactly once.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.file}: expected once, got {count} times: {mutant.old!r}")
    return source.replace(mutant.old, mutant.new)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file with a change."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(changed(self.mutant, Path(self.path).read_text()), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one file of the package, to be changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.mutant = self._mutant
        spec.loader = loader
        return spec


def install(name: str) -> None:
    """Change the package in this process, which has not imported it yet."""
    assert "flatweights" not in sys.modules
    sys.meta_path.insert(0, _Finder(MUTANTS[name]))


def try_all(schedules: int, names: Sequence[str] = (), protocol: str = "all") -> bool:
    """Run schedules with one mutant after the other; print how soon each is found.

    Args:
        schedules: The largest number for each.
        names: The mutants; all of the protocol, if empty.
        protocol: The protocol whose schedules have to find them; "all" for the first one of each.

    Returns:
        Whether all were found.
    """
    found = 0
    names = names or [name for name, one in MUTANTS.items() if protocol in ("all", *one.protocols)]
    for name in names:
        its = MUTANTS[name].protocols
        of = protocol if protocol in its else its[0]
        command = [sys.executable, "-W", "ignore", "-m", "tests.sim", "--mutant", name]
        command += ["--protocol", of]
        command += ["--seeds", str(schedules), "--keep", "1", "--no-shrink"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        count = re.search(r"^(\d+) schedules in (.*?), ", ran.stdout, re.MULTILINE)
        how = re.search(r"^seed .*", ran.stdout, re.MULTILINE)
        if count is None:
            print(f"{name}: failed to run\n{ran.stdout}{ran.stderr}", flush=True)
        elif how is None:
            print(f"{name}: NOT FOUND in {count[1]} schedules, {count[2]}", flush=True)
        else:
            found += 1
            print(f"{name}: {count[1]} schedules, {count[2]}: {how[0][:100]}", flush=True)
    print(f"{found} of {len(names)} mutants are found")
    return found == len(names)
