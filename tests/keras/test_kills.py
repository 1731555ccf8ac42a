"""Trainings that go on when the process of a member is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from keras_programs import Place, Process, build, images

pytestmark = pytest.mark.ray


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


def test_weights_and_logs_are_averaged_without_a_member_that_was_killed(tmp_path: Path) -> None:
    processes = [Process.remote() for _ in range(3)]  # type: ignore[attr-defined]
    places = [Place("killed", rank, 3) for rank in range(3)]
    calls = [
        process.call.remote(weights_and_logs, place, str(tmp_path))
        for process, place in zip(processes, places, strict=True)
    ]
    (losses, weights), (others, alike) = ray.get([calls[0], calls[2]])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(calls[1])
    assert (tmp_path / "died").exists()
    assert len(losses) == 3
    assert losses == others
    assert all(map(np.array_equal, weights, alike))
