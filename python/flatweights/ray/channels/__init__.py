"""Memory that two processes of a machine map, and the calls that pass through it.

- `_segments` is the memory that one process writes and others read, and the check for free memory.
- `_message` packs a value into a message: a pickle whose large buffers lie in segments.
- `_end` has the parts that both ends of a channel share: the mailbox, the socket, the peer's
  segments.
- `_protocol` has the kinds of messages that both ends know.
- `_driver_channel` is the driver's end, `_worker_channel` a worker's, `_member_channel` a member's.
"""
