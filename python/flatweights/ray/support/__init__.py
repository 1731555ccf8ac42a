"""What all of `ray/` needs, and what knows none of it.

- `_errors` tells which of Ray's errors mean what, and in which session of Ray this process is.
- `_failpoints` are the places at which tests end a process.
- `_listener` accepts connections on a socket, in a thread of its own.
- `_turn` lets one thread at a time call a group.
"""
