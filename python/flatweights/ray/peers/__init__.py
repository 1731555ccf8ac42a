"""The transports to one process, and the records of processes.

- `_transport` is the interface between rounds and workers: calls and answers. `_wait` waits for
  answers.
- `_actor_spec` starts the actors of a group, whose arguments may depend on the rank (`_by_rank`).
- `_ranks` has a record for each worker of a group. `_worker_set` sends workers the weights that
  they should have; `_latest` keeps these weights, `_start` those that all workers start from.
- A call travels by one of three transports: `_store` through Ray, `_by_channel` through memory
  that driver and worker map, `_by_agent` through an `_agent` on the worker's node. A result may
  stay on that node; then the driver has a `_summary` of it.
- `_backoff` decides when to try a failed transport again; `_call_log` keeps the order of the calls
  on an actor, whatever their transport.
- `_platform` has what these use of Ray. `_shared_actor` finds or starts an actor by its name.
"""
