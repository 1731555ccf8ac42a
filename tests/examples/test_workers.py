"""The workers of some programs, within this process: no Ray."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from flatweights.examples import cartpole_async, cartpole_replay, keras_fit


@pytest.fixture(autouse=True)
def _tensorflow_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a worker would stay in force for the whole process."""
    import tensorflow as tf

    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", lambda count: None)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)


def test_plain_and_flat_workers_learn_the_same_from_their_parts() -> None:
    plain, flat = (kind(0, 8, 1) for kind in (keras_fit.Network, keras_fit.FlatNetwork))
    assert len(plain.digits[1]) == 180  # 1437 in 8 parts
    for worker in (plain, flat):
        worker.digits = tuple(array[:96] for array in worker.digits)
        worker.test = tuple(array[:96] for array in worker.test)
        worker.model.run_eagerly = True  # to trace takes longer than so few steps
        assert worker.evaluate() < 0.3
    assert plain.train() == pytest.approx(flat.train(), rel=1e-4)
    assert plain.evaluate() > 0.3
    flat.set_weights(flat.get_weights().copy())
    other = keras_fit.Network(1, 8, 0)
    other.set_weights(plain.get_weights())
    for own, expected in zip(other.get_weights(), flat.get_weights().values(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-2, atol=1e-3)


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Functions of TensorFlow run eagerly: to trace them takes longer than so few steps."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.usefixtures("eagerly")
def test_a_player_returns_a_clipped_gradient_and_counts_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cartpole_async, "STEPS", 16)
    worker = cartpole_async.Worker(0, 0)
    sizes = [np.prod(one.shape) for one in worker.get_weights().values()]
    rounds = cartpole_async.ENVIRONMENTS * cartpole_async.STEPS
    played, ended = 0, list[float]()
    for _ in range(3):
        gradient, (returns, steps) = worker.gradient()
        assert gradient.shape == (sum(sizes),)
        assert 0 < np.linalg.norm(gradient) <= cartpole_async.MAX_NORM * (1 + 1e-5)
        played, ended = played + steps, ended + returns
        assert steps <= rounds
    # An episode gets a reward of 1 for each step; after it, one step resets the environment.
    assert sum(ended) <= played
    assert 3 * rounds - played - len(ended) + cartpole_async.ENVIRONMENTS >= 0
    assert 3 * rounds - played <= len(ended)


def test_a_replay_holds_the_newest_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cartpole_replay, "CAPACITY", 10)
    replay, newest = cartpole_replay.Replay(), deque[int](maxlen=10)
    rng = np.random.default_rng(0)
    for count in (3, 4, 5, 1, 7):
        numbers = np.arange(replay.added, replay.added + count)
        states = np.repeat(numbers, 4).reshape(-1, 4).astype(np.float32)
        replay.add((states, numbers, numbers, states + 1, numbers % 2 == 0))
        newest.extend(numbers.tolist())
        before, actions, rewards, after, failed = replay.sample(rng)
        assert {*actions.tolist()} == {*newest}
        np.testing.assert_array_equal(rewards, actions)
        np.testing.assert_array_equal(before[:, 0], actions)
        np.testing.assert_array_equal(after, before + 1)
        np.testing.assert_array_equal(failed, actions % 2 == 0)
