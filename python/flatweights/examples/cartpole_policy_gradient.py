"""Policy gradient on CartPole: actors play, a learner trains and sends out the weights.

Proximal policy optimisation (Schulman et al., "Proximal Policy Optimization Algorithms", 2017). The
driver trains a policy and a critic. The actors play, each in several environments at a time, and
need only the policy. They never train, so they do not copy the weights that the driver sends: with
``share=True`` their variables alias the memory in which these arrive, and all actors of a node hold
one copy.

    flatweights examples cartpole_policy_gradient
    flatweights examples --plot returns.png cartpole_policy_gradient --workers 4

For a task of your own, change `ENVIRONMENT` (any of Gymnasium's whose actions are numbered) and
`build_network`; the loss is in `Learner`. A mean return of 475, of at most 500, takes 20 to 30
updates.
"""

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray
from scipy.special import log_softmax

from flatweights.ray import FlatWorker, WorkerGroup

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
UPDATES = 100
ENVIRONMENTS, STEPS = 16, 128  # for each actor; for each environment and update
EPOCHS, BATCH, CLIP = 8, 256, 0.2
LEARNING_RATE = 1e-3  # at first: it falls to 0, or a policy that has learned may forget again
DISCOUNT, DECAY, MAX_NORM = 0.99, 0.95, 0.5

Function = Callable[[NDArray[Any]], NDArray[Any]]


def build_network(outputs: int, seed: int) -> tuple[Any, Function]:
    """Return a network whose last layer starts near zero, and the same as a function of arrays.

    The function is traced once; a plain call of the network takes ten times as long.
    """
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)  # the actors share the cores
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, "tanh", kernel_initializer="orthogonal") for _ in range(2)]
    last = keras.layers.Dense(outputs, kernel_initializer=keras.initializers.Orthogonal(0.01))
    network = keras.Sequential([keras.Input((OBSERVATIONS,)), *hidden, last])
    call = tf.function(network).get_concrete_function(tf.TensorSpec([None, OBSERVATIONS]))
    return network, lambda states: np.asarray(call(tf.constant(states)))


class Rollout(NamedTuple):
    """Some steps of several environments: by time, then by environment."""

    states: NDArray[np.float32]  # before each step and after the last
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    failed: NDArray[np.bool_]  # the step ended the episode, and nothing would follow
    over: NDArray[np.bool_]  # the step ended the episode, perhaps by the limit of its length
    counts: NDArray[np.bool_]  # it was a step; otherwise, the environment was reset
    returns: list[float]  # of the episodes that ended

    def rows(self, value: Function, decay: float) -> list[NDArray[Any]]:
        """Return states, actions, advantages and targets of values: one row for each step.

        Args:
            value: The critic's function from states to estimates of their values.
            decay: The factor by which the errors of later steps decay in an advantage.
        """
        values = value(self.states.reshape(-1, OBSERVATIONS)).reshape(self.states.shape[:2])
        gains = self.advantages(values, decay)
        columns = self.states[:-1], self.actions, gains, gains + values[:-1]
        return [column[self.counts] for column in columns]

    def advantages(self, values: NDArray[Any], decay: float) -> NDArray[np.float32]:
        """Return the generalised advantage estimates of all steps (Schulman et al., ICLR 2016).

        ``values`` are those of the states. An episode that ran into the limit of its length is
        valued as if it went on.
        """
        onward = np.where(self.failed, 0.0, DISCOUNT)
        errors = self.rewards + onward * values[1:] - values[:-1]
        result, later = np.zeros(errors.shape, np.float32), np.zeros(errors.shape[1])
        for t in reversed(range(len(errors))):
            later = errors[t] + np.where(self.over[t], 0.0, DISCOUNT * decay * later)
            result[t] = later
        return result


class Player(FlatWorker):
    """Plays with the weights that the driver sends."""

    def build(self, seed: int, rank: int) -> Any:
        """Build the policy and the environments in this process."""
        network, self.policy = build_network(ACTIONS, seed)
        self.start_environments([seed, rank])
        return network

    def start_environments(self, seed: Sequence[int]) -> None:
        """Start episodes: a rank in ``seed`` gives each worker its own."""
        self.rng = np.random.default_rng(seed)
        self.environments = RecordEpisodeStatistics(gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS))
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)

    def set_flat(self, new_weights: Any, *, share: bool = True) -> None:
        """Let the variables alias ``new_weights``."""
        super().set_flat(new_weights, share=share)

    def shared(self) -> int:
        """Return the number of variables that alias the memory in which weights arrived."""
        return sum(self.variables.shared.values())

    def play(self) -> Rollout:
        """Continue the episodes of the last call, with actions drawn from the policy."""
        states, columns = [self.states], []
        for _ in range(STEPS):
            logits = self.policy(self.states)
            # The largest of logits with Gumbel noise is a sample of their softmax.
            actions = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
            counts = ~self.over  # an episode that is over is reset, and its action is ignored
            self.states, rewards, failed, cut, _ = self.environments.step(actions)
            self.over = failed | cut
            states.append(self.states)
            columns.append((actions, rewards.astype(np.float32), failed.copy(), self.over, counts))
        returns = [float(value) for value in self.environments.return_queue]
        self.environments.return_queue.clear()
        actions, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        return Rollout(np.stack(states), actions, rewards, failed, over, counts, returns)


class Learner:
    """Improves a policy by the steps that were played with it."""

    def __init__(self, seed: int, updates: int) -> None:
        """Build policy and critic; the same seed gives the same weights."""
        import keras
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self._policy, self.policy = build_network(ACTIONS, seed)
        self._critic, self.value = build_network(1, seed + 1)
        self.variables = TensorFlowVariables(self._policy)
        self._trained = self._policy.trainable_variables + self._critic.trainable_variables
        self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
        self._falls_by = LEARNING_RATE / updates
        self._optimizer.build(self._trained)
        self._rng = np.random.default_rng(seed)
        self._step = tf.function(self._take_step)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Take some steps towards actions that were better than the critic expected."""
        rows = [rollout.rows(self.value, DECAY) for rollout in rollouts]
        states, actions, gains, targets = map(np.concatenate, zip(*rows, strict=True))
        before = log_softmax(self.policy(states), axis=1)[np.arange(len(actions)), actions]
        columns = states, actions, before, gains, targets
        for _ in range(EPOCHS):
            order = self._rng.permutation(len(actions))[: len(actions) // BATCH * BATCH]
            for batch in order.reshape(-1, BATCH):
                self._step(*(column[batch] for column in columns))
        self._optimizer.learning_rate.assign_sub(self._falls_by)

    def _take_step(self, states: Any, actions: Any, before: Any, gains: Any, targets: Any) -> None:
        import tensorflow as tf

        gains = (gains - tf.reduce_mean(gains)) / (tf.math.reduce_std(gains) + 1e-6)
        with tf.GradientTape() as tape:
            logits = self._policy(states)
            likely = -tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            ratio = tf.exp(likely - before)
            clipped = tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP)
            gain = tf.reduce_mean(tf.minimum(ratio * gains, clipped * gains))
            error = tf.reduce_mean(tf.square(self._critic(states)[:, 0] - targets))
            loss = 0.5 * error - gain
        networks = self._policy.trainable_variables, self._critic.trainable_variables
        parts = tape.gradient(loss, networks)
        # Clipped separately: the critic's gradients are larger, and would leave the policy no room.
        parts = [tf.clip_by_global_norm(part, MAX_NORM)[0] for part in parts]
        self._optimizer.apply(parts[0] + parts[1], self._trained)


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
    group = WorkerGroup.create(Player, options.workers, options.seed, arguments=lambda rank: [rank])
    learner, returns, steps = Learner(options.seed, options.updates), deque[float](maxlen=100), 0
    curve = list[tuple[float, float]]()
    is_reached = False
    while not is_reached and len(curve) < options.updates:
        rollouts = list(group.step("play", broadcast=learner.variables.get_flat()).values())
        learner.learn(rollouts)
        for rollout in rollouts:
            steps += int(rollout.counts.sum())
            returns.extend(rollout.returns)
        mean = float(np.mean(returns or [0.0]))
        curve.append((1e-3 * steps, mean))
        is_reached = len(returns) == 100 and mean >= options.goal
        if is_reached or len(curve) % 5 == 0:
            print(f"update {len(curve)}: {steps} steps, mean return {mean:.1f}", flush=True)
    shared = min(group.step("shared").values())
    print(f"variables in shared memory: {shared} of {len(learner.variables.layout)}")
    group.shutdown()
    if options.save:
        learner.variables.save(options.save)
    if not is_reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --updates")
    return {"return by thousand steps": {"": tuple(zip(*curve, strict=True))}}


if __name__ == "__main__":
    main()
