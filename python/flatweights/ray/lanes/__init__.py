"""Calls between a driver and the workers of its machine, through memory that both map.

- `_windows` is the memory that one process writes and others read, and the check for free memory.
- `_message` packs a value into a message: a pickle whose large buffers lie in windows.
- `_end` is what both ends of a lane share: the mailbox, the socket, the peer's windows.
- `_worker` is the worker's end, `_driver` the driver's.
- `_calls` makes the calls of a group through lanes, and through Ray where there is none.
"""
