"""The parts of the programs on CartPole, against loops in NumPy; no TensorFlow, no Ray."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from flatweights.examples.cartpole_evolution import LEARNING_RATE, SIGMA, Trial, steps_of
from flatweights.examples.cartpole_policy_gradient import (
    DISCOUNT,
    ENVIRONMENTS,
    STEPS,
    Player,
    Rollout,
)


def undecided(states: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.zeros((len(states), 2), np.float32)


def player(rank: int) -> Player:
    """A player without a network: it often fails, so there are more episodes than environments."""
    made: Player = object.__new__(Player)
    made.policy = undecided
    made.start_environments([3, rank])
    return made


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    one = player(1)
    return [one.play() for _ in range(3)]


def test_a_rollout_is_of_whole_episodes_and_goes_on_where_the_last_one_stopped(
    rollouts: list[Rollout],
) -> None:
    for before, after in itertools.pairwise(rollouts):
        np.testing.assert_array_equal(before.states[-1], after.states[0])
    over = np.concatenate([rollout.over for rollout in rollouts])
    counts = np.concatenate([rollout.counts for rollout in rollouts])
    lengths = []
    for column in range(ENVIRONMENTS):
        length = 0
        for t in range(3 * STEPS):
            # After an episode the environment is reset, which is no step.
            assert counts[t, column] == (t == 0 or not over[t - 1, column])
            length += int(counts[t, column])
            if over[t, column]:
                lengths.append(length)
                length = 0
    assert sorted(one for rollout in rollouts for one in rollout.returns) == sorted(lengths)
    assert 10 < np.mean(lengths) < 40
    assert sum(np.sum(rollout.rewards) for rollout in rollouts) == counts.sum()


def test_ranks_play_episodes_of_their_own(rollouts: list[Rollout]) -> None:
    other = player(2).play()
    assert not np.any(np.all(other.states[0] == rollouts[0].states[0], axis=1))


def test_advantages_are_sums_of_errors(rng: np.random.Generator) -> None:
    steps, count, decay = 12, 3, 0.9
    failed = rng.random((steps, count)) < 0.2
    over = failed | (rng.random((steps, count)) < 0.2)
    rewards = rng.normal(size=(steps, count)).astype("f")
    values = rng.normal(size=(steps + 1, count)).astype("f")
    expected = np.zeros((steps, count))
    for column in range(count):
        for begin in range(steps):
            for t in range(begin, steps):
                later = 0.0 if failed[t, column] else DISCOUNT * values[t + 1, column]
                error = rewards[t, column] + later - values[t, column]
                expected[begin, column] += (DISCOUNT * decay) ** (t - begin) * error
                if over[t, column]:
                    break
    rollout = Rollout(None, None, rewards, failed, over, None, [])  # type: ignore[arg-type]
    advantages = rollout.advantages(values, decay)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)


def test_resets_give_no_rows_to_learn_from(rollouts: list[Rollout]) -> None:
    def speed(states: NDArray[np.float32]) -> NDArray[np.float32]:
        return states[:, 1:2]

    rollout = rollouts[0]
    counts = rollout.counts
    assert not counts.all()
    states, actions, advantages, targets = rollout.rows(speed, 0.9)
    np.testing.assert_array_equal(states, rollout.states[:-1][counts])
    np.testing.assert_array_equal(actions, rollout.actions[counts])
    expected = rollout.advantages(rollout.states[..., 1], 0.9)[counts]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(targets, advantages + states[:, 1], rtol=1e-6)


def test_a_step_is_that_of_the_ranks(rng: np.random.Generator) -> None:
    order = rng.permutation(12).reshape(6, 2)
    trials = [Trial(place, *pair) for place, pair in enumerate((order * 10.0).tolist())]
    ranks = order / 11 - 0.5
    expected = LEARNING_RATE * (ranks[:, 0] - ranks[:, 1]) / (12 * SIGMA)
    places, scales = zip(*steps_of(trials), strict=True)
    assert places == tuple(range(6))
    np.testing.assert_allclose(scales, expected)
