"""Benches of `flatweights` against its alternatives; see README.md beside this file."""

import os

# OpenBLAS' threads spin for some 20 ms after a call, on processors that the next contender needs.
# NumPy reads this variable when it is loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
