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

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from flatweights import examples
from flatweights.examples.cartpole_policy_gradient import Player, build_network
from flatweights.ray import WorkerGroup
from flatweights.server import ExponentialMovingAverage, FedAdam

DECAY, ENTROPY, MAX_NORM = 0.95, 0.005, 0.5  # see `Rollout.rows`; of the policy; of the gradient
LEARNING_RATE, SMOOTHING = 3e-3, 0.95


class Worker(Player):
    """Plays, and computes gradients from its steps."""

    def build(self, seed: int, rank: int) -> Any:
        """Build policy, critic and environments in this process."""
        policy = super().build(seed, rank)
        critic, self.value = build_network(1, seed + 1)
        import tensorflow as tf

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
        return {"policy": policy, "critic": critic}

    def gradient(
        self, weights: NDArray[Any], version: int
    ) -> tuple[NDArray[Any], int, list[float], int]:
        """Play with ``weights``; return the gradient with respect to all of them.

        With it come the version of the weights, returns of episodes, and the number of steps.
        """
        self.set_flat(weights)
        rollout = self.play()
        gradients = self.differentiate(*rollout.rows(self.value, DECAY))
        flat = self.variables.flatten_gradients(gradients, clip_norm=MAX_NORM)
        return flat, version, rollout.returns, int(rollout.counts.sum())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the goal is not reached."""
    options = examples.make_policy_parser(__doc__, updates=3000).parse_args(arguments)
    examples.start_ray(options.workers)
    actor: Any = ray.remote(Worker)
    workers = [actor.remote(options.seed, rank) for rank in range(options.workers)]
    start = ray.get(workers[0].get_flat.remote())
    optimizer = FedAdam(start, learning_rate=LEARNING_RATE, tau=1e-5)
    smoothed = ExponentialMovingAverage(start, decay=SMOOTHING)
    ray.get([worker.ping.remote() for worker in workers])  # all begin together
    returns, staleness = examples.Returns(options, every=50), []
    running = {worker.gradient.remote(optimizer.weights, 0): worker for worker in workers}
    while not returns.is_over:
        (first,), _ = ray.wait(list(running))
        worker = running.pop(first)
        gradient, version, ended, steps = ray.get(first)
        staleness.append(optimizer.steps - version)
        # The model to step towards: that of a plain step against the gradient.
        weights = optimizer.step(optimizer.weights - gradient)
        smoothed.step(weights)
        running[worker.gradient.remote(weights, optimizer.steps)] = worker
        returns.add(steps, ended)
    ray.get(list(running))
    if options.save:
        ray.get(workers[0].set_flat.remote(smoothed.weights))
        ray.get(workers[0].get_weights.remote()).save(options.save)
    print(examples.time_exchange(WorkerGroup(workers[:1])))
    cells = {"staleness, mean": f"{np.mean(staleness):.2f}", "most": max(staleness)}
    returns.report("asynchronous actor-critic", cells)


if __name__ == "__main__":
    examples.run(main)
