"""Small wrong changes of what members of a `fit` do; see `mutants`."""

FIT = {
    # The table of states.
    "a member that is healed in another epoch goes on in its own": (
        "_fit_states.py",
        "now.steps is not None and donor.epoch == now.epoch",
        "now.steps is not None",
    ),
    "members that are ahead have the state": (
        "_fit_states.py",
        'Edge((_P.MEETING,), Met, "healed, in an earlier epoch", None, (_A.MEET_RECOVERING,))',
        'Edge((_P.MEETING,), Met, "healed, in an earlier epoch", None, (_A.MEET,))',
    ),
    "a member skips epochs with the weights that it makes there": (
        "_fit_states.py",
        'Edge((_P.MEETING,), Met, "healed, in a later epoch", _P.EARLY, (_A.KEEP,))',
        'Edge((_P.MEETING,), Met, "healed, in a later epoch", _P.EARLY)',
    ),
    "an epoch that was cut short ends the training": (
        "_fit_states.py",
        '"it was cut short", None, (_A.HIDE, _A.GO_ON))',
        '"it was cut short", None, (_A.HIDE,))',
    ),
    "a replacement begins with its own weights": (
        "_fit_states.py",
        'EpochBegins, "they begin it", _P.TOGETHER, (_A.RESTORE, _A.TAKE_COUNTS))',
        'EpochBegins, "they begin it", _P.TOGETHER, (_A.TAKE_COUNTS,))',
    ),
    "a replacement begins with the first epoch": (
        "_fit_states.py",
        'Met, "", _P.JOINED, (_A.KEEP, _A.BEGIN_THERE))',
        'Met, "", _P.JOINED, (_A.KEEP,))',
    ),
    "a member that ends late keeps its own weights": (
        "_fit_states.py",
        'Edge((_P.ENDING,), Met, "none has ended", None, (_A.MEET_RECOVERING,))',
        'Edge((_P.ENDING,), Met, "none has ended", None, (_A.MEET,))',
    ),
    "the batches by which others are ahead are forgotten": (
        "_fit_states.py",
        "        state = replace(state, ahead=event.batches - state.done)\n",
        "        pass\n",
    ),
    "a member begins an epoch although the others have ended": (
        "_fit_states.py",
        '    Edge((_P.MEETING,), Met, "one has ended", _P.OVER, (_A.KEEP,)),\n',
        "",
    ),
    "a member takes a later epoch for its own": (
        "_fit_states.py",
        '    Edge((_P.MEETING,), Met, "healed, in a later epoch", _P.EARLY, (_A.KEEP,)),\n',
        "",
    ),
    "a member goes on with the batch of an epoch that it passes by": (
        "_fit_states.py",
        '_P.OVER), BatchEnds, "", None, (_A.RESTORE, _A.END_EPOCH))',
        '_P.OVER), BatchEnds, "", None, (_A.END_EPOCH,))',
    ),
    "a member that is behind makes all batches of the epoch": (
        "_fit_states.py",
        '    Edge((_P.TOGETHER,), BatchEnds, "it is the last for them", None, (_A.END_EPOCH,)),\n',
        "",
    ),
    "callbacks see an epoch at whose end a member is left behind": (
        "_fit_states.py",
        'Edge((_P.OUT_OF_SYNC, _P.EARLY), EpochEnds, "", None, (_A.HIDE,))',
        'Edge((_P.OUT_OF_SYNC, _P.EARLY), EpochEnds, "", None)',
    ),
    "a replacement that comes at the end does not wait with the others": (
        "_fit_states.py",
        "        _P.ENDING,\n        (_A.RESTORE, _A.TAKE_COUNTS, _A.MEET),\n",
        "        _P.ENDED,\n        (_A.RESTORE, _A.TAKE_COUNTS),\n",
    ),
    "a member that others have ended does not wait with them": (
        "_fit_states.py",
        'FitEnds, "the others meet again", _P.ENDING, (_A.MEET,)),',
        'FitEnds, "the others meet again", _P.ENDED),',
    ),
    # What is done then.
    "a donor does not tell the batches by which others are ahead": (
        "_progress.py",
        "done = self._now.done + self._now.ahead\n",
        "done = self._now.done\n",
    ),
    "a member does not know that it was healed": (
        "_progress.py",
        "        if member.rank in result.healed:\n",
        "        if False:\n",
    ),
    "a member waits in a step for others that are elsewhere": (
        "_progress.py",
        "with out_of_sync_is_error(member, True):",
        "with out_of_sync_is_error(member, False):",
    ),
    "one that ends does not end it for all": (
        "_progress.py",
        "any(have_ended)",
        "all(have_ended)",
    ),
    "each waits at the end by its own clock": (
        "_progress.py",
        "may_come and any(wait)",
        "may_come and place[2]",
    ),
    "a member that waits at the end fails with the others": (
        "_progress.py",
        "            if not (ends and has_state) or member.lacks_state:",
        "            if True:",
    ),
    "callbacks see the epochs that are passed by": (
        "_progress.py",
        "        self._list[after:] = seen ",
        "        pass ",
    ),
    "callbacks that were hidden stay so": (
        "_progress.py",
        "            self._list[:], self._whole = self._whole, []\n",
        "            pass\n",
    ),
    "callbacks that decide keep their own counts": (
        "_progress.py",
        "                self._take_counts(self._pending, _DECIDING)",
        "                pass",
    ),
    "a healed member has no counts": (
        "_progress.py",
        "        self._take_counts(donor)\n",
        "        pass\n",
    ),
    "the batches since the last average of weights are not told": (
        "_progress.py",
        "        names = callback.counted\n",
        "        names = frozenset()\n",
    ),
    "the best weights are not healed": (
        "_progress.py",
        '        "best_weights",\n',
        "",
    ),
    "the batches of one execution end one by one": (
        "_progress.py",
        "by_one = callback.model.steps_per_execution == 1",
        "by_one = True",
    ),
    # A stop within an epoch.
    "others wait for the steps of a member that stops": (
        "_average_logs.py",
        "        if self.model.stop_training and not self._is_cut():\n",
        "        if False:\n",
    ),
    "an epoch goes on that others have ended": (
        "_average_logs.py",
        "if self.model.stop_training and not self._is_cut():",
        "if self.model.stop_training:",
    ),
    "a stop that is held is lost": (
        "_average_logs.py",
        "        if self._is_held:\n",
        "        if False:\n",
    ),
    "a stop in an epoch that is cut short is lost": (
        "_progress.py",
        "                if self._model.stop_training is _CUT:\n",
        "                if True:\n",
    ),
    "a stop of a late member ends its training alone": (
        "_progress.py",
        "            self.hold_stop()\n",
        "            pass\n",
    ),
    "a stop that the others are to be told is told in the same epoch": (
        "_progress.py",
        "self.stopped_in not in (None, self._now.epoch)",
        "self.stopped_in is not None",
    ),
    # The start.
    "a member that is late for the start has the state": (
        "_start.py",
        "        elif member.rank in compared.late:\n            member.lacks_state = True\n",
        "        elif member.rank in compared.late:\n",
    ),
    "members start from their own weights": (
        "_start.py",
        "        if not different:\n",
        "        if True:\n",
    ),
    "a root that was not waited for ends the training of all": (
        "_start.py",
        "out_of_sync_is_error(member, not needs_all)",
        "out_of_sync_is_error(member, False)",
    ),
}
