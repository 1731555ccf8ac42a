"""What both ends of a lane know: the kinds of commands and answers."""

from __future__ import annotations

import struct

COMMAND = 0  # the kind of all commands

# Kinds of answers.
VALUE = 0  # a pickled result
BY_CALL = 1  # the result is that of a Ray call; holds its number, a `NUMBER`
REFUSED = 2  # the command cannot be unpickled, and was not run; holds the reason
WEIGHTS = 3  # the buffer of `FlatWeights`, whose layout is that of the last ones sent as a VALUE
BROKEN = 4  # the lane is of no use, and the command was not run; holds the reason
ASK = 5  # that of a member; holds a body and at most one buffer

NUMBER = struct.Struct("<Q")
