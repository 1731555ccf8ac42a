"""Models and gradients in 16 bits, with each rounding error added to the next message.

Codecs for users with their own transport (RPC, MPI, files). `flatweights.ray.WorkerGroup` does
all this for Ray's actors if it is given a ``wire_dtype``.

Weights that are rounded to 16 bits in every round lose every update that is smaller than
their last place: 1/256 of a weight for bfloat16. So a message holds the difference from
weights that both sides have, and its rounding error is added to the next message: error
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
...         trained = worker.reference.copy()  # the weights of all workers, read-only
...         trained["w"] += np.float32(step)
...         sent.append(travel(worker.encode(trained)))
...     update = travel(driver.encode(driver.average(sent)))
...     for worker in workers:
...         weights = worker.receive(update)
>>> weights["w"].round(4)
array([1.003, 2.003], dtype=float32)

Weights in bfloat16 would lose these steps: 1.002 rounds to 1, and 2.002 to 2. Driver and
workers have the same bits after each round. A worker that missed an update raises
`MissedUpdateError`, and goes on from a snapshot. Gradients have no reference: a
`GradientEncoder` at each worker and `average_differences` are enough.

Parts of float32 and float64 are rounded. Others travel unchanged: integers, booleans, complex
numbers, and numbers of 16 bits or fewer. Two threads must not use one encoder or
broadcaster at once.
"""

from flatweights.wire._encoders import DeltaBroadcaster, DeltaEncoder, GradientEncoder
from flatweights.wire._messages import (
    Difference,
    MissedUpdateError,
    Snapshot,
    average_differences,
)
from flatweights.wire._plan import WireDType, dtype_on_wire, wire_layout

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
