"""What is decided, apart from clocks, Ray and memory: data in, data out.

Nothing here reads a clock, waits, or touches memory of another process: whoever uses it tells it
what has happened, and when, and does what it says. So a test can drive it through any order of
events. Tests hold it to that: it imports neither Ray nor sockets, threads or the time.

- `_requests` has the messages between members and coordinator, `_peer` the states of a member.
- `_calls` decides about the members' calls: which one is due, who takes part in it, and what each
  member is told. `_events` has what it is told, and what it says is to be done. `_waiting` lists
  the members that wait, `_cache` knows the calls that were made, `_healing` the states that members
  wait for.
"""
