"""Benches of `flatweights` against its alternatives; see README.md beside this file."""

import os

# OpenBLAS' threads spin for some 20 ms after a call, on the processors that the next contender is
# timed on. This is read when NumPy is loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
