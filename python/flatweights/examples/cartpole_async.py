"""Asynchronous gradients on CartPole: each is applied as it comes, nobody waits.

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
weights. Which gradient comes first depends on the machine: no two runs are alike.

For a task of your own, change `ActorCritic`: what it returns from `gradients` is one gradient
for each variable of `networks`. The exchange that is timed is that of one gradient: weights to
one worker, and as many numbers back.

On two cores of a shared virtual machine (TensorFlow 2.21, Gymnasium 1.2): a mean return of 475
after 174 updates, 88,000 steps and 1.5 seconds in one run; after 304 to 942 updates in others,
while the machine was busy. Then 500.0 in each hundred episodes. Staleness was 1 on average, 2 to
9 at most. An exchange took 1.0 ms as one buffer, 2.3 ms as a dict of arrays.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights.examples._cartpole import (
    ACTIONS,
    EPISODES,
    Environments,
    History,
    Rollout,
    Samples,
    as_policy,
    build_network,
    parse_options,
    play,
)
from flatweights.examples._exchange import ComparedWorker, Seconds, compare
from flatweights.examples._main import run
from flatweights.examples._ray import ray_for
from flatweights.server import ExponentialMovingAverage, FedAdam

WIDTH = 64
ENVIRONMENTS = 16  # of each worker
STEPS = 32  # of each environment, per gradient
DISCOUNT, DECAY = 0.98, 0.95
ENTROPY = 0.005  # what a policy that is undecided is worth
MAX_NORM = 0.5
LEARNING_RATE = 3e-3
SMOOTHING = 0.95


class Played(NamedTuple):
    """What a gradient comes with.

    Attributes:
        version: Of the weights that it was computed with: the steps taken before.
        returns: Of the episodes that ended.
        steps: Taken, in all environments.
    """

    version: int
    returns: list[float]
    steps: int


class ActorCritic:
    """A policy, and a critic that says what to expect.

    Attributes:
        networks: Both, by name.
        policy: Gives logits of the actions.
        critic: Gives values.
    """

    def __init__(self, seed: int) -> None:
        """Build both; the same seed gives the same weights."""
        import tensorflow as tf

        self._policy = build_network(ACTIONS, WIDTH, seed)
        self._critic = build_network(1, WIDTH, seed + 1)
        self.networks = {"policy": self._policy, "critic": self._critic}
        self.policy, self.critic = as_policy(self._policy), as_policy(self._critic)
        self._trained = self._policy.trainable_weights + self._critic.trainable_weights
        signature = Samples.signature()
        self._differentiate = tf.function(self._gradients, input_signature=signature)

    def gradients(self, rollout: Rollout) -> list[Any]:
        """Return one gradient for each variable."""
        samples = Samples.of(rollout, self.critic, DISCOUNT, DECAY)
        return list(self._differentiate(*samples))

    def _gradients(self, states: Any, actions: Any, better: Any, targets: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            logits = self._policy(states)
            unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            entropy = tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(logits), logits)
            error = tf.square(self._critic(states)[:, 0] - targets)
            loss = tf.reduce_mean(unlikely * better - ENTROPY * entropy + 0.5 * error)
        return tape.gradient(loss, self._trained)


class Worker(ComparedWorker):
    """Plays, and computes gradients of what it played."""

    def build(self, rank: int, seed: int) -> Any:
        """Build policy and critic in this process."""
        from flatweights.demo._replica import make_tensorflow_deterministic

        make_tensorflow_deterministic()
        self.agent = ActorCritic(seed)
        self.environments = Environments(ENVIRONMENTS, [seed, rank])
        return self.agent.networks

    def gradient(self, weights: NDArray[Any], version: int) -> tuple[NDArray[Any], Played]:
        """Play with ``weights``; return the gradient with respect to all of them."""
        self.set_flat(weights)
        rollout = self.environments.rollout(self.agent.policy, STEPS)
        gradients = self.agent.gradients(rollout)
        flat = self.variables.flatten_gradients(gradients, clip_norm=MAX_NORM)
        return flat, Played(version, rollout.returns, rollout.steps)

    def play(self, weights: NDArray[Any], seed: int) -> NDArray[Any]:
        """Return the returns of some episodes, played with ``weights``."""
        self.set_flat(weights)
        return play(self.agent.policy, EPISODES, seed)


def train(options: argparse.Namespace) -> None:
    """Run the program, with Ray."""
    actor: Any = ray.remote(Worker)
    workers = [actor.remote(rank, options.seed) for rank in range(options.workers)]
    start = ray.get(workers[0].get_flat.remote())
    optimizer = FedAdam(start, learning_rate=LEARNING_RATE, tau=1e-5)
    smoothed = ExponentialMovingAverage(start, decay=SMOOTHING)
    ray.get([worker.ping.remote() for worker in workers])  # all begin together
    history = History(options, every=50)
    staleness: list[int] = []
    running = {worker.gradient.remote(optimizer.weights, 0): worker for worker in workers}
    while not history.done:
        (first,), _ = ray.wait(list(running))
        worker = running.pop(first)
        gradient, played = ray.get(first)
        staleness.append(optimizer.steps - played.version)
        # It takes a model to step towards: that of a plain step against the gradient.
        weights = optimizer.step(optimizer.weights - gradient)
        smoothed.step(weights)
        history.add(played.returns, played.steps)
        running[worker.gradient.remote(weights, optimizer.steps)] = worker
    ray.get(list(running))
    print(time_exchange(workers[0]))
    played = ray.get(workers[0].play.remote(smoothed.weights, options.seed))
    if options.save:
        ray.get(workers[0].get_weights.remote()).save(options.save)
    more = {"staleness, mean": f"{np.mean(staleness):.2f}", "most": str(max(staleness))}
    history.report("CartPole, asynchronous advantage actor-critic", played, more)


def time_exchange(worker: Any) -> Seconds:
    """Return what it takes to send weights to ``worker`` and get as much back."""
    flat, arrays = ray.get([worker.get_flat.remote(), worker.get_dict.remote()])
    return compare(
        lambda: ray.get(worker.pass_flat.remote(flat)),
        lambda: ray.get(worker.pass_dict.remote(arrays)),
    )


def main() -> None:
    """Run the program."""
    options = parse_options(__doc__, updates=3000)
    with ray_for(options.workers):
        train(options)


if __name__ == "__main__":
    run(main)
