"""What both ends of a lane know: the first packets, the kinds of commands and answers."""

from __future__ import annotations

import struct

# What a driver answers to a worker's first packet.
WELCOME = b"A"  # it has the mailbox, and will know the worker by its token
REFUSAL = b"N"  # it does not expect the worker

COMMAND = 0  # the kind of all commands

# Kinds of answers.
VALUE = 0  # a pickled result
BY_CALL = 1  # the result is that of a Ray call; holds its number, a `NUMBER`
REFUSED = 2  # the command cannot be unpickled, and was not run; holds the reason
WEIGHTS = 3  # the buffer of `FlatWeights`, whose layout is that of the last ones sent as a VALUE
BROKEN = 4  # the lane is of no use, and the command was not run; holds the reason
ASK = 5  # that of a member; holds a body and at most one buffer

NUMBER = struct.Struct("<q")
