"""The protocol of a channel: the first packets, the kinds of commands and answers."""

from __future__ import annotations

import struct

# A driver's answers to a worker's first packet.
WELCOME = b"A"  # it has the mailbox, and recognises the worker by its token
REFUSAL = b"N"  # it does not expect the worker

# Kinds of commands. All except `COMMAND` and `CALL` are for members of a process group. The core
# knows the numbers of REPEATED and REPEAT (repeated_calls.hpp), of VALUE and WEIGHTS
# (worker_answers.hpp).
COMMAND = 0  # pickled: a method, and its arguments
REDUCE = 1  # average segments of a GPU; answered by REDUCED
RESEND = 2  # send the last request again, whole, with weights in memory of the host
REPEATED = 3  # the response of a call that all have repeated; holds a `TOLD_AGAIN` and a buffer
CALL = 4  # a call without arguments; holds a body for the worker's `run_plain`, and its weights

# Kinds of answers.
VALUE = 0  # a pickled result
BY_CALL = 1  # a Ray call returns the result; holds its number, a `NUMBER`
REFUSED = 2  # the command cannot be unpickled, and was not run; holds the reason
WEIGHTS = 3  # the buffer of `FlatWeights`, in the layout of the last ones sent as a VALUE
BROKEN = 4  # the channel cannot be used, and the command was not run; holds the reason
REQUEST = 5  # a member's request; holds a body and at most one buffer
REDUCED = 6  # the result of REDUCE; holds a body
REPEAT = 7  # a member's request, as before; holds an `ASKED_AGAIN` and at most one buffer

NUMBER = struct.Struct("<q")
ASKED_AGAIN = struct.Struct("=Qd")  # the number of the prepared call, and the weight
TOLD_AGAIN = struct.Struct("=qdd")  # the number of the response, seconds waited, and averaged
