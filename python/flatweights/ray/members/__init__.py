"""Averages that processes ask for by themselves.

- `flatweights.ray.core` has the messages between members and coordinator, and decides about their
  calls.
- `_config` has what members must agree on. `_train` knows Ray Train, `_replace` has it replace
  single workers.
- `_member` has the public part: `join`, and a `Member` with its calls.
- `_client` connects a member to its coordinator: by a channel within a node, else by Ray's object
  store. `_gpu_member` has its segments of a GPU, `_repeated_call` its call that may be repeated.
- `_coordinator` is the actor that members call, `_process_group` its one thread, with the calls of
  other threads in a `_call_queue`. `_sessions` has the records of the members, `_rendezvous` lets
  them in. `_repetitions` has the calls that C++ makes, `_gpu_rounds` the averages on a GPU.
- `_node_agent` is the agent that members of another node reach instead of the coordinator.
- `_platform` has what all of these use of Ray. `_twins` detects models that take turns, `_ended`
  marks the names of process groups that have ended.
"""
