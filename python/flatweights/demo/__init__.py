"""`flatweights demo`: handwritten digits, trained data-parallel in Ray actors.

The same training runs twice in the same actors, round about: once with what is exchanged in
one buffer, averaged by `flatweights`, and once with the loop from Ray's guide over dicts of
arrays. Or, with ``kill_worker``, it runs our way alone, one worker's process is killed half-way,
and it goes on. Importing this package imports neither TensorFlow nor Ray; `run` does.
"""

from flatweights.demo._options import SCHEDULES, DemoError, Options

__all__ = ["SCHEDULES", "DemoError", "Options", "run"]


def run(options: Options) -> None:
    """Train, and print progress, a table and the weights' digest to the standard output.

    Starts Ray on this machine and stops it again, also when interrupted.

    Args:
        options: What to train, and how.

    Raises:
        DemoError: If Ray did not start, a worker failed or the plot could not be written.
        KeyboardInterrupt: On SIGINT, once Ray has been stopped.
    """
    from flatweights.demo._run import run_demo

    run_demo(options)
