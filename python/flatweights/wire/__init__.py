"""Weights and gradients in 16 bits, without losing small updates to rounding.

These are codecs for users with their own transport (RPC, MPI, files). With a ``wire_dtype``,
`flatweights.ray.WorkerGroup` uses them for Ray's actors.

If weights were rounded to 16 bits in every round, updates below the precision of the dtype would be
lost: those below 1/512 of a weight in bfloat16. So a message holds the difference from weights that
both sides have, and its rounding error is added to the next message. This is error
feedback (Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; Stich,
Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy, Rebjock, Stich
and Jaggi, "Error Feedback Fixes SignSGD and Other Gradient Compression Schemes", ICML 2019),
applied in both directions as by Tang, Yu, Lian, Zhang and Liu, "DoubleSqueeze: Parallel Stochastic
Gradient Descent with Double-Pass Error-Compensated Compression", ICML 2019.

The driver has a `DeltaBroadcaster`, and each worker has a `DeltaEncoder`. A worker that joins, or
that has missed a message, is sent a `Snapshot`. After that, each round sends one `Difference` from
the worker to the driver and one back. Two rounds of two workers, here in one process:

>>> import pickle
>>> import numpy as np
>>> from flatweights import FlatWeights
>>> from flatweights.wire import DeltaBroadcaster, DeltaEncoder
>>> def travel(message): # as a transport does: one buffer, and some hundred bytes
...     return pickle.loads(pickle.dumps(message, protocol=5))
>>> driver = DeltaBroadcaster(FlatWeights({"w": np.float32([1, 2])}), "bfloat16")
>>> workers = [DeltaEncoder(travel(driver.snapshot())) for _ in range(2)]
>>> for _ in range(2):
...     sent = []
...     for worker, step in zip(workers, (0.001, 0.002)):
...         trained = worker.reference.copy()  # the weights of all workers, read-only
...         trained["w"] += np.float32(step)
...         sent.append(travel(worker.encode(trained)))
...     update = travel(driver.encode(driver.average(sent)))
...     for worker in workers:
...         weights = worker.receive(update)
>>> weights["w"].round(4)
array([1.003, 2.003], dtype=float32)

Weights in bfloat16 would lose these steps: 1.002 rounds to 1, and 2.002 to 2. After each round,
driver and workers have the same bits. On a worker that missed an update, `DeltaEncoder.receive`
raises `MissedUpdateError`; the worker continues from a snapshot. Gradients are not differences from
anything: they need only a `GradientEncoder` at each worker, and `average_differences`.

Parts of float32 and float64 are rounded. Others travel unchanged: integers, booleans, complex
numbers, and floating numbers of 16 bits or fewer. Only one thread may use an encoder or a
broadcaster at a time.
"""

from flatweights.wire._encoders import DeltaBroadcaster, DeltaEncoder, GradientEncoder
from flatweights.wire._layouts import WireDType, dtype_on_wire, wire_layout
from flatweights.wire._messages import (
    Difference,
    MissedUpdateError,
    Snapshot,
    average_differences,
)

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
