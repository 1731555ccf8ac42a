"""The protocol of a lane: the first packets, the kinds of commands and answers."""

from __future__ import annotations

import struct

# A driver's answers to a worker's first packet.
WELCOME = b"A"  # it has the mailbox, and recognises the worker by its token
REFUSAL = b"N"  # it does not expect the worker

# Kinds of commands. The last two are for members whose weights are in windows of a GPU.
COMMAND = 0
REDUCE = 1  # average such windows; answered by REDUCED
RESEND = 2  # send the weights of the last ask again, in memory of the host; answered by an ASK

# Kinds of answers.
VALUE = 0  # a pickled result
BY_CALL = 1  # a Ray call returns the result; holds its number, a `NUMBER`
REFUSED = 2  # the command cannot be unpickled, and was not run; holds the reason
WEIGHTS = 3  # the buffer of `FlatWeights`, in the layout of the last ones sent as a VALUE
BROKEN = 4  # the lane cannot be used, and the command was not run; holds the reason
ASK = 5  # a member's ask; holds a body and at most one buffer
REDUCED = 6  # the result of REDUCE; holds a body

NUMBER = struct.Struct("<q")
