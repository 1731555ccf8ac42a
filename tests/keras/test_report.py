"""`Report`: its checkpoints can be resumed, and a run of Ray Train gets its metrics."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras_programs import seed_initializers
from numpy.typing import NDArray
from process_groups import LocalProcessGroup

from flatweights._daemon import in_daemon
from flatweights.keras import AverageLogs, Report, _report, average_gradients
from flatweights.ray import Member

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = 2
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1)


def new_model(seed: int = 0, units: int = 4, optimizer: Any = None) -> Any:
    seed_initializers(seed)
    layers = [keras.layers.Dense(units, "tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, "mse", run_eagerly=True)  # few steps cost less than a trace
    return model


def fit(model: Any, epochs: int, begin: int = 0, callbacks: Any = (), size: int = 32) -> Any:
    options = {"initial_epoch": begin, "callbacks": list(callbacks), "shuffle": False, "verbose": 0}
    return model.fit(X, Y, size, epochs=epochs, **options)


def state(model: Any) -> list[NDArray[Any]]:
    return [np.array(v.value) for v in [*model.variables, *model.optimizer.variables]]


def train(config: Mapping[str, Any]) -> None:
    """As a worker of Ray Train."""
    import ray.train

    if config["resumes"]:  # as a second start of this run would
        fit(new_model(seed=1), 2, callbacks=[Report()])
    model = new_model(seed=2)
    done = Report.resume(model)
    fit(model, 5, done, [Report(every=2)])
    rank = ray.train.get_context().get_world_rank()
    np.savez(Path(config["folder"], f"{rank}.npz"), *state(model))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray's libraries
@pytest.mark.parametrize("resumes", [False, True])
def test_ray_train_gets_metrics_and_a_checkpoint(tmp_path: Path, resumes: bool) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    result = TensorflowTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "resumes": resumes},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    ).fit()
    assert result.metrics["epochs"] == 5
    assert result.metrics["seconds"] > 0
    expected = new_model(seed=1 if resumes else 2)
    history = fit(expected, 5).history
    assert result.metrics["loss"] == pytest.approx(history["loss"][-1], rel=1e-5)
    reports = result.metrics_dataframe["epochs"].tolist()
    assert reports == ([1, 2, 4, 5] if resumes else [2, 4, 5])
    with np.load(tmp_path / "0.npz") as saved:
        for got, wanted in zip(saved.values(), state(expected), strict=True):
            assert np.allclose(got, wanted, rtol=1e-4, atol=1e-6)
    loaded = new_model(seed=3)
    assert Report.resume(loaded, result.checkpoint) == 5


@pytest.mark.filterwarnings("ignore")  # those of Ray's libraries
def test_the_local_mode_of_ray_train_gets_metrics_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train
    from ray.train.v2._internal.execution import train_fn_utils
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    reported: list[int] = []
    report = ray.train.report

    def kept(metrics: Any, checkpoint: Any) -> None:
        """Keep the checkpoint, as Ray Train does in other modes."""
        reported.append(metrics["epochs"])
        folder = tmp_path / f"checkpoint {len(reported)}"
        checkpoint.to_directory(folder)
        report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    monkeypatch.setattr(ray.train, "report", kept)
    monkeypatch.setattr(train_fn_utils, "_train_fn_utils", None)  # which a run leaves behind
    result = DataParallelTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "resumes": True},
        scaling_config=ray.train.ScalingConfig(num_workers=0),
    ).fit()
    assert reported == [1, 2, 4, 5]
    assert result.metrics["epochs"] == 5
    assert result.metrics["seconds"] > 0
    expected = new_model(seed=1)
    assert result.metrics["loss"] == fit(expected, 5).history["loss"][-1]
    loaded = new_model(seed=3)
    assert Report.resume(loaded, result.checkpoint) == 5
    for got, wanted in zip(state(loaded), state(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)


def checkpoint_of(model: Any, folder: Path, metadata: Mapping[str, Any]) -> Any:
    import ray.train

    model.save(folder / "model.keras")
    (folder / ".metadata.json").write_text(json.dumps(metadata))
    return ray.train.Checkpoint.from_directory(folder)


def test_a_training_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    first, expected = new_model(), new_model()
    fit(first, 1)
    fit(expected, 2)
    resumed = new_model(seed=1)
    assert Report.resume(resumed, checkpoint_of(first, tmp_path, {"epochs": 1})) == 1
    assert all(map(np.array_equal, state(first), state(resumed)))
    fit(resumed, 2, begin=1)
    assert all(map(np.array_equal, state(expected), state(resumed)))


class Scaled(keras.Model):  # type: ignore[misc]
    """A model whose arguments Keras cannot save."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.dense = function, keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.function(self.dense(x))


def scaled(seed: int) -> Any:
    seed_initializers(seed)
    model = Scaled(lambda x: 2.0 * x)
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", run_eagerly=True)
    return model


def test_a_model_whose_structure_cannot_be_saved_goes_on_from_its_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import ray.train

    first = scaled(0)
    fit(first, 2)
    report = Report()
    report.set_model(first)
    report._rank = 0
    for _ in range(2):
        saved = report._saved()
        assert saved is not None
        with saved as folder:
            (name,) = [path.name for path in Path(folder).iterdir()]
            Path(folder, ".metadata.json").write_text('{"epochs": 2}')
            resumed = scaled(1)
            assert Report.resume(resumed, ray.train.Checkpoint.from_directory(folder)) == 2
            assert all(map(np.array_equal, state(first), state(resumed)))
    if name == "model.keras":  # Keras 3.5 saves it
        return
    assert name == "model.weights.h5"
    (message,) = caplog.messages
    assert "Report saves weights only, in model.weights.h5, because of: Object Scaled" in message


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    first = new_model()
    fit(first, 1)
    checkpoint = checkpoint_of(first, tmp_path, {"epochs": 1})
    with pytest.raises(ValueError, match="could not be loaded"):
        Report.resume(new_model(units=5), checkpoint)
    with pytest.raises(ValueError, match=r"loading for optimizer|could not be loaded"):
        Report.resume(new_model(optimizer=keras.optimizers.Adam()), checkpoint)
    with pytest.raises(ValueError, match="expected one that is built and compiled"):
        Report.resume(keras.Sequential([keras.layers.Dense(1)]), checkpoint)
    with pytest.raises(TypeError, match="model: expected a model of Keras 3, got str"):
        Report.resume("model.keras")
    with pytest.raises(TypeError, match=r"checkpoint: expected a ray.train.Checkpoint.* got str"):
        Report.resume(new_model(), str(tmp_path))
    foreign = checkpoint_of(first, tmp_path, {})
    with pytest.raises(ValueError, match=r"expected one of flatweights\.keras\.Report"):
        Report.resume(new_model(), foreign)


def test_outside_of_ray_train_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="expected a worker of Ray Train"):
        fit(new_model(), 1, callbacks=[Report()])
    with pytest.raises(
        RuntimeError, match=r"outside of a worker of Ray Train expected a ray.train"
    ):
        Report.resume(new_model())
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        Report(0)
    with pytest.raises(TypeError, match="every"):
        Report(1.5)  # type: ignore[arg-type]


def test_a_log_that_cannot_be_pickled_is_named() -> None:
    class ReportElsewhere(Report):
        def on_train_begin(self, logs: Any = None) -> None:
            """Ray Train is not here."""

    lock = threading.Lock()
    adds = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs.update(lock=lock))
    with pytest.raises(TypeError, match=r"Report: logs\['lock'\]: expected a value .* got lock: "):
        fit(new_model(), 1, callbacks=[adds, ReportElsewhere()])


class Reports:
    """Takes the place of `ray.train.report`: a call returns once all workers have made one."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def __call__(self, metrics: dict[str, Any]) -> None:
        with self._changed:
            mine = len(self.made)
            self.made.append(metrics)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self.made) >= SIZE * (mine // SIZE + 1), 60)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Two workers, threads of this process, that `ReplaceWorkers` would replace."""
    import ray.train

    made = Reports()
    monkeypatch.setattr(ray.train, "report", made)
    monkeypatch.setattr(_report, "is_replaceable", lambda: True)
    return made


def in_both(act: Callable[[Report, int], Any]) -> list[Any]:
    """Call ``act`` for the `Report` of each rank, in threads."""

    def call(member: Member) -> Any:
        report = Report(save=False)
        report._handle.use({"member": member, "timeout": 60.0, "min_results": 1})
        report._member, report._rank = member, member.rank
        return act(report, member.rank)

    with ThreadPoolExecutor(SIZE) as pool:
        return [*pool.map(call, LocalProcessGroup(SIZE).join_all())]


NEWS = {"epochs": 4, "loss": 0.5}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([(0, {}), (3, NEWS)], [NEWS] * SIZE, id="rank 0 was replaced since"),
        pytest.param([(3, NEWS), (0, {})], [NEWS] * SIZE, id="rank 1 was replaced since"),
        pytest.param([(0, {"epochs": 2}), (3, NEWS)], [NEWS] * SIZE, id="rank 0 was elsewhere"),
        pytest.param([(4, {}), (2, {"epochs": 3})], [], id="rank 1 was elsewhere"),
        pytest.param([(4, {}), (4, {})], [], id="all is reported"),
        pytest.param([(0, {}), (0, {})], [], id="there was no epoch"),
    ],
)
def test_at_the_end_all_report_the_last_epoch_that_is_not_reported(
    reports: Reports, ends: list[Any], expected: list[Any]
) -> None:
    def end(report: Report, rank: int) -> None:
        report._reported, report._unreported = ends[rank]
        report.on_train_end()

    in_both(end)
    assert reports.made == expected


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["", "slow"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_report_that_an_old_call_of_rank_0_completes_is_made_again(
    reports: Reports, rank: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow worker finds its old call done, by the report of the other: it must not report, too.

    The other would not make one more report, and Ray Train would have the worker wait for it.
    """

    def go_on(report: Report, own: int) -> bool:
        if own == rank:  # the other worker died before it reported this epoch
            report._call = in_daemon("old", reports, {"epochs": 3})
            gather = report._gather

            def slow(*arguments: Any) -> Any:
                found = gather(*arguments)
                time.sleep(seconds)
                return found

            monkeypatch.setattr(report, "_gather", slow)
        return report._report_with_others(NEWS)

    assert in_both(go_on) == [rank != 0] * SIZE
    assert len(reports.made) == SIZE


def test_a_report_whose_old_call_ray_ends_meanwhile_has_the_model(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    def go_on(report: Report, own: int) -> bool:
        monkeypatch.setattr(report, "_saved", lambda: saved.append(own))
        if own == 0:
            ends, gather = threading.Event(), report._gather

            def wait_for_ray() -> None:
                ends.wait(60)

            old = report._call = in_daemon("old", wait_for_ray)

            def ended(*arguments: Any) -> Any:
                found = gather(*arguments)
                ends.set()
                old.result(60)
                return found

            monkeypatch.setattr(report, "_gather", ended)
        return report._report_with_others(NEWS)

    assert in_both(go_on) == [True] * SIZE
    assert reports.made == [NEWS] * SIZE
    assert 0 in saved


def told(*reports: bool, late: tuple[int, ...] = ()) -> Any:
    """A round in which rank k tells whether it ``reports``, and no call is an old one."""
    weights = {rank: (each, False) for rank, each in enumerate(reports)}
    return SimpleNamespace(weights=weights, used=tuple(weights), late=late)


BOTH, NONE = told(True, True), told(False, False)


@pytest.mark.parametrize(
    ("metrics", "in_epoch", "rounds", "expected"),
    [
        pytest.param(
            NEWS, False, [told(True, late=(1,)), BOTH, BOTH, NONE], (True, 1), id="late, once"
        ),
        pytest.param(NEWS, False, [told(True, late=(1,))] * 2, (False, 0), id="late, twice"),
        pytest.param(NEWS, True, [told(True, late=(1,))], (False, 0), id="late, in an epoch"),
        pytest.param(NEWS, True, [told(True, True, late=(1,))], (False, 0), id="healed"),
        pytest.param(NEWS, False, [told(True)], (False, 0), id="dead"),
        pytest.param(NEWS, False, [BOTH, told(True)], (False, 0), id="dead while rank 0 saves"),
        pytest.param(NEWS, False, [BOTH, BOTH, told(False)], (False, 1), id="dead since"),
        pytest.param(NEWS, True, [None], (False, 0), id="elsewhere"),
        pytest.param({}, False, [NONE], (True, 0), id="nothing is left"),
        pytest.param(
            {}, False, [told(False, True), BOTH, NONE], (True, 1), id="the other's is left"
        ),
    ],
)
def test_a_worker_reports_when_all_are_there(
    metrics: dict[str, Any],
    in_epoch: bool,
    rounds: list[Any],
    expected: tuple[bool, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(_report, "_report", lambda *arguments: calls.append(arguments))
    report, left = Report(save=False), [*rounds]
    report._member, report._rank = SimpleNamespace(size=SIZE), 0  # type: ignore[assignment]
    monkeypatch.setattr(report, "_gather", lambda *_: left.pop(0))
    is_settled = report._report_with_others(metrics, in_epoch=in_epoch)
    if report._call is not None:
        report._call.result(60)
    assert (is_settled, len(calls)) == expected
    assert not left


def test_at_the_end_a_report_is_made_again_after_an_old_call_of_rank_0(reports: Reports) -> None:
    def end(report: Report, rank: int) -> None:
        report._unreported = NEWS if rank == 0 else {}
        if rank == 0:
            report._call = in_daemon("old", reports, {"epochs": 3})
        report.on_train_end()

    in_both(end)
    assert len(reports.made) == 2 * SIZE
    assert reports.made[SIZE:] == [NEWS] * SIZE


def test_a_worker_that_is_late_for_a_report_is_healed(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train

    here, third_epoch = threading.local(), threading.Event()
    context = SimpleNamespace(get_world_rank=lambda: here.rank)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(_report, "_PATIENCE", 0.0)

    def train(member: Member) -> Any:
        here.rank = member.rank

        def train_on(epoch: int, logs: Any) -> None:
            if member.rank == 1 and epoch == 3:
                third_epoch.set()

        def wait(epoch: int, logs: Any) -> None:
            if member.rank == 0 and epoch == 1:
                third_epoch.wait(60)

        def take_time(batch: int, logs: Any) -> None:
            if member.rank == 1 and third_epoch.is_set():
                time.sleep(0.05)  # it is in an epoch when the other is back

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        average_gradients(optimizer, member=member, min_results=1, timeout=1.0)
        model.compile(optimizer, "mse")
        late = keras.callbacks.LambdaCallback(
            on_epoch_begin=train_on, on_epoch_end=wait, on_train_batch_end=take_time
        )
        fit(model, 8, callbacks=[AverageLogs(), late, Report(save=False)], size=16)
        return [np.array(v.value) for v in model.trainable_variables]

    with ThreadPoolExecutor(SIZE) as pool:
        first, second = pool.map(train, LocalProcessGroup(SIZE).join_all())
    assert all(map(np.array_equal, first, second))
    assert [one["epochs"] for one in reports.made][-SIZE:] == [8] * SIZE
