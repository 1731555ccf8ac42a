"""Models and gradients in 16 bits on their way between processes, without what that loses.

For who brings a transport: RPC, MPI, files. `flatweights.ray.WorkerGroup` does all this for
Ray's actors where it is given a ``wire_dtype``. This package needs NumPy and the core alone.

Rounded to 16 bits in every round, weights would lose every update that is smaller than
their last place: 1/256 of a weight for bfloat16. So what travels is the difference from
what both sides have, and what rounding takes from one message is added to the next: error
feedback (Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; Stich,
Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy, Rebjock, Stich
and Jaggi, "Error Feedback Fixes SignSGD and Other Gradient Compression Schemes", ICML 2019);
both ways, as in Tang, Yu, Lian, Zhang and Liu, "DoubleSqueeze: Parallel Stochastic Gradient
Descent with Double-Pass Error-Compensated Compression", ICML 2019.

The driver has a `DeltaBroadcaster` and each worker a `DeltaEncoder`. A `Snapshot` is sent
once, to each worker that joins or has missed a message; then a `Difference` goes each way
in each round. Two rounds of two workers, in one process here:

>>> import pickle
>>> import numpy as np
>>> from flatweights import FlatWeights
>>> from flatweights.wire import DeltaBroadcaster, DeltaEncoder
>>> def travel(message):  # between processes: one buffer, and some hundred bytes
...     return pickle.loads(pickle.dumps(message, protocol=5))
>>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
>>> workers = [DeltaEncoder(travel(driver.snapshot())) for _ in range(2)]
>>> for _ in range(2):
...     sent = []
...     for worker, step in zip(workers, (0.001, 0.002)):
...         trained = worker.reference.copy()  # what all have; reference itself is read-only
...         trained["w"] += np.float32(step)
...         sent.append(travel(worker.encode(trained)))
...     update = travel(driver.encode(driver.average(sent)))
...     for worker in workers:
...         weights = worker.receive(update)
>>> weights["w"].round(4)
array([1.003, 2.003], dtype=float32)

In bfloat16 alone these steps would be lost: beside 1 and 2 they round to nothing. Driver and
workers have the same bits after each round. Who has missed one gets a `MissedUpdateError`,
and a snapshot mends that. For gradients, which no side keeps, a `GradientEncoder` at each
worker and `average_differences` are enough.

Parts of float32 and float64 travel so. Others travel as they are: integers, booleans, complex
numbers, and what has 16 bits or fewer already. Two threads must not use one encoder or
broadcaster at once.
"""

from flatweights.wire._blocks import wire_layout
from flatweights.wire._delta import DeltaBroadcaster, DeltaEncoder
from flatweights.wire._difference import (
    Difference,
    MissedUpdateError,
    Snapshot,
    average_differences,
)
from flatweights.wire._dtypes import WireDType, dtype_on_wire
from flatweights.wire._gradient import GradientEncoder

__all__ = [
    "DeltaBroadcaster",
    "DeltaEncoder",
    "Difference",
    "GradientEncoder",
    "MissedUpdateError",
    "Snapshot",
    "WireDType",
    "average_differences",
    "dtype_on_wire",
    "wire_layout",
]
