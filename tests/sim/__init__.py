"""A simulator: the package in one process, with a virtual clock, and faults drawn from a seed.

A schedule is one order of events: it follows from a plan (which members there are, what they call,
what goes wrong at which of their steps) and a seed. The same plan and seed give the same schedule.
An oracle checks every response while it runs. `python -m tests.sim --help` runs many.

| file | what it holds |
| --- | --- |
| `world.py` | the scheduler: processes, their tasks, events, and the virtual clock |
| `platform.py` | Ray, channels and threads for coordinators and members, in that world |
| `copies.py` | what another process gets of a value |
| `programs.py` | the programs of members: what users write |
| `plans.py` | plans, drawn from a seed, and smaller ones of a plan that fails |
| `oracle.py` | what must hold |
| `schedules.py` | one schedule: all of these together |
| `orders.py` | all orders of events of a core alone: each state to which they lead |
| `call_orders.py` | the core of members' calls for it: what may happen, and what must hold |
| `mutants.py` | small wrong changes of the package, which the oracle has to find |
| `nodes*.py` | members on several nodes: links and exchanges, plans, mutants |
| `group_*.py` | the same for a group: its driver and its workers, in barrier rounds and in loops |
| `fit_*.py` | what a `fit` of Keras adds to members |
"""
