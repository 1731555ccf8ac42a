"""TensorFlow variables to one vector and back, eagerly and in a session.

``python -m bench.bench_variables [--quick] [--json FILE] [--plot FILE]``

Ray's own class comes with ``ray[rllib]`` (the extra ``bench``).
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from bench import machine, models, peers, runner
from flatweights.tensorflow import TensorFlowVariables

tf1 = tf.compat.v1

Contenders = dict[str, Callable[[], Any]]

_SMALL = 10_000_000  # bytes of a model that fits the caches


@contextmanager
def _by_operations() -> Iterator[None]:
    """Force the path without bound variables on objects that are constructed in the body."""
    before = os.environ.get("FLATWEIGHTS_TENSORFLOW")
    os.environ["FLATWEIGHTS_TENSORFLOW"] = "ops"
    try:
        yield
    finally:
        os.environ.pop("FLATWEIGHTS_TENSORFLOW")
        if before is not None:
            os.environ["FLATWEIGHTS_TENSORFLOW"] = before


class Subject:
    """One model's variables, and all ways to move them.

    Attributes:
        mode: "eager" or "session".
        ours: Our class, bound.
        flat: Values for all variables.
    """

    def __init__(self, shapes: models.Shapes, session: Any = None) -> None:
        """Make the variables; in the graph of ``session`` if there is one."""
        values = models.random_parts(shapes)
        self._session = session
        self.mode = "eager" if session is None else "session"
        if session is None:
            self._variables = [tf.Variable(v, name=f"v{i}") for i, v in enumerate(values)]
        else:
            # Values are fed: as constants they would make the graph too large.
            self._variables = [
                tf1.get_variable(f"v{i}", shape, initializer=tf1.zeros_initializer())
                for i, shape in enumerate(shapes)
            ]
            session.run(tf1.global_variables_initializer())
        self.ours = TensorFlowVariables(self._variables, session)
        assert not self.ours.unbound, self.ours.unbound
        with _by_operations():
            self._ops = TensorFlowVariables(self._variables, session)
        self._ray = peers.ray_variables(self._variables, session)
        self._keras = peers.KerasHolder(shapes) if session is None else None
        self.flat = np.concatenate([value.ravel() for value in values])
        self.ours.set_flat(self.flat)
        if session is None:
            self._concat, self._split = peers.tensorflow_functions(self._variables)

    def getters(self) -> Contenders:
        """Return all ways to read the variables into one vector."""
        out, copy = np.zeros_like(self.flat), self.flat.copy()

        def memcpy() -> Any:
            np.copyto(copy, self.flat)
            return copy

        found: Contenders = {
            runner.OURS: lambda: self.ours.get_flat(out),
            f"{runner.OURS}, fresh result": lambda: self.ours.get_flat(),
            f"{runner.OURS}, by operations": lambda: self._ops.get_flat(out),
            "one memcpy of the bytes": memcpy,
            "Ray's class": self._ray.get_flat,
        }
        if self._session is None:
            found["tf.function of tf.concat"] = lambda: np.asarray(self._concat())
        return found

    def setters(self) -> Contenders:
        """Return all ways to write the variables from one vector."""
        copy = self.flat.copy()
        found: Contenders = {
            runner.OURS: lambda: self.ours.set_flat(self.flat),
            f"{runner.OURS}, by operations": lambda: self._ops.set_flat(self.flat),
            "one memcpy of the bytes": lambda: np.copyto(copy, self.flat),
            "Ray's class": lambda: self._ray.set_flat(self.flat),
        }
        if self._session is None:
            found["tf.function of tf.split, assign"] = lambda: self._split(self.flat)
        for name, call in found.items():
            self.ours.set_flat(np.zeros_like(self.flat))
            call()
            wrong = "memcpy" not in name and not np.array_equal(self.ours.get_flat(), self.flat)
            assert not wrong, f"{name} sets other values"
        return found

    def named_getters(self) -> Contenders:
        """Return all ways to read the variables by name or as a list."""
        found: Contenders = {
            runner.OURS: self.ours.get_weights,
            # In eager mode Ray's class returns the variables themselves.
            "Ray's class": lambda: {k: np.asarray(v) for k, v in self._ray.get_weights().items()},
        }
        if self._keras is not None:
            found["Keras get_weights"] = self._keras.get_weights
        return found

    def named_setters(self) -> Contenders:
        """Return all ways to write the variables by name or as a list."""
        weights = self.ours.get_weights()
        theirs = {k: np.asarray(v) for k, v in self._ray.get_weights().items()}
        found: Contenders = {
            runner.OURS: lambda: self.ours.set_weights(weights),
            f"{runner.OURS}, from a dict": lambda: self.ours.set_weights(dict(weights)),
            "Ray's class": lambda: self._ray.set_weights(theirs),
        }
        if self._keras is not None:
            found["Keras set_weights"] = partial(self._keras.set_weights, list(weights.values()))
        return found

    def adders(self) -> Contenders:
        """Return all ways to add a scaled vector to the variables."""
        delta, buffer = self.flat * np.float32(1e-6), np.empty_like(self.flat)

        def get_add_set() -> None:
            self.ours.get_flat(buffer)
            buffer[:] += np.float32(0.5) * delta
            self.ours.set_flat(buffer)

        found: Contenders = {
            runner.OURS: lambda: self.ours.add_flat(delta, 0.5),
            f"{runner.OURS}, get, NumPy, set": get_add_set,
        }
        if self._session is None:
            steps = [v.numpy() * np.float32(1e-6) for v in self._variables]

            def assign_add() -> None:
                for variable, step in zip(self._variables, steps, strict=True):
                    variable.assign_add(0.5 * step)

            found["assign_add of each"] = assign_add
        return found

    def flatteners(self) -> Contenders:
        """Return all ways to make a vector of the gradients of eager variables."""
        gradients = [variable + 0 for variable in self._variables]
        out = np.empty_like(self.flat)
        return {
            runner.OURS: lambda: self.ours.flatten_gradients(gradients, out=out),
            "np.concatenate of each": lambda: np.concatenate(
                [gradient.numpy().ravel() for gradient in gradients], out=out
            ),
            "tf.concat of each": lambda: np.asarray(
                tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], axis=0)
            ),
        }


def run_model(name: str, shapes: models.Shapes, mode: str, budget: float) -> list[runner.Row]:
    """Return the rows of one model in one mode."""
    if mode == "eager":
        return _run_subject(name, Subject(shapes), budget)
    # Ray's class wants its graph to be the default one throughout.
    with tf.Graph().as_default(), tf1.Session() as session:
        return _run_subject(name, Subject(shapes, session), budget)


def _run_subject(name: str, subject: Subject, budget: float) -> list[runner.Row]:
    flat: NDArray[Any] = subject.flat
    mode = subject.mode
    rows = runner.time_case(
        f"get_flat {name} {mode}",
        subject.getters(),
        nbytes=2 * flat.nbytes,
        oracle=flat.astype(np.float64),
        tolerance=0,
        budget=budget,
    )
    for what, contenders, times in (
        ("set_flat", subject.setters(), 2),
        ("get_weights", subject.named_getters(), 2),
        ("set_weights", subject.named_setters(), 2),
        ("add_flat", subject.adders(), 3),
    ):
        rows += runner.time_case(
            f"{what} {name} {mode}", contenders, nbytes=times * flat.nbytes, budget=budget
        )
    cold = [("get_flat", subject.getters()), ("set_flat", subject.setters())]
    if mode == "eager":
        flatteners = subject.flatteners()
        case = f"flatten_gradients {name} {mode}"
        rows += runner.time_case(
            case, flatteners, nbytes=2 * flat.nbytes, oracle=flat, tolerance=0, budget=budget
        )
        cold.append(("flatten_gradients", flatteners))
    if flat.nbytes <= _SMALL:  # larger ones leave the caches cold by themselves
        for what, contenders in cold:
            rows += runner.time_case(
                f"{what} {name} {mode}",
                contenders,
                nbytes=2 * flat.nbytes,
                budget=budget,
                cold=True,
            )
    return rows


def costs(budget: float) -> list[runner.Row]:
    """Return rows for one variable of one element, and for a thousand more."""
    rows = []
    for count in (1, 1001):
        subject = Subject([(1,)] * count)
        for what, contenders in (("get_flat", subject.getters()), ("set_flat", subject.setters())):
            case = f"{what}, variables of one element: {count}"
            rows += runner.time_case(case, contenders, nbytes=8 * count, budget=budget)
    return rows


def many(budget: float) -> list[runner.Row]:
    """Return rows of many small variables, as of ensembles and embeddings."""
    rows = []
    for count in (100, 1_000, 10_000):
        made = [tf.Variable(tf.zeros(10)) for _ in range(count)]
        ours = TensorFlowVariables(made)
        flat = np.random.default_rng(0).random(ours.get_flat_size(), np.float32)
        out = np.empty_like(flat)
        calls: dict[str, Callable[[], Any]] = {
            "bind": partial(_bind, made),
            "get_flat": partial(ours.get_flat, out),
            "set_flat": partial(ours.set_flat, flat),
        }
        for what, call in calls.items():
            case = f"{what} {count:,} variables of 40 bytes, eager"
            rows += runner.time_case(case, {runner.OURS: call}, nbytes=80 * count, budget=budget)
    return rows


def _bind(variables: list[Any]) -> None:
    TensorFlowVariables(variables).get_flat()


def costs_text(rows: list[runner.Row]) -> str:
    """Return, from the rows of `costs`, the cost of a call and of each further variable."""
    found = {(row.case, row.contender): row.seconds for row in rows}
    lines = ["cost of a call, and of each variable:"]
    for what in ("get_flat", "set_flat"):
        for contender in dict.fromkeys(row.contender for row in rows if row.case.startswith(what)):
            one, many = (
                found[f"{what}, variables of one element: {n}", contender] for n in (1, 1001)
            )
            per = (many - one) / 1000
            lines.append(f"  {what}  {contender}: {one * 1e6:.2f} µs + {per * 1e9:.0f} ns")
    return "\n".join(lines)


def run(options: Namespace) -> None:
    """Run the bench."""
    shapes: dict[str, models.Shapes] = {
        "policy": models.POLICY,
        "resnet20": models.resnet20(),
        "resnet50": models.resnet50(),
        "transformer": models.transformer(),
    }
    budget = 0.3 if options.quick else 1.5
    if options.quick:
        del shapes["resnet20"], shapes["transformer"]
    rows = []
    for name, model in shapes.items():
        for mode in ("eager",) if options.quick else ("eager", "session"):
            rows += run_model(name, model, mode, budget)
    if not options.quick:
        rows += many(budget)
    per_variable = [] if options.quick else costs(budget)
    runner.report("variables", rows + per_variable, machine.limits(rounds=3), options)
    if per_variable:
        print(costs_text(per_variable))


if __name__ == "__main__":
    run(runner.arguments(__doc__ or ""))
