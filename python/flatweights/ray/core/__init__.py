"""What is decided, apart from clocks, Ray and memory: data in, data out.

Nothing here reads a clock, waits, or touches memory of another process: its caller tells it what
has happened, and when, and does what it says. So a test can drive it through any order of
events. Tests hold it to that: it imports neither Ray nor sockets, threads or the time.

- `_requests` has the messages between members and coordinator, `_peer` the states of a member.
- `_calls` decides about the members' calls: which one is due, which members take part in it, and
  what each member is told. `_events` has its events and its actions. `_waiting` lists the members
  that wait, until a `_deadline`; `_response_cache` knows the calls that were made, `_healing` the
  states that members wait for.
- `_loop` decides about a driver's rounds without a barrier: which result is next, and which call is
  waited for.
"""
