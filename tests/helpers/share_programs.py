"""Random programs over variables that share memory, which TensorFlow must not write to.

A program reads variables in every way that refers to their memory (slices of slices, unstack,
split, reshape, bitcast, control flow, lists), gives the variables other values, and goes on
computing with the values that it read. Half of the programs also read and write single rows
(gather, lookup, sparse updates), after which TensorFlow updates a variable in place. Each program
runs twice, with and without `share=True`: results agree to the bit, and the memory keeps its bytes.

``python share_programs.py FIRST LAST`` runs the programs of some seeds over memory that the system
protects: any write, even of the same bytes, ends the process.
"""

import contextlib
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flatweights import FlatWeights
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1

Memory = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]

MODES = ("eager", "function", "xla", "session")

# Rows of 64 bytes and more can be sliced without a copy; others cannot.
SHAPES = ((4, 32), (8, 16), (6, 64), (64,), (2, 4, 16), (5, 3))
DTYPES = (tf.float32, tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8)
SAME_SIZE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def frozen(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an aligned copy whose flags say that it is read-only."""
    room = np.zeros(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + values.nbytes] = values
    room.setflags(write=False)
    return room[start : start + values.nbytes]


def protected(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy in pages that nobody can write to."""
    with tempfile.TemporaryFile() as file:
        file.write(values)  # type: ignore[arg-type]
        file.flush()
        pages = mmap.mmap(file.fileno(), values.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(pages, np.uint8)


# Ways to read a variable. Each returns a tensor that may refer to its memory.


def _rows(x: Any, rng: random.Random) -> Any:
    n = x.shape[0]
    begin = rng.randrange(n)
    return x[begin : rng.randrange(begin, n) + 1]


def _bitcast(x: Any, rng: random.Random) -> Any:
    return _rows(tf.bitcast(x, SAME_SIZE[x.dtype.size]), rng)


def _either(x: Any, rng: random.Random) -> Any:
    n, yes = x.shape[0], tf.greater(tf.size(x), rng.choice([0, 10_000]))
    return tf.cond(yes, lambda: x[: n // 2 + 1], lambda: x[-(n // 2 + 1) :])


def _looped(x: Any, rng: random.Random) -> Any:
    n = x.shape[0]
    half = n // 2 + 1
    loop = tf.while_loop(
        lambda i, _: i < 3, lambda i, _: (i + 1, x[n - half :]), (tf.constant(0), x[:half])
    )
    return loop[1]


def _mapped(x: Any, rng: random.Random) -> Any:
    return tf.map_fn(tf.identity, x)


def _listed(x: Any, rng: random.Random) -> Any:
    shape = tf.constant(x.shape[1:].as_list(), tf.int32)
    pieces = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=shape)
    k = rng.randrange(x.shape[0])
    return tf.raw_ops.TensorListGetItem(
        input_handle=pieces, index=k, element_shape=shape, element_dtype=x.dtype
    )


def _halves(x: Any, rng: random.Random) -> Any:
    n = x.shape[0]
    return rng.choice(tf.split(x, [n // 2, n - n // 2]))


def _called(x: Any, rng: random.Random) -> Any:
    return tf.function(lambda y: tf.unstack(y)[-1])(x)


READS: list[Callable[[Any, random.Random], Any]] = [
    _rows,
    _rows,
    lambda x, rng: _rows(_rows(x, rng), rng),
    lambda x, rng: rng.choice(tf.unstack(x)),
    _halves,
    lambda x, rng: _rows(tf.reshape(x, [x.shape[0], -1]), rng),
    lambda x, rng: tf.reshape(_rows(x, rng), [-1]),
    _bitcast,
    lambda x, rng: tf.identity(x),
    lambda x, rng: tf.expand_dims(_rows(x, rng), 0),
    lambda x, rng: tf.raw_ops.Snapshot(input=_rows(x, rng)),
    lambda x, rng: tf.stop_gradient(_rows(x, rng)),
    lambda x, rng: tf.concat([_rows(x, rng)], 0),
    _either,
    _looped,
    _called,
]
NOT_COMPILED = [
    _listed,
    _mapped,
    lambda x, rng: tf.raw_ops.DeepCopy(x=_rows(x, rng)),
]

# Ways to read rows of the variable itself, which switch it to being copied on reading.
SPARSE_READS: list[Callable[[Any, Any, random.Random], Any]] = [
    lambda v, x, rng: tf.gather(v, _indices(x, rng)),
    lambda v, x, rng: tf.nn.embedding_lookup(v, _indices(x, rng)),
    lambda v, x, rng: v.sparse_read(_indices(x, rng)),
]
NOT_COMPILED_SPARSE = [lambda v, x, rng: v.gather_nd([[i] for i in _indices(x, rng)])]


def _indices(x: Any, rng: random.Random) -> list[int]:
    return [rng.randrange(x.shape[0]) for _ in range(rng.randrange(1, 4))]


# Ways to compute with values that were read; TensorFlow does each in place if it believes it may.
FLOATING: list[Callable[[Any], Any]] = [
    tf.nn.relu,
    tf.abs,
    tf.square,
    tf.nn.elu,
    tf.tanh,
    lambda x: tf.clip_by_value(x, tf.cast(0.25, x.dtype), tf.cast(0.5, x.dtype)),
    lambda x: tf.nn.softmax(tf.reshape(x, [1, -1])),
    lambda x: tf.nn.bias_add(tf.reshape(x, [-1, 1]), tf.ones([1], x.dtype)),
]
ANY: list[Callable[[Any], Any]] = [
    lambda x: x + tf.ones_like(x),
    lambda x: tf.ones_like(x) - x,
    lambda x: x * tf.cast(3, x.dtype),
    lambda x: tf.add_n([x, tf.ones_like(x)]),
    lambda x: tf.maximum(x, tf.cast(2, x.dtype)),
    lambda x: tf.tensor_scatter_nd_update(tf.reshape(x, [-1]), [[0]], tf.zeros([1], x.dtype)),
    lambda x: tf.where(x > tf.cast(1, x.dtype), x, tf.zeros_like(x)),
    lambda x: tf.transpose(tf.reshape(x, [1, -1])),
    lambda x: tf.cast(x, tf.float64) + 1,
]


def _computed(x: Any, rng: random.Random) -> Any:
    for _ in range(rng.randrange(1, 4)):
        x = rng.choice(FLOATING + ANY if x.dtype.is_floating else ANY)(x)
    return x


# Ways to give a variable another value.
def _from_itself(v: Any, x: Any, rng: random.Random) -> Any:
    cut = rng.randrange(x.shape[0])
    return v.assign(tf.concat([x[cut:], x[:cut]], 0), read_value=False)


UPDATES: list[Callable[[Any, Any, random.Random], Any]] = [
    lambda v, x, rng: v.assign(tf.ones_like(x), read_value=False),
    lambda v, x, rng: v.assign(x, read_value=False),
    lambda v, x, rng: v.assign_add(tf.ones_like(x), read_value=False),
    lambda v, x, rng: v.assign_add(tf.ones_like(x), read_value=False),
    lambda v, x, rng: v.assign_sub(x, read_value=False),
    lambda v, x, rng: v.assign(tf.reshape(tf.unstack(tf.stack([x, x]))[1], x.shape)),
    _from_itself,
]


# Ways to change some of its rows, in place.
def _some(x: Any, rng: random.Random) -> tf.IndexedSlices:
    rows = sorted(set(_indices(x, rng)))
    return tf.IndexedSlices(tf.ones([len(rows), *x.shape[1:]], x.dtype), rows)


SPARSE_UPDATES: list[Callable[[Any, Any, random.Random], Any]] = [
    lambda v, x, rng: v.scatter_update(_some(x, rng)),
    lambda v, x, rng: v.scatter_add(_some(x, rng)),
    lambda v, x, rng: v.scatter_nd_update([[0]], [tf.ones(x.shape[1:], x.dtype)]),
    lambda v, x, rng: v[: x.shape[0] // 2].assign(
        tf.ones([x.shape[0] // 2, *x.shape[1:]], x.dtype)
    ),
]


def _others(variables: list[Any], rng: random.Random) -> tuple[Any, Any] | None:
    """Two variables, of which one can be assigned a slice of the other."""
    pairs = [
        (a, b)
        for a in variables
        for b in variables
        if a is not b and a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        if a.shape[0] <= b.shape[0]
    ]
    return rng.choice(pairs) if pairs else None


def is_sparse(seed: int) -> bool:
    """Whether the program of a seed also reads and updates rows."""
    return seed // len(MODES) % 2 == 1


def run_body(variables: list[Any], seed: int, *, compiled: bool) -> list[Any]:
    """Read, update and compute; in a graph, in this order, too."""
    rng = random.Random(seed)
    sparse = is_sparse(seed)
    held: list[Any] = []
    values: list[Any] = []  # calls are inlined: an op that waits for one may run before it reads
    after: list[Any] = []
    results: list[Any] = []
    eager = tf.executing_eagerly()
    for _ in range(rng.randrange(1, 4)):
        with contextlib.nullcontext() if eager else tf.control_dependencies(after):
            for v in rng.sample(variables, rng.randrange(1, len(variables) + 1)):
                x = v.read_value()
                values.append(x)
                if sparse and rng.random() < 0.3:
                    reads = SPARSE_READS if compiled else SPARSE_READS + NOT_COMPILED_SPARSE
                    held.append(rng.choice(reads)(v, x, rng))
                views = READS if compiled else READS + NOT_COMPILED
                held.append(rng.choice(views)(x, rng))
        with contextlib.nullcontext() if eager else tf.control_dependencies(held + values):
            after = held + values
            pair = _others(variables, rng)
            if pair is not None and rng.random() < 0.5:
                to, other = pair
                after.append(to.assign(other.read_value()[: to.shape[0]], read_value=False))
        for v in rng.sample(variables, rng.randrange(1, len(variables) + 1)):
            with contextlib.nullcontext() if eager else tf.control_dependencies(_ops(after)):
                rows_alone = sparse and rng.random() < 0.3
                updates = SPARSE_UPDATES if rows_alone else UPDATES
                after.append(rng.choice(updates)(v, v.read_value(), rng))
        after = _ops(after)
        with contextlib.nullcontext() if eager else tf.control_dependencies(after):
            rng.shuffle(held)
            for _ in range(rng.randrange(len(held) + 1)):
                results.append(_computed(held.pop(), rng))
    return results + held


def _ops(things: list[Any]) -> list[Any]:
    return [thing for thing in things if thing is not None]


class _Runner:
    """One model in one mode."""

    def __init__(self, mode: str, seed: int) -> None:
        rng = random.Random(seed)
        shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(1, 4))]
        dtypes = [rng.choice(DTYPES) for _ in shapes]
        if rng.random() < 0.5:  # two that can be assigned to each other
            shapes.append(shapes[0])
            dtypes.append(dtypes[0])
        compiled = mode == "xla"
        if mode == "session":
            with tf.Graph().as_default():
                variables = [
                    tf1.get_variable(
                        f"v{i}", s, d, initializer=tf1.zeros_initializer(), use_resource=True
                    )
                    for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
                ]
                session = tf1.Session()
                session.run(tf1.global_variables_initializer())
                fetches = run_body(variables, seed, compiled=False)
                self.weights = TensorFlowVariables(None, session, variables)
            self.step = lambda: session.run(fetches)
            return
        variables = [
            tf.Variable(tf.zeros(s, d), name=f"v{i}")
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]

        def step() -> list[Any]:
            return run_body(variables, seed, compiled=compiled)

        if mode == "eager":
            self.step = step
        else:
            self.step = tf.function(step, autograph=False, jit_compile=compiled)
        self.weights = TensorFlowVariables(variables)


def values_of(weights: TensorFlowVariables, seed: int) -> NDArray[np.uint8]:
    """Return a packed buffer of small numbers."""
    rng = np.random.default_rng(seed)
    parts = {
        slot.name: rng.integers(0, 5, slot.shape).astype(slot.dtype)
        for slot in weights.layout.slots
    }
    return FlatWeights(parts).buffer


def _bytes(x: Any) -> bytes:
    # Not by np.asarray: for a single bfloat16, TensorFlow returns no array.
    return np.array(x if isinstance(x, np.ndarray | np.generic) else x.numpy()).tobytes()


def run_program(mode: str, seed: int, memory: Memory) -> list[str]:
    """Run a program with and without sharing; return the differences."""
    runners = [_Runner(mode, seed) for _ in range(2)]
    wrong: list[str] = []
    held: list[list[Any]] = [[], []]
    for turn in range(3):
        source = values_of(runners[0].weights, seed + turn)
        shared = memory(source)
        results = []
        for k, runner in enumerate(runners):
            weights = runner.weights
            given = FlatWeights.wrap(shared if k else source.copy(), weights.layout)
            weights.set_weights(given, share=bool(k))
            # A copy-on-read variable is written in place, so it has memory of its own.
            may_copy = is_sparse(seed) and turn > 0
            if k and weights.unbound == {} and not (may_copy or all(weights.shared.values())):
                wrong.append(f"{mode} {seed}: not shared: {weights.shared}")
            outcome = runner.step()  # type: ignore[no-untyped-call]
            # Earlier results may refer to memory that no variable has any more.
            later = [] if mode == "session" else [x + tf.ones_like(x) for x in held[k]]
            held[k] = [] if mode == "session" else list(outcome)
            copies = [_bytes(x) for x in (*outcome, *later)]
            results.append((copies, weights.get_weights().buffer.tobytes()))
            del outcome, later
        if results[0] != results[1]:
            wrong.append(f"{mode} {seed}: results differ in turn {turn}")
        if shared.tobytes() != source.tobytes():
            wrong.append(f"{mode} {seed}: the memory was written to in turn {turn}")
    return wrong


def main() -> int:
    """Run the programs of the seeds that the command line gives; return the exit code."""
    first, last = map(int, sys.argv[1:])
    failures = []
    for seed in range(first, last):
        mode = MODES[seed % len(MODES)]
        print(mode, seed, flush=True)
        failures += run_program(mode, seed, protected)
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
