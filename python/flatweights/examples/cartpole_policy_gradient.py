"""Policy gradient on CartPole: actors play, a learner trains, the policy's weights go out.

Proximal policy optimisation (Schulman et al., "Proximal Policy Optimization Algorithms", 2017). The
driver learns: a policy and a critic. The actors play, each several environments at a time, and need
the policy alone. They never train, so they do not copy the weights that the driver sends: with
``share=True`` their variables alias the memory in which these arrive, and all actors of a node hold
one copy.

    python -m flatweights.examples.cartpole_policy_gradient
    python -m flatweights.examples.cartpole_policy_gradient --workers 4 --plot returns.png

For a task of your own, change `ENVIRONMENT` (any of Gymnasium's whose actions are numbered) and
`build_network`; the loss is in `Learner`. A mean return of 475, of at most 500, takes some 90
updates.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray
from scipy.special import log_softmax

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
ENVIRONMENTS, STEPS = 16, 32  # of each actor, and of each environment per update
EPOCHS, BATCH, LEARNING_RATE, CLIP = 8, 256, 2e-3, 0.2
DISCOUNT, DECAY = 0.98, 0.9

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
            value: Of states, as a critic estimates it.
            decay: Of the errors of later steps in an advantage.
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
        examples.prepare_tensorflow()
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
        """Return how many variables alias the memory in which weights arrived."""
        return sum(self.variables.shared.values())

    def play(self) -> Rollout:
        """Go on from where the last call stopped, with actions drawn from the policy."""
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

    def __init__(self, seed: int) -> None:
        """Build policy and critic; the same seed gives the same weights."""
        import keras
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self._policy, self.policy = build_network(ACTIONS, seed)
        self._critic, self.value = build_network(1, seed + 1)
        self.variables = TensorFlowVariables(self._policy)
        self._trained = self._policy.trainable_variables + self._critic.trainable_variables
        self._optimizer = keras.optimizers.Adam(LEARNING_RATE, global_clipnorm=0.5)
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
        self._optimizer.apply(tape.gradient(loss, self._trained), self._trained)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the goal is not reached."""
    options = examples.make_policy_parser(__doc__, updates=400).parse_args(arguments)
    examples.start_ray(options.workers)
    group = WorkerGroup.create(Player, options.workers, options.seed, arguments=lambda rank: [rank])
    examples.prepare_tensorflow()
    learner, returns = Learner(options.seed), examples.Returns(options, every=10)
    while not returns.is_over:
        rollouts = list(group.step("play", broadcast=learner.variables.get_flat()).values())
        learner.learn(rollouts)
        steps = sum(int(rollout.counts.sum()) for rollout in rollouts)
        returns.add(steps, [value for rollout in rollouts for value in rollout.returns])
    shared, variables = min(group.step("shared").values()), len(learner.variables.layout)
    print(examples.time_exchange(group))
    group.shutdown()
    if options.save:
        learner.variables.save(options.save)
    in_memory = {"variables in shared memory": f"{shared} of {variables}"}
    returns.report("proximal policy optimisation", in_memory)


if __name__ == "__main__":
    examples.run(main)
