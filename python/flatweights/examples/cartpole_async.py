"""Asynchronous gradients on CartPole: each is applied as it arrives, and no actor waits.

The asynchronous advantage actor-critic of Mnih et al., "Asynchronous Methods for Deep
Reinforcement Learning", ICML 2016. Each worker plays some steps with the weights that it was
sent, and answers with one vector, the gradient of policy and critic. The driver takes a step of
Adam on the flat vector of weights with whichever gradient is there first, and sends the
new weights to that worker alone. By then the others compute with older ones: how many steps
were taken between the sending of weights and the gradient that came of them is its staleness.

    python -m flatweights.examples.cartpole_async
    python -m flatweights.examples.cartpole_async --workers 4 --plot returns.png

Adam is `flatweights.server.FedAdam`, which steps towards a model: it is given the one that a
plain step against the gradient leads to. What is played in the end is a moving average of the
weights. Which gradient comes first depends on the machine, so no two runs are alike: a mean return
of 475 takes 150 to 1,500 updates.

For a task of your own, change `Worker`: what it returns from `gradient` is one gradient for
each variable of what `build` returns. The exchange that is timed is that with one worker.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup
from flatweights.server import ExponentialMovingAverage, FedAdam

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
GOAL, MOST = 475, 500  # the mean return that counts as solved, and the most there is
EPISODES = 100  # in a row, that the mean is taken over
ENVIRONMENTS, STEPS = 16, 32  # of each worker, and of each environment per gradient
DISCOUNT, DECAY = 0.98, 0.95
ENTROPY, MAX_NORM = 0.005, 0.5  # what an undecided policy is worth; the longest gradient
LEARNING_RATE, SMOOTHING = 3e-3, 0.95

Network = Callable[[NDArray[Any]], NDArray[Any]]


def build_network(outputs: int, seed: int) -> Any:
    """Return a network of two hidden layers; its last layer starts near zero."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [
        keras.layers.Dense(
            width, activation, kernel_initializer=keras.initializers.Orthogonal(gain)
        )
        for width, activation, gain in ((64, "tanh", 1.0), (64, "tanh", 1.0), (outputs, None, 0.01))
    ]
    return keras.Sequential([keras.Input((OBSERVATIONS,)), *layers])


def as_function(network: Any) -> Network:
    """Return ``network`` as a function that is traced once: a plain call takes far longer."""
    import tensorflow as tf

    states = tf.TensorSpec([None, OBSERVATIONS])
    call = tf.function(network, input_signature=[states]).get_concrete_function()
    return lambda observations: np.asarray(call(tf.constant(observations)))


class Played(NamedTuple):
    """What a gradient comes with: its weights' version, returns of episodes, and steps taken."""

    version: int
    returns: list[float]
    steps: int


class Worker(FlatWorker):
    """Plays, and computes gradients of what it played."""

    def build(self, seed: int, rank: int) -> Any:
        """Build policy, critic and environments in this process."""
        examples.prepare_tensorflow()
        import tensorflow as tf

        policy, critic = build_network(ACTIONS, seed), build_network(1, seed + 1)
        self.policy, self.value = as_function(policy), as_function(critic)
        trained = policy.trainable_weights + critic.trainable_weights

        def differentiate(states: Any, actions: Any, better: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = policy(states)
                unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
                entropy = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(logits), logits)
                error = tf.square(critic(states)[:, 0] - targets)
                loss = tf.reduce_mean(unlikely * better - ENTROPY * entropy + 0.5 * error)
            return tape.gradient(loss, trained)

        row = tf.TensorSpec([None])
        states, actions = tf.TensorSpec([None, OBSERVATIONS]), tf.TensorSpec([None], tf.int64)
        self.differentiate = tf.function(differentiate, input_signature=[states, actions, row, row])
        self.rng = np.random.default_rng([seed, rank])
        self.environments = gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS)
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)
        self.returns = np.zeros(ENVIRONMENTS)
        return {"policy": policy, "critic": critic}

    def gradient(self, weights: NDArray[Any], version: int) -> tuple[NDArray[Any], Played]:
        """Play with ``weights``; return the gradient with respect to all of them."""
        self.set_flat(weights)
        states, columns, returns = [self.states], [], []
        for _ in range(STEPS):
            logits = self.policy(self.states)
            # The largest of logits with Gumbel noise is a sample of their softmax.
            actions = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
            counts = ~self.over  # what was over is reset instead, and the action is ignored
            self.states, rewards, failed, cut, _ = self.environments.step(actions)
            self.over = failed | cut
            self.returns += rewards
            returns.extend(self.returns[self.over].tolist())
            self.returns[self.over] = 0.0
            states.append(self.states)
            columns.append((actions, rewards, failed.copy(), self.over, counts))
        seen = np.stack(states)
        taken, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        values = self.value(seen.reshape(-1, OBSERVATIONS)).reshape(seen.shape[:2])
        better = advantages(rewards, failed, over, values)
        rows = seen[:-1], taken, better, better + values[:-1]
        gradients = self.differentiate(*(column[counts] for column in rows))
        flat = self.variables.flatten_gradients(gradients, clip_norm=MAX_NORM)
        return flat, Played(version, returns, int(counts.sum()))

    def play(self, weights: NDArray[Any], seed: int) -> float:
        """Return the mean return of episodes with the likeliest actions, played at once."""
        self.set_flat(weights)
        environments = gymnasium.make_vec(ENVIRONMENT, EPISODES)
        states, _ = environments.reset(seed=seed)
        running, returns = np.ones(EPISODES, np.bool_), np.zeros(EPISODES)
        while running.any():
            actions = np.argmax(self.policy(states), axis=1)
            states, rewards, failed, cut, _ = environments.step(actions)
            returns += np.where(running, rewards, 0.0)
            running &= ~(failed | cut)
        return float(returns.mean())


def advantages(
    rewards: NDArray[Any], failed: NDArray[Any], over: NDArray[Any], values: NDArray[Any]
) -> NDArray[np.float32]:
    """Return the generalised advantage estimates of all steps (Schulman et al., ICLR 2016).

    By step and environment, ``values`` have one row more than there are steps. An episode that is
    ``over`` but has not ``failed`` ran into the limit of its length: it is valued as if it went on.
    """
    errors = rewards + np.where(failed, 0.0, DISCOUNT) * values[1:] - values[:-1]
    better, later = np.zeros(errors.shape, np.float32), np.zeros(errors.shape[1])
    for t in reversed(range(len(errors))):
        later = errors[t] + np.where(over[t], 0.0, DISCOUNT * DECAY * later)
        better[t] = later
    return better


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the goal is not reached."""
    parser = examples.make_parser(
        __doc__, "the returns", workers=(2, "actors that play"), updates=(3000, "at most")
    )
    goal = f"mean return of {EPISODES} episodes to stop at; default: %(default)s"
    parser.add_argument("--goal", type=examples.integer(1, MOST), default=GOAL, help=goal)
    parser.add_argument("--save", type=examples.output_file, help="a file for the weights")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    actor: Any = ray.remote(Worker)
    workers = [actor.remote(options.seed, rank) for rank in range(options.workers)]
    start = ray.get(workers[0].get_flat.remote())
    optimizer = FedAdam(start, learning_rate=LEARNING_RATE, tau=1e-5)
    smoothed = ExponentialMovingAverage(start, decay=SMOOTHING)
    ray.get([worker.ping.remote() for worker in workers])  # all begin together
    last: deque[float] = deque(maxlen=EPISODES)
    curve: list[tuple[float, float]] = []
    staleness: list[int] = []
    steps, mean, reached = 0, 0.0, False
    running = {worker.gradient.remote(optimizer.weights, 0): worker for worker in workers}
    while not reached and len(curve) < options.updates:
        (first,), _ = ray.wait(list(running))
        worker = running.pop(first)
        gradient, played = ray.get(first)
        staleness.append(optimizer.steps - played.version)
        # It takes a model to step towards: that of a plain step against the gradient.
        weights = optimizer.step(optimizer.weights - gradient)
        smoothed.step(weights)
        running[worker.gradient.remote(weights, optimizer.steps)] = worker
        last.extend(played.returns)
        steps += played.steps
        mean = sum(last) / max(1, len(last))
        curve.append((1e-3 * steps, mean))
        reached = len(last) == EPISODES and mean >= options.goal
        if len(curve) % 50 == 0 or reached:
            print(f"update {len(curve)}: {steps} steps, mean return {mean:.1f}", flush=True)
    ray.get(list(running))
    greedy = ray.get(workers[0].play.remote(smoothed.weights, options.seed))
    if options.save:
        ray.get(workers[0].get_weights.remote()).save(options.save)
    print(examples.time_exchange(WorkerGroup(workers[:1])))
    row = {
        "updates": len(curve),
        "environment steps": f"{steps:,}",
        f"last {EPISODES} episodes": f"{mean:.1f}",
        f"{EPISODES} more, greedy": f"{greedy:.1f}",
        "staleness, mean": f"{np.mean(staleness):.2f}",
        "most": max(staleness),
    }
    examples.print_table([row])
    if options.plot:
        x, y = zip(*curve, strict=True)
        panel = examples.Panel("return", "thousand steps", {"": (x, y)})
        examples.draw(options.plot, "CartPole, asynchronous advantage actor-critic", panel)
    if not reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --updates")


if __name__ == "__main__":
    examples.run(main)
