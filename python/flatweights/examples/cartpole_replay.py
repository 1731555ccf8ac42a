"""Deep Q-learning on CartPole: actors play with the newest weights, a learner replays.

Double DQN (van Hasselt, Guez and Silver, "Deep Reinforcement Learning with Double Q-learning", AAAI
2016). Each actor plays all the time and answers with the transitions that it saw; before each step
it asks for the newest weights, which costs less than a microsecond if there are none. The learner
keeps transitions in a replay buffer, trains on random ones, and publishes its weights after each
step: it waits for no actor, and an actor that is slow, stopped or dead costs it nothing.

    flatweights examples cartpole_replay
    flatweights examples --plot returns.png cartpole_replay --actors 4

An actor raises if nothing has been published for ten minutes, so none goes on playing after the
learner has died. The transitions that the learner gets depend on the machine, so no two runs are
alike.

For a task of your own, change `build` and `Actor.play`: the learner publishes a network, and actors
subscribe with a network of their own.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray

from flatweights.ray import Publisher, Subscriber
from flatweights.tensorflow import TensorFlowVariables

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
ENVIRONMENTS, STEPS = 8, 32  # for each actor; for each environment and call
DISCOUNT, LEARNING_RATE, BATCH = 0.99, 1e-3, 128
CAPACITY, FIRST = 50_000, 1_000  # transitions that the replay holds; needs before training
TRAININGS = 32  # steps of the learner for each answer of an actor
TRACK = 0.01  # fraction of the way to the network that the target network moves per step
EXPLORE, LEAST, DECAY = 1.0, 0.02, 8_000  # share of random actions: first, last; steps of its fall

Columns = tuple[NDArray[Any], ...]
"""States, actions, rewards, next states, and whether the episode has failed there."""


def build() -> Any:
    """Build the network: from a state, the value of each action."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # all processes share the cores
    hidden = [keras.layers.Dense(64, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((OBSERVATIONS,)), *hidden, keras.layers.Dense(ACTIONS)])


class Actor:
    """Plays with the newest weights."""

    def __init__(self, seed: int, rank: int) -> None:
        """Build network and environments, and find the learner."""
        import tensorflow as tf

        network = build()
        self.network = tf.function(network)  # plain calls take ten times as long
        self.subscriber = Subscriber(
            "cartpole_replay", TensorFlowVariables(network), timeout=600, max_age=600
        )
        self.rng = np.random.default_rng([seed, rank])
        self.environments = RecordEpisodeStatistics(gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS))
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)

    def play(self, explore: float) -> tuple[Columns, list[float], int]:
        """Play some steps; return transitions, returns of episodes and the number of updates."""
        rows, updates = [], 0
        for _ in range(STEPS):
            updates += self.subscriber.update()
            best = np.argmax(self.network(self.states), axis=1)
            random = self.rng.random(ENVIRONMENTS) < explore
            actions = np.where(random, self.rng.integers(ACTIONS, size=ENVIRONMENTS), best)
            counts = ~self.over  # an episode that is over is reset, and its action is ignored
            before = self.states
            self.states, rewards, failed, cut, _ = self.environments.step(actions)
            self.over = failed | cut
            row = (before, actions, rewards.astype(np.float32), self.states, failed)
            rows.append([column[counts] for column in row])
        returns = [float(value) for value in self.environments.return_queue]
        self.environments.return_queue.clear()
        return tuple(map(np.concatenate, zip(*rows, strict=True))), returns, updates


class Replay:
    """The newest transitions, in a ring.

    Attributes:
        added: The number of transitions added so far.
    """

    def __init__(self) -> None:
        """Allocate the ring."""
        states = np.zeros((CAPACITY, OBSERVATIONS), np.float32)
        numbers = np.zeros(CAPACITY, np.int64), np.zeros(CAPACITY, np.float32)
        self.columns: Columns = (states, *numbers, states.copy(), np.zeros(CAPACITY, np.bool_))
        self.added = 0

    def add(self, rows: Columns) -> None:
        """Add transitions in place of the oldest."""
        at = np.arange(self.added, self.added + len(rows[0])) % CAPACITY
        for column, row in zip(self.columns, rows, strict=True):
            column[at] = row
        self.added += len(at)

    def sample(self, rng: np.random.Generator) -> list[NDArray[Any]]:
        """Return random transitions."""
        at = rng.integers(min(self.added, CAPACITY), size=BATCH)
        return [column[at] for column in self.columns]


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if the goal is not reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--actors", type=int, default=2, help="actors that play; default: %(default)s")
    add("--answers", type=int, default=1500, help="answers, at most; default: %(default)s")
    add("--goal", type=float, default=400, help="mean return of 50 episodes; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the first weights and the episodes")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.actors, options.answers) < 1:
        parser.error(f"expected at least 1 actor and 1 answer, got {vars(options)}")
    import keras
    import tensorflow as tf

    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    keras.utils.set_random_seed(options.seed)
    network, target = build(), build()
    trained, tracked = TensorFlowVariables(network), TensorFlowVariables(target)
    tracked.set_flat(trained.get_flat())
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(network.trainable_variables)

    def step(states: Any, actions: Any, rewards: Any, after: Any, failed: Any) -> None:
        best = tf.argmax(network(after), axis=1)
        values = tf.gather(target(after), best, batch_dims=1)
        goals = rewards + DISCOUNT * tf.where(failed, 0.0, values)
        with tf.GradientTape() as tape:
            errors = tf.gather(network(states), actions, batch_dims=1) - goals
            loss = tf.reduce_mean(tf.where(abs(errors) < 1, errors**2 / 2, abs(errors) - 0.5))
        optimizer.apply(tape.gradient(loss, network.trainable_variables))

    train = tf.function(step)
    rng, replay, returns = np.random.default_rng(options.seed), Replay(), deque[float](maxlen=50)
    actor: Any = ray.remote(num_cpus=0)(Actor)
    curve, steps, updates, is_reached = list[tuple[float, float]](), 0, 0, False
    with Publisher("cartpole_replay", trained) as publisher:
        publisher.publish()
        actors = [actor.remote(options.seed, rank) for rank in range(options.actors)]
        running = {one.play.remote(EXPLORE): one for one in actors}
        while not is_reached and len(curve) < options.answers:
            (first,), _ = ray.wait(list(running))
            one = running.pop(first)
            rows, ended, count = ray.get(first)
            explore = max(LEAST, EXPLORE - replay.added / DECAY)
            running[one.play.remote(explore)] = one  # it plays on while this process trains
            replay.add(rows)
            updates += count
            returns.extend(ended)
            for _ in range(TRAININGS if replay.added >= FIRST else 0):
                train(*replay.sample(rng))
                tracked.lerp_flat(trained.get_flat(), TRACK)
                publisher.publish()
                steps += 1
            mean = float(np.mean(returns or [0.0]))
            curve.append((1e-3 * replay.added, mean))
            is_reached = len(returns) == returns.maxlen and mean >= options.goal
            if is_reached or len(curve) % 50 == 0:
                print(
                    f"{replay.added} transitions, {steps} steps, mean return {mean:.1f}", flush=True
                )
        ray.get(list(running))
        for one in actors:
            ray.kill(one)
    print(f"{steps + 1} versions published, {updates} times an actor took a newer one")
    if not is_reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --answers")
    return {"return by thousand transitions": {"": tuple(zip(*curve, strict=True))}}


if __name__ == "__main__":
    main()
