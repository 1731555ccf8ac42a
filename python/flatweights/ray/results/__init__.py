"""What workers and members send, and what comes of a round.

- `_variables` is what a user's variables have to offer, and `_result` what a worker may return.
- `_wire` makes 16-bit differences of weights.
- `_round` is the result of a round, and `_report` what the log and the metrics say of it.
"""
