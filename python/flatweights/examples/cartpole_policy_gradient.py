"""Policy gradient on CartPole: actors play, a learner trains, the policy's weights go out.

Proximal policy optimisation (Schulman et al., "Proximal Policy Optimization Algorithms", 2017). The
driver learns: a policy and a critic. The actors play, each several environments at a time, and need
the policy alone. They never train, so they do not copy the weights that the driver sends: with
``share=True`` their variables alias the memory in which these arrive, and all actors of a node hold
one copy.

    python -m flatweights.examples.cartpole_policy_gradient
    python -m flatweights.examples.cartpole_policy_gradient --workers 4 --plot returns.png

For a task of your own, change `ENVIRONMENT` (any of Gymnasium's whose actions are numbered) and
`build_network`; the loss is in `Learner`. A mean return of 475 takes some 90 updates.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from flatweights import examples
from flatweights.ray import FlatWorker, WorkerGroup

ENVIRONMENT, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
GOAL, MOST = 475, 500  # the mean return that counts as solved, and the most there is
EPISODES = 100  # in a row, that the mean is taken over
ENVIRONMENTS, STEPS = 16, 32  # of each actor, and of each environment per update
EPOCHS, BATCH, LEARNING_RATE, CLIP = 8, 256, 2e-3, 0.2
DISCOUNT, DECAY = 0.98, 0.9

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


class Rollout(NamedTuple):
    """Some steps of several environments: by time, then by environment."""

    states: NDArray[np.float32]  # before each step and after the last
    actions: NDArray[np.int64]
    rewards: NDArray[np.float32]
    failed: NDArray[np.bool_]  # the step ended the episode and nothing comes after
    over: NDArray[np.bool_]  # it ended the episode, be it by the limit of its length
    counts: NDArray[np.bool_]  # it was a step: else the environment was reset
    returns: list[float]  # of the episodes that ended


class Player(FlatWorker):
    """Plays with the weights that it is sent."""

    def build(self, seed: int, rank: int) -> Any:
        """Build the policy and the environments in this process."""
        examples.prepare_tensorflow()
        policy = build_network(ACTIONS, seed)
        self.policy = as_function(policy)
        self.start_environments([seed, rank])
        return policy

    def start_environments(self, seed: Sequence[int]) -> None:
        """Start episodes: a rank in ``seed`` gives each worker its own."""
        self.rng = np.random.default_rng(seed)
        self.environments = gymnasium.make_vec(ENVIRONMENT, ENVIRONMENTS)
        self.states, _ = self.environments.reset(seed=int(self.rng.integers(2**31)))
        self.over = np.zeros(ENVIRONMENTS, np.bool_)
        self.returns = np.zeros(ENVIRONMENTS)

    def set_flat(self, new_weights: Any, *, share: bool = True) -> None:
        """Let the variables alias ``new_weights``."""
        super().set_flat(new_weights, share=share)

    def shared(self) -> int:
        """Return how many variables lie in what was sent, not beside it."""
        return sum(self.variables.shared.values())

    def play(self) -> Rollout:
        """Go on from where the last call stopped, with actions drawn from the policy."""
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
            columns.append((actions, rewards.astype(np.float32), failed.copy(), self.over, counts))
        actions, rewards, failed, over, counts = map(np.stack, zip(*columns, strict=True))
        return Rollout(np.stack(states), actions, rewards, failed, over, counts, returns)


def advantages(rollout: Rollout, values: NDArray[Any]) -> NDArray[np.float32]:
    """Return the generalised advantage estimates of all steps (Schulman et al., ICLR 2016).

    ``values`` are of the states. An episode that ran into the limit of its length is valued as if
    it went on.
    """
    onward = np.where(rollout.failed, 0.0, DISCOUNT)
    errors = rollout.rewards + onward * values[1:] - values[:-1]
    better, later = np.zeros(errors.shape, np.float32), np.zeros(errors.shape[1])
    for t in reversed(range(len(errors))):
        later = errors[t] + np.where(rollout.over[t], 0.0, DISCOUNT * DECAY * later)
        better[t] = later
    return better


class Learner:
    """Improves a policy from what was played with it."""

    def __init__(self, seed: int) -> None:
        """Build policy and critic; the same seed gives the same weights."""
        import keras
        import tensorflow as tf

        from flatweights.tensorflow import TensorFlowVariables

        self._policy, self._critic = build_network(ACTIONS, seed), build_network(1, seed + 1)
        self.policy, self.value = as_function(self._policy), as_function(self._critic)
        self.variables = TensorFlowVariables(self._policy)
        self._trained = self._policy.trainable_variables + self._critic.trainable_variables
        self._optimizer = keras.optimizers.Adam(LEARNING_RATE, global_clipnorm=0.5)
        self._optimizer.build(self._trained)
        self._rng = np.random.default_rng(seed)
        self._step = tf.function(self._take_step)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Take some steps towards what was better than the critic expected."""
        rows = []
        for rollout in rollouts:
            states, chosen = rollout.states, rollout.counts
            values = self.value(states.reshape(-1, OBSERVATIONS)).reshape(states.shape[:2])
            better = advantages(rollout, values)
            of_steps = states[:-1], rollout.actions, better, better + values[:-1]
            rows.append([column[chosen] for column in of_steps])
        states, actions, better, targets = map(np.concatenate, zip(*rows, strict=True))
        logits = self.policy(states)
        taken = np.take_along_axis(logits, actions[:, np.newaxis], axis=1)[:, 0]
        before = taken - np.logaddexp.reduce(logits, axis=1)
        for _ in range(EPOCHS):
            order = self._rng.permutation(len(actions))
            for batch in np.split(order, range(BATCH, len(order), BATCH))[: len(order) // BATCH]:
                columns = (states, actions, before, better, targets)
                self._step(*(column[batch] for column in columns))

    def _take_step(self, states: Any, actions: Any, before: Any, better: Any, targets: Any) -> None:
        import tensorflow as tf

        better = (better - tf.reduce_mean(better)) / (tf.math.reduce_std(better) + 1e-6)
        with tf.GradientTape() as tape:
            logits = self._policy(states)
            likely = -tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            ratio = tf.exp(likely - before)
            clipped = tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP)
            gain = tf.reduce_mean(tf.minimum(ratio * better, clipped * better))
            error = tf.reduce_mean(tf.square(self._critic(states)[:, 0] - targets))
            loss = 0.5 * error - gain
        self._optimizer.apply(tape.gradient(loss, self._trained), self._trained)


def play_greedily(policy: Network, seed: int) -> float:
    """Return the mean return of episodes with the likeliest actions; they are played at once."""
    environments = gymnasium.make_vec(ENVIRONMENT, EPISODES)
    states, _ = environments.reset(seed=seed)
    running, returns = np.ones(EPISODES, np.bool_), np.zeros(EPISODES)
    while running.any():
        states, rewards, failed, cut, _ = environments.step(np.argmax(policy(states), axis=1))
        returns += np.where(running, rewards, 0.0)
        running &= ~(failed | cut)
    return float(returns.mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if the goal is not reached."""
    parser = examples.make_parser(
        __doc__, "the returns", workers=(2, "actors that play"), updates=(400, "at most")
    )
    goal = f"mean return of {EPISODES} episodes to stop at; default: %(default)s"
    parser.add_argument("--goal", type=examples.integer(1, MOST), default=GOAL, help=goal)
    parser.add_argument("--save", type=examples.output_file, help="a file for the weights")
    options = parser.parse_args(arguments)
    examples.start_ray(options.workers)
    group = WorkerGroup.create(Player, options.workers, options.seed, arguments=lambda rank: [rank])
    examples.prepare_tensorflow()
    learner = Learner(options.seed)
    last: deque[float] = deque(maxlen=EPISODES)
    steps, mean, reached = 0, 0.0, False
    curve: list[tuple[float, float]] = []
    while not reached and len(curve) < options.updates:
        replies = group.step("play", broadcast=learner.variables.get_flat())
        rollouts = list(replies.values())
        learner.learn(rollouts)
        last.extend(episode for rollout in rollouts for episode in rollout.returns)
        steps += sum(int(rollout.counts.sum()) for rollout in rollouts)
        mean = sum(last) / max(1, len(last))
        curve.append((1e-3 * steps, mean))
        reached = len(last) == EPISODES and mean >= options.goal
        if len(curve) % 10 == 0 or reached:
            print(f"update {len(curve)}: {steps} steps, mean return {mean:.1f}", flush=True)
    shared, variables = min(group.step("shared").values()), len(learner.variables.layout)
    row = {
        "updates": len(curve),
        "environment steps": f"{steps:,}",
        f"last {EPISODES} episodes": f"{mean:.1f}",
        f"{EPISODES} more, greedy": f"{play_greedily(learner.policy, options.seed):.1f}",
        "variables in shared memory": f"{shared} of {variables}",
    }
    print(examples.time_exchange(group))
    group.shutdown()
    if options.save:
        learner.variables.save(options.save)
    examples.print_table([row])
    if options.plot:
        x, y = zip(*curve, strict=True)
        panel = examples.Panel("return", "thousand steps", {"": (x, y)})
        examples.draw(options.plot, "CartPole, proximal policy optimisation", panel)
    if not reached:
        raise SystemExit(f"mean return {mean:.1f}, not {options.goal}: it needs more --updates")


if __name__ == "__main__":
    examples.run(main)
