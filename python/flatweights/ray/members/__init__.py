"""Averages that processes ask for themselves.

- `_asks` is what members and host say to each other.
- `_member` is what users have: `join`, and a `Member` with its calls. `_train` knows Ray Train.
- `_host_end` is how a member reaches its host: a lane within a node, Ray's object store else.
- `_host` is the actor that members call, `_meeting` its one thread, `_seats` what that waits for.
"""
