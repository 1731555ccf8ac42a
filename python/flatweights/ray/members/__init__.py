"""Averages that processes ask for by themselves.

- `_asks` has the messages between members and host, `_terms` what members must agree on.
- `_member` has the public part: `join`, and a `Member` with its calls. `_train` knows Ray Train.
- `_host_end` connects a member to its host: by a lane within a node, else by Ray's object store.
- `_host` is the actor that members call, `_meeting` its one thread, `_seats` its members' records.
  `_waiting` lists the members that wait, and `_past` knows the calls that were made.
"""
