"""Move and average the weights of models, as one contiguous buffer.

`flatweights` itself needs only NumPy, ml_dtypes and safetensors. `flatweights.tensorflow` has
`TensorFlowVariables`; `flatweights.ray` has averaging drivers, workers and members;
`flatweights.keras` has callbacks and optimizers for ``fit`` on several processes;
`flatweights.robust` has averages that a few wrong workers cannot spoil; `flatweights.server` has
optimizers that step along averages or gradients; `flatweights.wire` has 16-bit codecs with error
feedback for any transport.

``flatweights examples`` lists programs to copy, and ``flatweights info`` prints versions and
active code paths. The repository's ``docs/`` explain the rest, including warnings and errors.
"""

from flatweights._average import average, average_into
from flatweights._config import clear_pool, get_num_threads, set_num_threads, show_config
from flatweights._core import __version__
from flatweights._flatten import flatten, unflatten, unflatten_into
from flatweights._inplace import axpy_, clip_by_norm_, isfinite, lerp_, norm, scale_
from flatweights._layout import Layout, Slot
from flatweights._running_average import RunningAverage
from flatweights._weights import FlatWeights

__all__ = [
    "FlatWeights",
    "Layout",
    "RunningAverage",
    "Slot",
    "__version__",
    "average",
    "average_into",
    "axpy_",
    "clear_pool",
    "clip_by_norm_",
    "flatten",
    "get_num_threads",
    "isfinite",
    "lerp_",
    "norm",
    "scale_",
    "set_num_threads",
    "show_config",
    "unflatten",
    "unflatten_into",
]
