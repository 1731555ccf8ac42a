"""Trainings that Ray Train and Ray Tune start, in the Ray of these tests."""

import time
from pathlib import Path

import keras
import numpy as np
import pytest
import ray
from keras_programs import (
    BATCH,
    OPTIMIZERS,
    Place,
    build,
    close,
    images,
    train,
    train_with_a_death,
    tried,
)

from flatweights.examples import keras_parallel

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # those of Ray's libraries


def hosts() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["name"].startswith("flatweights:")}


def test_after_a_death_all_meet_anew_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    before = hosts()  # those of other tests
    storage = str(tmp_path / "storage")
    result = DataParallelTrainer(
        train_with_a_death,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    assert (tmp_path / "died").exists()
    # Ray Train may not have taken the last checkpoint before the death: then it is the one before.
    assert result.metrics["began"] in (1, 2)
    assert result.metrics["epochs"] == 4

    alone = build("dense", 0)
    alone.compile(OPTIMIZERS["Adam, clipped"](keras.optimizers), "mse")
    alone.fit(*images("dense"), BATCH, epochs=4, shuffle=False, verbose=0)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as saved:
            assert close(list(saved.values()), alone.get_weights(), 1e-4)
    end = time.monotonic() + 60
    while hosts() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert hosts() <= before


def join_alone(config: dict[str, str]) -> None:
    """Rank 0 joins; the other comes once rank 0 has given up."""
    import time
    from pathlib import Path

    import ray.train

    from flatweights.ray import join

    said = Path(config["folder"], "said")
    if ray.train.get_context().get_world_rank() == 0:
        try:
            join(timeout=0.5)
        except TimeoutError as error:
            said.with_suffix(".tmp").write_text(str(error))
            said.with_suffix(".tmp").rename(said)
    while not said.exists():
        time.sleep(0.05)
    with join(timeout=60.0) as member:  # all of them, by now
        Path(config["folder"], str(member.rank)).touch()


def test_a_worker_whose_others_do_not_join_gives_up_in_time(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    DataParallelTrainer(
        join_alone,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    ).fit()
    expected = "join: expected all 2 workers of Ray Train to call it in 0.5 s"
    assert (tmp_path / "said").read_text().startswith(expected)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_trials_have_meetings_of_their_own(tmp_path: Path) -> None:
    from ray import tune

    names = ["momentum", "Adam, clipped"]
    tuner = tune.Tuner(
        tune.with_resources(tried, {"cpu": 0.5}),
        param_space={"optimizer": tune.grid_search(names)},
        run_config=tune.RunConfig(storage_path=str(tmp_path)),
    )
    for result in tuner.fit():
        losses, _ = train(Place(), "dense", result.config["optimizer"])
        assert np.isclose(result.metrics["loss"], losses[-1], rtol=1e-4)


@pytest.mark.parametrize("average", ["gradients", "weights"])
def test_the_example_learns(average: str) -> None:
    curves = keras_parallel.main(["--average", average, "--epochs", "8"])
    alone, together = curves["loss by epoch"].values()
    assert len(alone) == len(together) == 8
    if average == "gradients":
        assert np.allclose(alone, together, rtol=1e-2)
