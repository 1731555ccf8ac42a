import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _cluster(ray_folder: Path) -> Iterator[None]:
    """Ray on two CPUs; its workers can import the test modules, and TensorFlow is quiet in them."""
    found = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as inherited:
        inherited.setenv("PYTHONPATH", os.pathsep.join(found))
        inherited.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        for attempts_left in (2, 1, 0):
            try:
                ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
                break
            except Exception:
                # A raylet gives its agent, a Python process, 15 s to start, and else aborts:
                # too few on a machine that is very busy, and there is no setting.
                ray.shutdown()
                if not attempts_left:
                    raise
    yield
    ray.shutdown()
