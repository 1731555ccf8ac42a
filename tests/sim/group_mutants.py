"""Small wrong changes of what groups and their workers do; see `mutants`."""

GROUP = {
    # Whom a round calls, and with which weights.
    "a late answer is not in_flight": (
        "peers/_ranks.py",
        "            self.in_flight = answer.overdue() if is_late else answer.abandon()\n",
        "            self.in_flight = None\n",
    ),
    "nobody waits for what healthy workers owe": (
        "peers/_worker_set.py",
        "        if [r for r in self.ranks.records.values() if r.in_flight is not None and r.why is None]:\n",
        "        if False:\n",
    ),
    "workers that lack weights are called": (
        "peers/_worker_set.py",
        "        if behind := self._behind(called, weights):\n",
        "        if False:\n",
    ),
    "unhealthy workers are called": (
        "peers/_ranks.py",
        "        return [rank for rank in asked if self.records[rank].why is None]\n",
        "        return [*asked]\n",
    ),
    "each worker starts from its own weights": (
        "peers/_worker_set.py",
        "        is_first = self._start.initial is not None and is_needed\n",
        "        is_first = False\n",
    ),
    "a run that broke off trusts its workers": (
        "_group.py",
        "        if self._unfinished == self._worker_set.latest.number:\n            self._worker_set.mark_stale()\n",
        "",
    ),
    "workers that are late, while none has failed, stay healthy": (
        "peers/_worker_set.py",
        "        if arrivals.failed or late:\n",
        "        if arrivals.failed:\n",
    ),
    "a run does not ask whether workers are back": (
        "_group.py",
        "        self._take_back(timeout)\n        try:\n            result = run",
        "        try:\n            result = run",
    ),
    "a run waits longer for workers to come back than its timeout": (
        "_group.py",
        "_PROBE if timeout is None else min(_PROBE, timeout)",
        "_PROBE",
    ),
    "a worker whose method has raised does not have the weights": (
        "peers/_worker_set.py",
        "    return arrivals.given | raised(arrivals.failed).keys() - refused.keys()",
        "    return arrivals.given",
    ),
    "a lost worker stays healthy": (
        "peers/_ranks.py",
        "                self.records[rank].leave_out(error)\n",
        "                pass\n",
    ),
    "workers that are lost before the first weights need some": (
        "peers/_worker_set.py",
        "        return self.latest.version is None and self._start.initial is not None\n",
        "        return False\n",
    ),
    # Calls of all workers at once.
    "workers that lack weights are called at once": (
        "peers/_ready_workers.py",
        "            if not (is_at_hand and record.version == version):\n",
        "            if not is_at_hand:\n",
    ),
    "a call at once that breaks off is not withdrawn": (
        "peers/_ready_workers.py",
        "            if withdraws and channel.withdraw():\n                continue\n",
        "",
    ),
    "weights that were sent at once are not the latest": (
        "peers/_worker_set.py",
        "                self.latest = latest\n            call",
        "            call",
    ),
    "a command for all is taken by calls that may have ended": (
        "peers/_ready_workers.py",
        "            worker.serve(channel)\n",
        "            pass\n",
    ),
    "weights before the last are the latest after an answer is missed": (
        "peers/_worker_set.py",
        "            if outcome is None:\n                arrivals",
        "            if outcome is None:\n                self.latest = before\n"
        "                arrivals",
    ),
    # What is noted of weights that were sent.
    "workers that refused weights stay healthy": (
        "peers/_worker_set.py",
        "        if is_sent and refused:\n            self._leave_out(refused)\n",
        "",
    ),
    "weights that all refused are the latest": (
        "peers/_worker_set.py",
        "        if not is_sent:\n            self.latest = before\n",
        "",
    ),
    "a worker that refused weights is trusted": (
        "peers/_worker_set.py",
        "            self.ranks.records[rank].mark_stale()  # it may have set some of them\n",
        "            pass\n",
    ),
    "weights of a call that was interrupted are not the latest": (
        "peers/_worker_set.py",
        "        is_sent = bool(arrivals.answers or arrivals.were_interrupted) and not is_refused\n",
        "        is_sent = bool(arrivals.arrived) and not is_refused\n",
    ),
    # Who leaves.
    "a worker that is removed in a call that was broken off owes nothing": (
        "peers/_ranks.py",
        "        self._owe_until_free()\n        self.has_left = True\n",
        "        self.has_left = True\n",
    ),
    # When a round ends, and what is in it.
    "a round never ends by time": (
        "peers/_wait.py",
        "        if pending and end is not None and now >= end:\n",
        "        if False:\n",
    ),
    "one result is enough": (
        "peers/_wait.py",
        "        if left + len(self.quarantined) >= need and left >= (spec.min_results or 1):\n",
        "        if left >= 1:\n",
    ),
    "all results count alike": (
        "peers/_wait.py",
        '            return weight_of(self.weights, result, f"rank {rank}")\n',
        "            return 1.0\n",
    ),
    "an average has two results at most": (
        "rounds/_local_reduce.py",
        "        ranks = sorted(self._arrivals.arrived)\n        weights",
        "        ranks = sorted(self._arrivals.arrived)[:2]\n        weights",
    ),
    "a run of results is added without its last": (
        "rounds/_local_reduce.py",
        "            total.add_all(models, weights)\n",
        "            total.add_all(models[:1], weights[:1])\n",
    ),
    "ranks with NaN are used": (
        "rounds/_local_reduce.py",
        "            self._used = [ranks[k] for k in used]\n",
        "            self._used = [*ranks]\n",
    ),
    "an error counts as a result": (
        "peers/_wait.py",
        "        self.arrived.difference_update(reasons)\n",
        "",
    ),
    # What a worker does with weights, and the channel to it.
    "a worker takes any weights for those that it needs": (
        "_worker.py",
        "        if version is not None and version != self.version:\n",
        "        if False:\n",
    ),
    "a worker runs on weights that it has set in part": (
        "_worker.py",
        "        if not self.is_whole:\n",
        "        if False:\n",
    ),
    "weights from a channel are set without a note": (
        "_worker.py",
        "            state.is_whole = _sets_all_or_none(worker)\n            _variables",
        "            _variables",
    ),
    "a command is taken by a call that may have ended": (
        "peers/_by_channel.py",
        "        if not is_there:\n            self.serve(channel)\n",
        "",
    ),
    "a channel that was given up is used": (
        "peers/_by_channel.py",
        "            if not (channel.is_closed or channel.is_given_up):\n",
        "            if not channel.is_closed:\n",
    ),
    "a result that cannot be sent is nothing": (
        "channels/_worker_channel.py",
        "            box.append(self._value_of(message))\n",
        "            box.append(None)\n",
    ),
}
"""By name: the file, the text that is there, and what takes its place; found by rounds."""

ASYNCHRONOUS = {
    "a worker gets no new weights": (
        "peers/_worker_set.py",
        "        if latest.version is not None:\n",
        "        if latest.version is not None and not self.ranks[rank].version:\n",
    ),
    "results may be staler by one": (
        "core/_loop.py",
        "publications - call.publication > most",
        "publications - call.publication > most + 1",
    ),
    "results that wait for others may be stale": (
        "rounds/_as_completed.py",
        "            if self._leave_out_stale(taken, publications):\n                continue\n",
        "",
    ),
    "the newest call comes first": (
        "core/_loop.py",
        "oldest = min(others, ",
        "oldest = max(others, ",
    ),
    "a round has two results of a worker": (
        "core/_loop.py",
        "others = [call for call in self.there if call.rank not in besides]",
        "others = [*self.there]",
    ),
    "staleness counts from the publication before": (
        "rounds/_as_completed.py",
        "version, number = latest.version, latest.number\n",
        "version, number = latest.version, latest.number - 1\n",
    ),
    "NaN is yielded": (
        "rounds/_as_completed.py",
        "        if not (is_finite or takes_all):\n            return None\n        del packed",
        "        del packed",
    ),
    "a loop waits for workers that are lost": (
        "core/_loop.py",
        "            call.record.why is None and not call.record.has_left",
        "            not call.record.has_left",
    ),
    "a lost worker is not asked again": (
        "rounds/_as_completed.py",
        "            sent.record.back_off()\n        self._take_up(sent.rank)\n",
        "            sent.record.back_off()\n            return\n        self._take_up(sent.rank)\n",
    ),
    "results of before it was lost are yielded": (
        "rounds/_as_completed.py",
        '        elif sent.kind == "probe" or record.is_probed:  # by another loop or call\n',
        '        elif sent.kind == "in_flight":\n            self._loop.there.append(sent)\n'
        '        elif sent.kind == "probe" or record.is_probed:\n',
    ),
    "a worker of a loop goes on from its own weights": (
        "peers/_worker_set.py",
        "        if latest.version is not None:\n",
        "        if latest.version != self.ranks[rank].version:\n",
    ),
    "a loop that is left takes a refusal for a result": (
        "rounds/_as_completed.py",
        "            version = sent.version if error_in(sent.answer) is None else None\n",
        "            version = sent.version\n",
    ),
    "a loop forgets a worker for which another call waits no longer": (
        "rounds/_as_completed.py",
        "        else:\n            self._loop.idle.append(sent.rank)\n\n    # Rounds.",
        "\n    # Rounds.",
    ),
    "a worker is called while its result waits for a round": (
        "rounds/_as_completed.py",
        "            self._loop.there.append(sent)\n        elif",
        "            self._loop.there.append(sent)\n"
        "            self._loop.idle.append(sent.rank)\n        elif",
    ),
    "a removed worker is ended in a call that a loop has left": (
        "peers/_ranks.py",
        "            if self.has_left:\n",
        "            if False:\n",
    ),
    "a removed worker is ended at once": (
        "peers/_ranks.py",
        "            if record.in_flight is None:\n                record.worker.detach()\n",
        "            if True:\n                record.worker.detach()\n",
    ),
    "a removed worker is never ended": (
        "peers/_ranks.py",
        "        if self._leaving:\n            self._reap()\n",
        "",
    ),
    "a removed worker is one of the next round": (
        "peers/_ranks.py",
        "                self.records.pop(rank, None)\n",
        "",
    ),
    "an added worker is never ready": (
        "peers/_ranks.py",
        "            self.admitted.append(rank)\n",
        "",
    ),
    "a loop lets others keep nothing": (
        "rounds/_as_completed.py",
        "        record.kept = functools.partial(self._keep, answer, record.kept)\n",
        "",
    ),
}
"""The same, found by loops of results as they arrive."""
