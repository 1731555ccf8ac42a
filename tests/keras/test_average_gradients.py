"""Members take the steps of one process with all of their batches, and survive a killed one.

Most of them are threads. The last tests have another process, too.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from keras_programs import (
    LOOPS,
    OPTIMIZERS,
    Place,
    Together,
    build,
    close,
    images,
    in_threads,
    train,
)

pytestmark = pytest.mark.ray

BOUND = 1e-4
BUILT_FIRST = ("fit, eager", "tf.function", "eager")  # loops that no model without variables begins


@pytest.fixture(autouse=True, scope="module")
def _process_starts(shared_ray: Any, together: Together) -> None:
    """Another process imports TensorFlow while the first tests run, which do not need it."""
    together.start(1)


def check(together: Callable[..., Any], size: int, *args: Any, bound: float = BOUND) -> None:
    oracle_losses, oracle = train(Place(), *args)
    replies = together(size, train, *args)
    assert not any(isinstance(reply, str) for reply in replies), replies
    for losses, weights in replies:
        assert np.allclose(losses, oracle_losses, rtol=max(bound, 1e-4))
        assert all(map(np.array_equal, weights, replies[0][1]))  # the same bits in all members
        assert close(weights, oracle, bound)


@pytest.mark.parametrize(
    ("model", "optimizer", "loop"),
    [
        ("embedding", "momentum", "tf.function"),
        ("lazy", "accumulated", "fit"),
        pytest.param("lazy", "accumulated", "fit, several steps", marks=pytest.mark.slow),
        ("dense", "clipped each", "eager"),
        pytest.param("dense", "SGD", "fit, again", marks=pytest.mark.slow),
    ],
)
def test_two_members_take_the_steps_of_one_process(model: str, optimizer: str, loop: str) -> None:
    check(in_threads, 2, model, optimizer, loop)


def test_a_scaled_loss_takes_the_steps_of_one_process() -> None:
    check(in_threads, 2, "dense", "scaled", "tf.function", "mixed_float16", bound=2e-2)


def test_two_processes_take_the_steps_of_one(together: Together) -> None:
    check(together, 2, "dense", "Adam, clipped", "tf.function")


def weights_and_logs(place: Place, folder: str) -> Any:
    """The list of docs/keras.md; rank 1 dies in the second epoch."""
    import keras

    from flatweights.keras import AverageLogs, AverageWeights

    def die(batch: int, logs: Any) -> None:
        if place.rank == 1 and epochs and batch == 3:
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    epochs: list[int] = []
    spies = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epochs.append(epoch), on_train_batch_end=die
    )
    model = build("dense", place.rank)
    model.compile("sgd", "mse")
    x, y = images("dense")
    callbacks = [AverageWeights(min_results=1, timeout=120, member=place.member()), AverageLogs()]
    fit = model.fit(x, y, epochs=3, verbose=0, callbacks=[*callbacks, spies])
    return fit.history["loss"], model.get_weights()


def test_weights_and_logs_are_averaged_without_a_member_that_was_killed(
    together: Together, tmp_path: Path
) -> None:
    first, dies, last = (Place("killed", rank, 3) for rank in range(3))
    died = together.take().call.remote(weights_and_logs, dies, str(tmp_path))
    with ThreadPoolExecutor(2) as pool:  # the others are members of this process
        both = pool.map(weights_and_logs, (first, last), [str(tmp_path)] * 2)
        (losses, weights), (others, alike) = both
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(died)
    assert (tmp_path / "died").exists()
    assert len(losses) == 3
    assert losses == others
    assert all(map(np.array_equal, weights, alike))


def test_without_a_group_to_join_it_says_so() -> None:
    from flatweights.keras import AverageLogs

    model = build("dense", 0)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=r"member: outside of Ray Train expected flatweights"):
        model.fit(*images("dense"), verbose=0, callbacks=[AverageLogs()])


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
