"""Averages that processes ask for by themselves.

- `flatweights.ray.core` has the messages between members and coordinator, and decides about their
  calls.
- `_config` has what members must agree on. `_train` knows Ray Train.
- `_member` has the public part: `join`, and a `Member` with its calls.
- `_client` connects a member to its coordinator: by a channel within a node, else by Ray's object
  store.
- `_coordinator` is the actor that members call, `_group` its one thread, `_sessions` its members'
  records, `_rendezvous` lets them in.
"""
