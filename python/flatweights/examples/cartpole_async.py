"""Asynchronous gradients on CartPole: each is applied as it arrives, and no actor waits.

The asynchronous advantage actor-critic of Mnih et al., "Asynchronous Methods for Deep
Reinforcement Learning", ICML 2016. Each worker plays some steps with the weights that it was sent,
and answers with one vector, the gradient of policy and critic. The driver takes a step of Adam on
the flat vector of weights with the gradient that arrives first, and publishes the new weights,
which that worker gets with its next call. Meanwhile the others compute with older ones: the
staleness of a gradient is the number of publications since the weights it was computed with.

    flatweights examples cartpole_async
    flatweights examples --plot returns.png cartpole_async --workers 4

Adam is `flatweights.server.Adam`, over the flat vector of weights. ``--save`` writes a moving
average of the weights. Which gradient arrives first depends on the machine, so no two runs are
alike: a mean return of 475 takes 150 to 1,500 updates.

For a task of your own, change `Worker`: `gradient` returns one gradient for each variable of the
object that `build` returns.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray

from flatweights.ray import FlatWorker, WorkerGroup
from flatweights.server import Adam, ExponentialMovingAverage

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
UPDATES = 3000
ENVIRONMENTS, STEPS = 16, 32  # for each actor; for each environment and gradient
DISCOUNT, DECAY, ENTROPY, MAX_NORM = 0.98, 0.95, 0.005, 0.5
LEARNING_RATE, SMOOTHING = 3e-3, 0.95


class Worker(FlatWorker):
    """Plays, and computes gradients from its steps."""

    def build(self, seed: int, rank: int) -> Any:
        """Build policy, critic and environments in this process."""
        import keras
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)  # the actors share the cores
        keras.utils.set_random_seed(seed)

        def network(outputs: int) -> Any:
            start, small = "orthogonal", keras.initializers.Orthogonal(0.01)
            hidden = [keras.layers.Dense(64, "tanh", kernel_initializer=start) for _ in range(2)]
            last = keras.layers.Dense(outputs, kernel_initializer=small)
            return keras.Sequential([keras.Input((OBSERVATIONS,)), *hidden, last])

        policy, critic = network(ACTIONS), network(1)
        trained = policy.trainable_weights + critic.trainable_weights

        def differentiate(states: Any, actions: Any, gains: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = policy(states)
                unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
                entropy = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(logits), logits)
                error = tf.square(critic(states)[:, 0] - targets)
                loss = tf.reduce_mean(unlikely * gains - ENTROPY * entropy + 0.5 * error)
            return tape.gradient(loss, trained)

        # Traced once: plain calls of the networks take ten times as long.
        self.policy, self.critic = tf.function(policy), tf.function(critic, reduce_retracing=True)
        self.differentiate = tf.function(differentiate, reduce_retracing=True)
        self.rng = np.random.default_rng([seed, rank])
        self.environments = RecordEpisodeStatistics(gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS))
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)
        return {"policy": policy, "critic": critic}

    def gradient(self) -> tuple[NDArray[Any], tuple[list[float], int]]:
        """Play; return the gradient with respect to all weights.

        With it come the returns of episodes that have ended, and the number of steps.
        """
        states, columns = [self.states], []
        for _ in range(STEPS):
            logits = self.policy(self.states).numpy()
            # The largest of logits with Gumbel noise is a sample of their softmax.
            actions = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
            counts = ~self.over  # an episode that is over is reset, and its action is ignored
            self.states, rewards, failed, cut, _ = self.environments.step(actions)
            self.over = failed | cut
            states.append(self.states)
            columns.append((actions, rewards.astype(np.float32), failed.copy(), self.over, counts))
        actions, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        before = np.stack(states)
        values = self.critic(before.reshape(-1, OBSERVATIONS)).numpy().reshape(before.shape[:2])
        # Generalised advantage estimates (Schulman et al., ICLR 2016). An episode that ran into the
        # limit of its length is valued as if it went on.
        errors = rewards + np.where(failed, 0.0, DISCOUNT) * values[1:] - values[:-1]
        gains, later = np.zeros(errors.shape, np.float32), np.zeros(ENVIRONMENTS)
        for t in reversed(range(STEPS)):
            later = errors[t] + np.where(over[t], 0.0, DISCOUNT * DECAY * later)
            gains[t] = later
        rows = (part[counts] for part in (before[:-1], actions, gains, gains + values[:-1]))
        flat = self.variables.flatten_gradients(self.differentiate(*rows), clip_norm=MAX_NORM)
        returns = [float(value) for value in self.environments.return_queue]
        self.environments.return_queue.clear()
        return flat, (returns, int(counts.sum()))


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if the goal is not reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="actors that play; default: %(default)s")
    add("--updates", type=int, default=UPDATES, help="updates, at most; default: %(default)s")
    add("--goal", type=float, default=475, help="mean return of 100 episodes; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the first weights and the episodes")
    add("--save", type=Path, help="file to write the weights to")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if min(options.workers, options.updates) < 1:
        parser.error(f"expected at least 1 worker and 1 update, got {vars(options)}")
    if options.save and (options.save.is_dir() or not options.save.absolute().parent.is_dir()):
        parser.error(f"--save: expected a file in a folder that exists, got {options.save}")
    ray.init(ignore_reinit_error=True, include_dashboard=False, logging_level="ERROR")
    group = WorkerGroup.create(
        Worker, options.workers, options.seed, arguments=lambda rank: (rank,), max_restarts=3
    )
    start = group.step("get_flat")[0]
    optimizer = Adam(start, learning_rate=LEARNING_RATE, beta2=0.99, epsilon=1e-5)
    smoothed = ExponentialMovingAverage(start, decay=SMOOTHING)
    group.publish(start)  # all begin with the same weights
    returns, steps, staleness = deque[float](maxlen=100), 0, list[int]()
    curve = list[tuple[float, float]]()
    is_reached = False
    for result in group.as_completed("gradient", updates=options.updates):
        (rank,) = result.used
        ended, count = result.extras[rank]
        staleness.append(result.staleness[rank])
        weights = optimizer.step(result.weights)
        smoothed.step(weights)
        group.publish(weights)
        steps += count
        returns.extend(ended)
        mean = float(np.mean(returns or [0.0]))
        curve.append((1e-3 * steps, mean))
        is_reached = len(returns) == 100 and mean >= options.goal
        if is_reached or len(curve) % 50 == 0:
            print(f"update {len(curve)}: {steps} steps, mean return {mean:.1f}", flush=True)
        if is_reached:
            break
    if options.save:
        group.broadcast(smoothed.weights)
        group.step("get_weights", ranks=[0])[0].save(options.save)
    group.shutdown()
    print(f"staleness: {np.mean(staleness):.2f} updates on average, {max(staleness)} at most")
    if not is_reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --updates")
    return {"return by thousand steps": {"": tuple(zip(*curve, strict=True))}}


if __name__ == "__main__":
    main()
