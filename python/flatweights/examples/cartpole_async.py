"""Asynchronous gradients on CartPole: each is applied as it arrives, and no actor waits.

The asynchronous advantage actor-critic of Mnih et al., "Asynchronous Methods for Deep
Reinforcement Learning", ICML 2016. Each worker plays some steps with the weights that the driver
sent it, and answers with one vector, the gradient of policy and critic. The driver takes a step of
Adam on the flat vector of weights with the gradient that arrives first, and sends the
new weights to that worker alone. Meanwhile the others compute with older ones: the staleness of a
gradient is the number of steps between the sending of its weights and its arrival.

    python -m flatweights.examples.cartpole_async
    python -m flatweights.examples.cartpole_async --workers 4 --plot returns.png

Adam is `flatweights.server.FedAdam`, which steps towards a model: here, towards the one that a
plain step against the gradient leads to. ``--save`` writes a moving average of the weights. Which
gradient arrives first depends on the machine, so no two runs are alike: a mean return of 475 takes
150 to 1,500 updates.

For a task of your own, change `Worker`: `gradient` returns one gradient for each variable of what
`build` returns. The exchange that is timed is that with one worker.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup
from flatweights.server import ExponentialMovingAverage, FedAdam

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
GOAL = 475  # the mean return that counts as solved; 500 is the maximum
EPISODES = 100  # that the mean is taken over, the last ones
ENVIRONMENTS, STEPS = 16, 32  # of each worker, and of each environment per gradient
DISCOUNT, DECAY = 0.98, 0.95
ENTROPY, MAX_NORM = 0.005, 0.5  # the weight of the policy's entropy; the longest gradient
LEARNING_RATE, SMOOTHING = 3e-3, 0.95

Function = Callable[[NDArray[Any]], NDArray[Any]]


def build_network(outputs: int, seed: int) -> tuple[Any, Function]:
    """Return a network whose last layer starts near zero, and the same as a function of arrays.

    The function is traced once; a plain call of the network takes ten times as long.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, "tanh", kernel_initializer="orthogonal") for _ in range(2)]
    last = keras.layers.Dense(outputs, kernel_initializer=keras.initializers.Orthogonal(0.01))
    network = keras.Sequential([keras.Input((OBSERVATIONS,)), *hidden, last])
    call = tf.function(network).get_concrete_function(tf.TensorSpec([None, OBSERVATIONS]))
    return network, lambda states: np.asarray(call(tf.constant(states)))


class Worker(FlatWorker):
    """Plays, and computes gradients from its steps."""

    def build(self, seed: int, rank: int) -> Any:
        """Build policy, critic and environments in this process."""
        examples.prepare_tensorflow()
        import tensorflow as tf

        policy, self.policy = build_network(ACTIONS, seed)
        critic, self.value = build_network(1, seed + 1)
        trained = policy.trainable_weights + critic.trainable_weights

        def differentiate(states: Any, actions: Any, gains: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = policy(states)
                unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
                entropy = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(logits), logits)
                error = tf.square(critic(states)[:, 0] - targets)
                loss = tf.reduce_mean(unlikely * gains - ENTROPY * entropy + 0.5 * error)
            return tape.gradient(loss, trained)

        self.differentiate = tf.function(differentiate, reduce_retracing=True)
        self.rng = np.random.default_rng([seed, rank])
        self.environments = RecordEpisodeStatistics(gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS))
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)
        return {"policy": policy, "critic": critic}

    def gradient(
        self, weights: NDArray[Any], version: int
    ) -> tuple[NDArray[Any], int, list[float], int]:
        """Play with ``weights``; return the gradient with respect to all of them.

        With it come the version of the weights, returns of episodes, and the number of steps.
        """
        self.set_flat(weights)
        states, columns = [self.states], []
        for _ in range(STEPS):
            logits = self.policy(self.states)
            # The largest of logits with Gumbel noise is a sample of their softmax.
            actions = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
            counts = ~self.over  # an episode that is over is reset, and its action is ignored
            self.states, rewards, failed, cut, _ = self.environments.step(actions)
            self.over = failed | cut
            states.append(self.states)
            columns.append((actions, rewards, failed.copy(), self.over, counts))
        returns = [float(value) for value in self.environments.return_queue]
        self.environments.return_queue.clear()
        seen = np.stack(states)
        actions, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        values = self.value(seen.reshape(-1, OBSERVATIONS)).reshape(seen.shape[:2])
        gains = advantages(rewards, failed, over, values)
        rows = seen[:-1], actions, gains, gains + values[:-1]
        gradients = self.differentiate(*(column[counts] for column in rows))
        flat = self.variables.flatten_gradients(gradients, clip_norm=MAX_NORM)
        return flat, version, returns, int(counts.sum())


def advantages(
    rewards: NDArray[Any], failed: NDArray[Any], over: NDArray[Any], values: NDArray[Any]
) -> NDArray[np.float32]:
    """Return the generalised advantage estimates of all steps (Schulman et al., ICLR 2016).

    By step and environment; ``values`` have one row more than there are steps. An episode that is
    ``over`` but has not ``failed`` ran into the limit of its length: it is valued as if it went on.
    """
    errors = rewards + np.where(failed, 0.0, DISCOUNT) * values[1:] - values[:-1]
    result, later = np.zeros(errors.shape, np.float32), np.zeros(errors.shape[1])
    for t in reversed(range(len(errors))):
        later = errors[t] + np.where(over[t], 0.0, DISCOUNT * DECAY * later)
        result[t] = later
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the goal is not reached."""
    parser = examples.make_parser(
        __doc__,
        "the returns",
        workers=(2, "actors that play"),
        updates=(3000, "at most"),
        goal=(GOAL, f"mean return of {EPISODES} episodes to stop at"),
    )
    parser.add_argument("--save", type=examples.output_file, help="a file for the weights")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    actor: Any = ray.remote(Worker)
    workers = [actor.remote(options.seed, rank) for rank in range(options.workers)]
    start = ray.get(workers[0].get_flat.remote())
    optimizer = FedAdam(start, learning_rate=LEARNING_RATE, tau=1e-5)
    smoothed = ExponentialMovingAverage(start, decay=SMOOTHING)
    ray.get([worker.ping.remote() for worker in workers])  # all begin together
    returns: list[float] = []
    curve: list[tuple[float, float]] = []
    staleness: list[int] = []
    steps, mean, reached = 0, 0.0, False
    running = {worker.gradient.remote(optimizer.weights, 0): worker for worker in workers}
    while not reached and len(curve) < options.updates:
        (first,), _ = ray.wait(list(running))
        worker = running.pop(first)
        gradient, version, ended, count = ray.get(first)
        staleness.append(optimizer.steps - version)
        # The model to step towards: that of a plain step against the gradient.
        weights = optimizer.step(optimizer.weights - gradient)
        smoothed.step(weights)
        running[worker.gradient.remote(weights, optimizer.steps)] = worker
        returns += ended
        steps += count
        mean = float(np.mean(returns[-EPISODES:] or [0.0]))
        curve.append((1e-3 * steps, mean))
        reached = len(returns) >= EPISODES and mean >= options.goal
        if len(curve) % 50 == 0 or reached:
            print(f"update {len(curve)}: {steps} steps, mean return {mean:.1f}", flush=True)
    ray.get(list(running))
    if options.save:
        ray.get(workers[0].set_flat.remote(smoothed.weights))
        ray.get(workers[0].get_weights.remote()).save(options.save)
    print(examples.time_exchange(WorkerGroup(workers[:1])))
    row = {
        "updates": len(curve),
        "environment steps": f"{steps:,}",
        f"last {EPISODES} episodes": f"{mean:.1f}",
        "staleness, mean": f"{np.mean(staleness):.2f}",
        "most": max(staleness),
    }
    x, y = zip(*curve, strict=True)
    panel = examples.Panel("return", "thousand steps", {"": (x, y)})
    examples.report([row], options.plot, "CartPole, asynchronous actor-critic", panel)
    if not reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --updates")


if __name__ == "__main__":
    examples.run(main)
