"""Trainings that Ray Train and Ray Tune start, in the Ray of these tests."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import ray
from keras_programs import (
    BATCH,
    OPTIMIZERS,
    STEPS,
    Place,
    build,
    close,
    images,
    outcome,
    train,
    train_and_be_replaced,
    train_with_a_death,
    tried,
)
from process_groups import LocalProcessGroup

from flatweights.examples import keras_parallel
from flatweights.keras import AverageLogs, AverageWeights, ReplaceWorkers, Report
from flatweights.ray import join
from flatweights.ray.members import _train
from flatweights.ray.members._replace import check_ray

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Ray's libraries


def coordinators() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["name"].startswith("flatweights:")}


class Worker:
    """The notes of a worker of `train_and_be_replaced`."""

    def __init__(self, folder: Path, rank: int) -> None:
        notes = folder / f"rank {rank}"
        self.starts = len([*notes.glob("start *")])
        self.facts: dict[str, Any] = json.loads((notes / "end").read_text())
        with np.load(notes / "state.npz") as saved:
            self.state = [*saved.values()]


def replace(
    folder: Path, size: int, dies: Mapping[int, int], epochs: int | None, **options: bool
) -> Any:
    """Train with workers that die in the middle of a step; return all, and Ray Train's result."""
    config = {"folder": str(folder), "dies": dict(dies), "epochs": epochs} | options
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    before = coordinators()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        result = DataParallelTrainer(
            train_and_be_replaced,
            train_loop_config=config,
            backend_config=ReplaceWorkers(),
            scaling_config=ScalingConfig(num_workers=size, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(
                    max_failures=size if "coordinator" in options else len(dies)
                ),
            ),
        ).fit()
    workers = [Worker(folder, rank) for rank in range(size)]
    for rank, worker in enumerate(workers):
        for k, (own, first) in enumerate(zip(worker.state, workers[0].state, strict=True)):
            np.testing.assert_array_equal(own, first, err_msg=f"rank {rank}, part {k}")
    end = time.monotonic() + 60
    while coordinators() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert coordinators() <= before
    return workers, result


def iterations(worker: Worker) -> int:
    (count,) = (one for one in worker.state if one.dtype.kind == "i")
    return int(count)


@pytest.mark.ray
@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_alone_and_healed_while_the_others_go_on(
    tmp_path: Path,
) -> None:
    (new, survivor), result = replace(tmp_path, 2, {0: 1}, epochs=2)
    assert (new.starts, survivor.starts) == (2, 1)
    epochs = survivor.facts["epochs"]
    assert epochs == [*range(len(epochs))]
    assert iterations(survivor) == STEPS * len(epochs), "no step is lost"
    assert new.facts["epochs"] == epochs[-2:]
    assert new.facts["done"] == 1, "that of the checkpoint"
    reported = result.metrics_dataframe["epochs"].tolist()
    assert reported[0] == 1
    assert reported[-2:] == [len(epochs) - 1, len(epochs)]
    with result.checkpoint.as_directory() as folder:
        saved = keras.models.load_model(Path(folder, "model.keras"))
    for own, kept in zip(saved.get_weights(), new.state, strict=False):
        np.testing.assert_array_equal(own, kept)


@pytest.mark.ray
@pytest.mark.slow
def test_workers_that_die_one_after_another_are_replaced(tmp_path: Path) -> None:
    workers, _ = replace(tmp_path, 3, {1: 1, 2: 3}, epochs=3)
    assert [worker.starts for worker in workers] == [1, 2, 2]
    epochs = workers[0].facts["epochs"]
    assert iterations(workers[0]) == STEPS * len(epochs)
    assert min(len(worker.facts["epochs"]) for worker in workers[1:]) >= 3
    assert {worker.facts["epochs"][-1] for worker in workers} == {epochs[-1]}


@pytest.mark.ray
@pytest.mark.slow
def test_at_the_end_the_others_wait_for_the_worker_that_replaces_one(tmp_path: Path) -> None:
    workers, result = replace(tmp_path, 3, {1: 2}, epochs=None)
    assert [worker.starts for worker in workers] == [1, 2, 1]
    assert [worker.facts["epochs"] for worker in workers] == [[0, 1, 2], [], [0, 1, 2]]
    assert result.metrics_dataframe["epochs"].tolist() == [1, 2, 3], "the last one was waited for"


@pytest.mark.ray
@pytest.mark.slow
def test_if_all_workers_die_they_meet_anew_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    workers, _ = replace(tmp_path, 2, {0: 2, 1: 2}, epochs=2)
    assert [worker.starts for worker in workers] == [2, 2]
    assert [worker.facts["done"] for worker in workers] == [2, 2]
    assert [worker.facts["epochs"] for worker in workers] == [[2, 3], [2, 3]]
    assert [worker.facts["begin"] for worker in workers] == [2 * STEPS] * 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_report_that_comes_too_late_for_a_death_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Rank 1 dies in a report; that of rank 0 begins once Ray has let go those that waited."""
    (survivor, new), result = replace(tmp_path, 2, {1: 1}, epochs=3, reports=True)
    last = len(survivor.facts["epochs"])
    assert iterations(survivor) == STEPS * last
    assert new.facts["epochs"] == [*range(last - 3, last)]
    # The report of epoch 2 meets the first one of the new worker.
    assert result.metrics_dataframe["epochs"].tolist() == [1, 2, last - 1, last]


@pytest.mark.ray
@pytest.mark.slow
def test_if_the_coordinator_dies_all_are_replaced_and_go_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    workers, _ = replace(tmp_path, 2, {1: 2}, epochs=2, coordinator=True)
    assert [worker.starts for worker in workers] == [2, 2]
    assert [worker.facts["done"] for worker in workers] == [2, 2]
    assert [worker.facts["epochs"] for worker in workers] == [[2, 3], [2, 3]]


def test_a_ray_that_restarts_all_workers_is_refused() -> None:
    class OfRay255:
        """Ray 2.55, whose `ray.train.backend.Backend` lacks the attribute, too."""

    with pytest.raises(RuntimeError, match=r"expected Ray 2\.56 or newer.*got Ray 2\.55\.1"):
        check_ray(OfRay255, "2.55.1")


def test_workers_that_are_replaced_need_min_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "_token", None)
    _train.use_token("of a backend")
    model = build("dense", 0)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="min_results: expected a number of AverageLogs"):
        model.fit(*images("dense"), verbose=0, callbacks=[AverageLogs()])


def test_workers_that_are_replaced_need_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "_token", None)
    _train.use_token("of a backend")
    (member,) = LocalProcessGroup(1).join_all()
    model = build("dense", 0)
    model.compile("sgd", "mse")
    logs = AverageLogs(member=member, min_results=1)
    with pytest.raises(ValueError, match=r"AverageLogs: .* AverageWeights in the list"):
        model.fit(*images("dense"), verbose=0, callbacks=[logs])
    model.fit(*images("dense"), verbose=0, callbacks=[logs, AverageWeights()])


@pytest.mark.ray
@pytest.mark.slow
def test_after_a_death_all_meet_anew_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    before = coordinators()  # those of other tests
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
    while coordinators() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert coordinators() <= before


def join_alone(config: dict[str, str]) -> None:
    """Rank 0 joins; the other rank joins once rank 0 has given up."""
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


@pytest.mark.ray
@pytest.mark.slow
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


@pytest.mark.ray
@pytest.mark.slow
def test_trials_have_groups_of_their_own(tmp_path: Path) -> None:
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


@pytest.mark.ray
@pytest.mark.slow
def test_a_function_of_ray_tune_is_no_worker_of_ray_train(tmp_path: Path) -> None:
    """Ray warns there of its own functions, by an exception."""
    from ray import tune

    def tried(config: Any) -> None:
        model = build("dense", 0)
        model.compile("sgd", "mse")
        x, y = images("dense")
        calls: list[Callable[[], Any]] = [
            join,
            lambda: Report.resume(model),
            lambda: model.fit(x, y, verbose=0, callbacks=[Report()]),
            lambda: model.fit(x, y, verbose=0, callbacks=[AverageLogs()]),
        ]
        tune.report({"said": [outcome(call) for call in calls]})

    tuner = tune.Tuner(tried, run_config=tune.RunConfig(storage_path=str(tmp_path)))
    (result,) = tuner.fit()
    begins = [
        "NotInTrainError: outside of Ray Train expected join(name, rank=..., size=...)",
        "RuntimeError: checkpoint: outside of a worker of Ray Train expected",
        "RuntimeError: Report: expected a worker of Ray Train",
        "RuntimeError: member: outside of Ray Train expected",
    ]
    said = result.metrics["said"]
    assert [text[: len(begin)] for text, begin in zip(said, begins, strict=True)] == begins


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("average", ["gradients", "weights"])
def test_the_example_learns(average: str) -> None:
    curves = keras_parallel.main(["--average", average, "--epochs", "8"])
    (epochs, alone), (same, together) = curves["loss by epoch"].values()
    assert epochs == same == [*range(1, 9)]
    if average == "gradients":
        assert np.allclose(alone, together, rtol=1e-2)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("replaces", [True, False])
def test_the_example_learns_though_a_worker_is_killed(
    replaces: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs", "8", "--kill", *(["--replace"] if replaces else [])]
    curves = keras_parallel.main(options)
    (epochs, alone), (reported, together) = curves["loss by epoch"].values()
    assert epochs == [*range(1, 9)]
    assert reported[-1] == 8
    if not replaces:
        assert reported == epochs
        assert np.allclose(alone, together, rtol=1e-2), "it goes on from the checkpoint"
    elif len(reported) < 8:
        assert "without a report: epochs" in capsys.readouterr().out


def test_the_example_replaces_workers_that_average_gradients_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        keras_parallel.main(["--replace", "--average", "weights"])
    assert "expected --average gradients with --replace" in capsys.readouterr().err
