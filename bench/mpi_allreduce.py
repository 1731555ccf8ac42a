"""Open MPI's ``Allreduce`` with the bytes and ranks of a round; it sets and gets no variables.

``python -m bench.mpi_allreduce ELEMENTS SECONDS`` is one rank; ``mpirun -n 4`` starts four. The
first prints the seconds of each call as JSON.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    """Time calls until the time is up; check the first."""
    elements, budget = int(sys.argv[1]), float(sys.argv[2])
    world = MPI.COMM_WORLD
    vector = np.random.default_rng(world.rank).standard_normal(elements, np.float32)
    mean = np.empty_like(vector)
    world.Allreduce(vector, mean)
    expected = np.sum([v[:100] for v in world.allgather(vector[:100])], axis=0)
    assert np.allclose(mean[:100], expected, rtol=1e-4, atol=1e-5)
    seconds: list[float] = []
    end = time.perf_counter() + budget
    while world.bcast(time.perf_counter() < end or len(seconds) < 3):
        world.Barrier()
        begin = time.perf_counter()
        world.Allreduce(vector, mean)
        mean /= world.size
        seconds.append(time.perf_counter() - begin)
    if world.rank == 0:
        print(json.dumps(seconds))


if __name__ == "__main__":
    main()
