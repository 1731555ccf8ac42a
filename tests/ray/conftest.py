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
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
