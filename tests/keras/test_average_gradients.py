"""Members that average gradients take the steps of one process with all of their batches."""

from typing import Any

import numpy as np
import pytest
from keras_programs import LOOPS, OPTIMIZERS, Place, Together, close, train

pytestmark = pytest.mark.ray

BOUND = 1e-4
BUILT_FIRST = ("fit, eager", "tf.function", "eager")  # loops that no model without variables begins


def check(together: Together, size: int, *args: Any, bound: float = BOUND) -> None:
    oracle_losses, oracle = train(Place(), *args)
    replies = together(size, train, *args)
    assert not any(isinstance(reply, str) for reply in replies), replies
    for losses, weights in replies:
        assert np.allclose(losses, oracle_losses, rtol=max(bound, 1e-4))
        assert all(map(np.array_equal, weights, replies[0][1]))  # the same bits in all members
        assert close(weights, oracle, bound)


@pytest.mark.parametrize(
    "args",
    [
        ("convolutional", "Adam, clipped", "fit"),
        ("lazy", "accumulated", "fit, several steps"),
        ("embedding", "momentum", "tf.function"),
        ("dense", "clipped each", "eager"),
        ("dense", "accumulated", "fit, again"),
    ],
    ids="-".join,
)
def test_two_members_take_the_steps_of_one_process(
    args: tuple[str, ...], together: Together
) -> None:
    check(together, 2, *args)


def test_a_scaled_loss_takes_the_steps_of_one_process(together: Together) -> None:
    check(together, 2, "dense", "scaled", "fit", "mixed_float16", bound=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_members_take_the_steps_of_one_process(
    size: int, optimizer: str, together: Together
) -> None:
    for model in ("dense", "convolutional", "embedding", "lazy"):
        for loop in LOOPS:
            if model == "lazy" and (optimizer != "SGD" or loop in BUILT_FIRST):
                continue  # it has to be built first
            # If a row occurs twice, Keras clips each occurrence; ours are added first.
            if model != "embedding" or "clipped" not in optimizer:
                check(together, size, model, optimizer, loop)
