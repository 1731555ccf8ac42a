"""Keras `fit` on several workers of Ray Train: two lines more than on one.

Each worker runs `train`: it compiles a plain Keras model and fits it to its part of the data. With
``--average gradients`` the workers average the gradient of every batch, so that together they take
the steps of one process with all of the data: the table compares the two. With ``--average
weights`` each trains by itself, and their weights are averaged after every epoch. `AverageLogs`
shows the loss of all workers to the other callbacks. After each epoch rank 0 saves the model; if a
worker dies, Ray Train starts all of them again, and they go on from there.

    python -m flatweights.examples.keras_parallel
    python -m flatweights.examples.keras_parallel --workers 4 --average weights --plot parallel.png

For a model of your own, change `compile_model`; for your data, the first lines of `train`.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.data_parallel_trainer import DataParallelTrainer

from flatweights import examples

BATCH = 64  # of all workers together
ENOUGH = 0.9
FILE = "model.keras"


def compile_model(seed: int) -> Any:
    """Return a network, ready to be fitted."""
    import keras

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def train(config: Mapping[str, Any]) -> None:
    """Train as one of the workers."""
    examples.prepare_tensorflow()
    import keras

    from flatweights.keras import AverageLogs, AverageWeights, average_gradients

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    digits, test = examples.load_digits(config["seed"])
    size = BATCH // workers
    mine = slice(rank, len(digits.labels) // BATCH * BATCH, workers)  # as many for every worker

    class Report(keras.callbacks.Callback):  # type: ignore[misc]
        """Reports each epoch to Ray Train, with the model of rank 0."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    self.model.save(Path(folder, FILE))
                    checkpoint = Checkpoint.from_directory(folder)
                    checkpoint.set_metadata({"epochs": epoch + 1})
                ray.train.report({"epochs": epoch + 1, **logs}, checkpoint=checkpoint)

    model, epochs = compile_model(config["seed"]), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:  # all workers were started again
        epochs = checkpoint.get_metadata()["epochs"]
        with checkpoint.as_directory() as folder:
            model = keras.models.load_model(Path(folder, FILE))

    callbacks = [AverageLogs(), Report()]
    if config["average"] == "gradients":
        average_gradients(model.optimizer)
    else:
        callbacks.insert(0, AverageWeights())

    model.fit(
        digits.images[mine],
        digits.labels[mine],
        batch_size=size,
        epochs=config["epochs"],
        initial_epoch=epochs,
        shuffle=False,
        validation_data=test,
        verbose=0,
        callbacks=callbacks,
    )


def run(workers: int, options: Mapping[str, Any], folder: str) -> Any:
    """Train with so many workers; return Ray Train's result."""
    trainer = DataParallelTrainer(
        train,
        train_loop_config=dict(options),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=f"{workers}-workers",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    return trainer.fit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; fail if too little is learned."""
    parser = examples.make_parser(
        __doc__,
        "the losses",
        workers=(2, "processes that train together; compared with one"),
        epochs=(10, "times that the data is gone through"),
    )
    parser.add_argument(
        "--average", choices=["gradients", "weights"], default="gradients", help="what travels"
    )
    options = parser.parse_args(arguments)
    if BATCH % options.workers:
        parser.error(f"--workers: expected a divisor of the batch of {BATCH}")
    examples.start_ray(options.workers + 1, CPU=options.workers)
    rows, losses = [], {}
    for workers in (1, options.workers):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            result = run(workers, vars(options) | {"plot": None}, folder)
            history = result.metrics_dataframe
        name = f"{workers} worker{'s' if workers > 1 else ''}"
        losses[name] = (list(history["epochs"]), list(history["loss"]))
        last = history.iloc[-1]
        rows.append(
            {
                "": name,
                "epochs": int(last["epochs"]),
                "last loss": f"{last['loss']:.4f}",
                "accuracy": f"{last['val_accuracy']:.3f}",
                "seconds": f"{time.perf_counter() - begin:.0f}",
            }
        )
    panel = examples.Panel("loss", "epoch", losses, "log")
    examples.report(rows, options.plot, f"Keras on Ray Train: {options.average} averaged", panel)
    if float(str(rows[-1]["accuracy"])) < ENOUGH:
        raise SystemExit(f"accuracy below {ENOUGH}: it needs more --epochs")


if __name__ == "__main__":
    examples.run(main)
