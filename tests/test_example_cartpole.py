"""The programs on CartPole learn, judged by a cart, a pole and a policy in NumPy."""

import re
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray
from reference import run_example
from safetensors.numpy import load_file
from scipy.stats import rankdata

from flatweights.examples._cartpole import Environments, History, Rollout, advantages
from flatweights.examples.cartpole_evolution import LEARNING_RATE, SIGMA, Trial, steps_of

PROGRAMS = ("cartpole_policy_gradient", "cartpole_evolution", "cartpole_async")
GOAL = 150  # a policy without training gets 10 to 30
LAYERS = ("dense", "dense_1", "dense_2")

Arrays = dict[str, NDArray[Any]]


class Run(NamedTuple):
    """A program that has ended, and the policy that it saved."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def policy(self) -> Arrays:
        found = load_file(self.folder / "policy.safetensors")
        return {name.removeprefix("policy/"): array for name, array in found.items()}


def run_program(program: str, folder: Path, *options: str) -> Run:
    return Run(run_example(program, "--save=policy.safetensors", *options, cwd=folder), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Each program, two at a time: starting TensorFlow takes most of it."""
    options = (f"--goal={GOAL}", "--plot=returns.png")
    with ThreadPoolExecutor(2) as pool:
        yield {
            program: pool.submit(run_program, program, tmp_path_factory.mktemp(program), *options)
            for program in PROGRAMS
        }


def mean_return(policy: Arrays, episodes: int, seed: int) -> float:
    """What ``policy`` gets on average, with the likeliest actions."""
    environment = gymnasium.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        state, _ = environment.reset(seed=seed + episode)
        over = False
        while not over:
            hidden = state
            for layer in LAYERS:
                out = hidden @ policy[f"{layer}/kernel"] + policy[f"{layer}/bias"]
                hidden = np.tanh(out)
            state, reward, failed, cut, _ = environment.step(int(np.argmax(out)))
            total += float(reward)
            over = failed or cut
    return total / episodes


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_learns_to_keep_the_pole_up(runs: dict[str, Future[Run]], program: str) -> None:
    run = runs[program].result()
    assert run.done.returncode == 0, run.done.stderr
    assert mean_return(run.policy, 20, seed=1000) > 100
    assert (run.folder / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_players_share_the_memory_of_the_weights(runs: dict[str, Future[Run]]) -> None:
    assert "6 of 6" in runs["cartpole_policy_gradient"].result().done.stdout


def test_players_that_exchange_no_weights_end_with_the_same(runs: dict[str, Future[Run]]) -> None:
    run = runs["cartpole_evolution"].result()
    parts = [run.policy[f"{layer}/{part}"] for layer in LAYERS for part in ("kernel", "bias")]
    digest = sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert f"alike in driver and 2 players: {digest}" in run.done.stdout


def test_staleness_is_that_of_two_workers(runs: dict[str, Future[Run]]) -> None:
    run = runs["cartpole_async"].result()
    titles, _, row = run.done.stdout.strip().splitlines()[-3:]
    cells = dict(zip(*(re.split(r"\s{2,}", line.strip()) for line in (titles, row)), strict=True))
    # Between two gradients of one worker there is about one of the other.
    assert 0.5 < float(cells["staleness, mean"]) <= float(cells["most"])


def test_a_goal_that_is_not_reached_fails(capsys: pytest.CaptureFixture[str]) -> None:
    history = History(Namespace(updates=2, goal=100, plot=None), every=1)
    history.add([500.0] * 99, 49_500)
    assert not history.done  # fewer than a hundred episodes
    history.add([0.0] * 81, 81)
    assert history.done
    with pytest.raises(SystemExit, match=r"mean return 95\.0, not 100: it needs more --updates"):
        history.report("", np.full(2, 7.0), {})
    assert "49,581" in capsys.readouterr().out


def test_the_last_hundred_episodes_reach_a_goal() -> None:
    history = History(Namespace(updates=9, goal=100, plot=None), every=10)
    history.add([0.0] * 500, 0)
    assert not history.done
    history.add([100.0] * 100, 10_000)
    assert history.done


def test_a_goal_out_of_reach_is_refused(tmp_path: Path) -> None:
    done = run_example("cartpole_evolution", "--goal=501", cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --goal: expected an integer from 1 to 500, got '501'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_reaches_400(program: str, seed: int, tmp_path: Path) -> None:
    run = run_program(program, tmp_path, f"--seed={seed}")
    assert run.done.returncode == 0, run.done.stderr
    assert mean_return(run.policy, 100, seed=1000) > 400


@pytest.mark.slow
@pytest.mark.parametrize("program", ["cartpole_policy_gradient", "cartpole_evolution"])
def test_a_seed_fixes_the_weights(program: str, tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run = run_program(program, tmp_path / name, "--goal=50")
        assert run.done.returncode == 0, run.done.stderr
        found.append({name: array.tobytes() for name, array in run.policy.items()})
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Steps of a policy that often fails: far more episodes than environments."""
    return Environments(5, [3, 1]).rollout(undecided, 200)


def undecided(states: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.zeros((len(states), 2), np.float32)


def test_a_rollout_is_of_whole_episodes(rollout: Rollout) -> None:
    lengths = []
    for column in range(5):
        length = 0
        for t in range(200):
            # After an episode the environment is reset, which is no step.
            assert rollout.counts[t, column] == (t == 0 or not rollout.over[t - 1, column])
            length += int(rollout.counts[t, column])
            if rollout.over[t, column]:
                lengths.append(length)
                length = 0
    assert sorted(rollout.returns) == sorted(lengths)
    assert 10 < np.mean(lengths) < 40
    assert rollout.steps == np.sum(rollout.rewards)


def test_a_rollout_goes_on_where_the_last_one_stopped(rollout: Rollout) -> None:
    environments = Environments(5, [3, 1])
    parts = [environments.rollout(undecided, steps) for steps in (120, 80)]
    np.testing.assert_array_equal(parts[0].observations[-1], parts[1].observations[0])
    for name in ("actions", "rewards", "failed", "over", "counts"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(rollout, name))
    assert parts[0].returns + parts[1].returns == rollout.returns


def test_ranks_of_a_worker_play_episodes_of_their_own(rollout: Rollout) -> None:
    other = Environments(5, [3, 2]).rollout(undecided, 200)
    assert not np.any(np.all(other.observations[0] == rollout.observations[0], axis=1))


def test_advantages_are_sums_of_errors(rng: np.random.Generator) -> None:
    steps, count, discount, decay = 12, 3, 0.9, 0.7
    failed = rng.random((steps, count)) < 0.2
    over = failed | (rng.random((steps, count)) < 0.2)
    rewards = rng.normal(size=(steps, count)).astype("f")
    values = rng.normal(size=(steps + 1, count)).astype("f")
    rollout = Rollout(None, None, rewards, failed, over, None, [])
    expected = np.zeros((steps, count))
    for column in range(count):
        for begin in range(steps):
            for t in range(begin, steps):
                later = 0.0 if failed[t, column] else discount * values[t + 1, column]
                error = rewards[t, column] + later - values[t, column]
                expected[begin, column] += (discount * decay) ** (t - begin) * error
                if over[t, column]:
                    break
    found = advantages(rollout, values, discount, decay)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_is_that_of_the_ranks(rng: np.random.Generator) -> None:
    returns = rng.permutation(12).reshape(6, 2) * 10.0
    trials = [Trial(place, *pair) for place, pair in enumerate(returns.tolist())]
    ranks = (rankdata(returns) - 1).reshape(6, 2) / 11 - 0.5
    expected = LEARNING_RATE * (ranks[:, 0] - ranks[:, 1]) / (12 * SIGMA)
    places, scales = zip(*steps_of(trials), strict=True)
    assert places == tuple(range(6))
    np.testing.assert_allclose(scales, expected)
