"""Keras `fit` on several workers of Ray Train, by adding two lines.

Each worker runs `train`: it compiles a plain Keras model and fits it to its part of the data. With
``--average gradients`` the workers average the gradient of every batch, so that together they take
the steps of one worker with all of the data: the table compares the two. With ``--average
weights`` each trains by itself, and their weights are averaged after every epoch. `AverageLogs`
shows the losses of all workers to the other callbacks. `Report` reports each epoch to Ray Train,
with the model of rank 0; if a worker dies, Ray Train starts all of them again, and they go on from
there. With ``--replace`` it starts one worker in the place of the dead one, which gets the state of
the others while they go on. ``--kill`` kills a worker in the second epoch, to show either.

The seconds are those of the epochs. A run takes longer: the workers start, and each report waits up
to two seconds for Ray's controller (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S).

    flatweights examples keras_parallel
    flatweights examples --plot parallel.png keras_parallel --workers 4 --average weights
    flatweights examples keras_parallel --workers 3 --epochs 300 --replace --kill

For a model of your own, change `compile_model`; for your data, the first lines of `train`.
"""

import argparse
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import train as ray_train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flatweights.ray import ReplaceWorkers

BATCH = 64  # of all workers together
ENOUGH = 0.9


def compile_model(seed: int) -> Any:
    """Return a network, ready to be fitted."""
    import keras

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def killer(folder: str) -> Any:
    """Return a callback that kills this process in the second epoch, once in all attempts."""
    import keras

    def kill(epoch: int, logs: Any) -> None:
        marker = Path(folder, "killed")
        if epoch == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return keras.callbacks.LambdaCallback(on_epoch_begin=kill)


def train(config: Mapping[str, Any]) -> None:
    """Train as one of the workers."""
    import tensorflow as tf

    from flatweights.keras import AverageLogs, AverageWeights, Report, average_gradients

    tf.config.threading.set_intra_op_parallelism_threads(1)  # the workers share the cores
    context = ray_train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=config["seed"])
    train_x, test_x, train_y, test_y = parts
    mine = slice(rank, len(train_y) // BATCH * BATCH, workers)  # equal shares for all workers

    model = compile_model(config["seed"])
    epochs = Report.resume(model)  # more than 0, if this worker was started again
    callbacks: list[Any] = [AverageLogs(), Report()]
    if config["average"] == "gradients":
        average_gradients(model.optimizer, min_results=1 if config["replace"] else None)
    else:
        callbacks.insert(0, AverageWeights())
    if config["kill"] and rank == workers - 1 > 0:
        callbacks.append(killer(config["folder"]))

    model.fit(
        train_x[mine],
        train_y[mine],
        batch_size=BATCH // workers,
        epochs=config["epochs"],
        initial_epoch=epochs,
        shuffle=False,
        validation_data=(test_x, test_y),
        verbose=0,
        callbacks=callbacks,
    )


def run(workers: int, config: Mapping[str, Any], folder: str) -> Any:
    """Train with this number of ``workers``; return Ray Train's table of the epochs."""
    options: dict[str, Any] = {
        "train_loop_config": {**config, "folder": folder},
        "scaling_config": ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        "run_config": RunConfig(
            storage_path=folder, failure_config=FailureConfig(max_failures=2), name=str(workers)
        ),
    }
    if config["replace"]:
        trainer = DataParallelTrainer(train, backend_config=ReplaceWorkers(), **options)
    else:
        trainer = TensorflowTrainer(train, **options)
    # After a restart from a checkpoint, an epoch may be reported again.
    return trainer.fit().metrics_dataframe.drop_duplicates("epochs", keep="last")


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the program; return curves. It fails if too little is learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="workers, compared with one; default: %(default)s")
    add("--epochs", type=int, default=10, help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the data and the first weights")
    ways = ["gradients", "weights"]
    add("--average", choices=ways, default=ways[0], help="values to average; default: %(default)s")
    add("--replace", action="store_true", help="replace a worker that dies, and no other")
    add("--kill", action="store_true", help="kill a worker in the second epoch")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"--seed: expected 0 to {2**31 - 1}, got {options.seed}")
    if options.replace and options.average != "gradients":
        parser.error("expected --average gradients with --replace: a new worker gets their state")
    if min(options.workers, options.epochs) < 1 or BATCH % options.workers:
        parser.error(f"expected at least 1 epoch, and workers that share {BATCH}: {vars(options)}")
    connect = partial(ray.init, ignore_reinit_error=True, logging_level="ERROR")
    try:
        connect(num_cpus=max(options.workers, os.cpu_count() or 1))
    except ValueError:  # there is a cluster (RAY_ADDRESS, `ray start`), with CPUs of its own
        connect()
    available = ray.cluster_resources().get("CPU", 0)
    if available < options.workers:  # else Ray Train waits for ever
        raise SystemExit(f"CPUs of Ray: expected at least {options.workers}, got {available:g}")
    losses = {}
    print(f"{'':12}{'epochs':>8}{'last loss':>12}{'accuracy':>10}{'seconds':>9}", flush=True)
    for workers in sorted({1, options.workers}):
        with tempfile.TemporaryDirectory() as folder:
            epochs = run(workers, vars(options), folder)
        name = f"{workers} workers"
        reported = [int(epoch) for epoch in epochs["epochs"]]
        losses[name] = (reported, [float(loss) for loss in epochs["loss"]])
        missing = sorted({*range(1, options.epochs + 1)} - {*reported})
        accuracy = float(epochs["val_accuracy"].iloc[-1])
        cells = f"{len(epochs):8}{losses[name][1][-1]:12.4f}{accuracy:10.3f}"
        print(f"{name:12}{cells}{sum(epochs['seconds']):9.1f}", flush=True)
        if missing:
            print(f"{'':12}without a report: epochs {missing[0]} to {missing[-1]}", flush=True)
    if accuracy < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --epochs")
    return {"loss by epoch": losses}


if __name__ == "__main__":
    main()
