"""Rounds: the calls of a group's workers, and the average of their answers.

- `_barrier` calls all workers and waits for all; `_as_completed` takes each result as it arrives.
  `_run` repeats the first, and `_work` is what workers are asked to do.
- `_local_reduce` adds results in place, in the process that waits for them.
- `_allreduce` lets each node add up its own results, and nodes exchange shards of the sums.
- `_codec` encodes and decodes weights that travel, `_cleanup` ends a round that has failed.
"""
