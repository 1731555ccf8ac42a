"""What outlives `ray.shutdown` starts no new Ray, which almost every call of Ray would do.

Nor does it wait in a call of Ray, which then ends the process silently, with code 1.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"

PROGRAM = """
import gc, os, sys, threading, time, traceback
import numpy as np
import ray
from flatweights.ray import Publisher, Subscriber, WorkerGroup, join
from ray_cluster import start_lean_ray
from ray_workers import PlainWorker

def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)

def threads_in_ray():
    root = os.path.dirname(ray.__file__)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {names.get(thread, ""): traceback.extract_stack(frame)
              for thread, frame in sys._current_frames().items()}
    return {name for name, stack in stacks.items() if name.startswith("flatweights")
            and any(entry.filename.startswith(root) for entry in stack)}

node = start_lean_ray(num_cpus=4)
model = {"w": np.zeros(3, np.float32)}
publisher = Publisher("net", model)
publisher.publish()
subscriber = Subscriber("net", {"w": np.ones(3, np.float32)})
group = WorkerGroup.create(PlainWorker, 1)
loop = group.as_completed("get_weights")
next(loop)
os.environ["FLATWEIGHTS_RAY"] = "store"
member = join("pair", rank=0, size=1)
member.average(model)
pulling = [Subscriber("net", {"w": np.ones(3, np.float32)}) for _ in range(2)]
assert pulling[0].transport == "store"
end = time.monotonic() + 30
while threads_in_ray() and time.monotonic() < end:
    time.sleep(0.05)  # in a short call, perhaps
assert not threads_in_ray(), threads_in_ray()

inits = []
ray.init = lambda *args, **kwargs: inits.append(1)
ray.shutdown()
node.kill_all_processes(check_alive=False)
publisher.publish()  # its memory is there; the watch of the subscriber finds nothing new
assert subscriber.update() and not subscriber.update()
time.sleep(1.5)  # the threads of publisher and subscribers look around every half second
for call in (lambda: group.average(), lambda: next(loop), lambda: member.average(model),
             lambda: Publisher("other", model), lambda: group.add(1), lambda: group.remove(0),
             lambda: group.publish(model), lambda: group.restore()):
    assert "Ray is not initialized" in error_of(call), error_of(call)
member.leave()
group.shutdown()
del publisher, subscriber, pulling, group, member, loop
gc.collect()
print("calls of ray.init:", len(inits))
"""


LATER = """
import ray
import threading
import time
import numpy as np
from flatweights.ray import Publisher, Subscriber, WorkerGroup, join
from ray_workers import PlainWorker

def check(*calls):
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "an earlier session of Ray" in str(error), error
        else:
            raise AssertionError("no error")

options = dict(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.init(**options)
group = WorkerGroup.create(PlainWorker, 1)
group.average()
publisher = Publisher("net", np.ones(3))
publisher.publish()
subscriber = Subscriber("net", np.zeros(3))
assert subscriber.update()
reader = Subscriber("net", np.zeros(3))
idle = Subscriber("net", np.zeros(3))
assert idle.update()
joined = []

def wait():
    try:
        join("nobody else", rank=0, size=2, timeout=3)
    except RuntimeError as error:
        joined.append(str(error))

waits = threading.Thread(target=wait)
waits.start()
time.sleep(2)
ray.shutdown()
waits.join()
assert "Ray is not initialized" in joined[0], joined
publisher.publish()
assert subscriber.update()
publisher.publish()
assert idle.update()
ray.init(**options)
check(subscriber.update, reader.read)
end = time.monotonic() + 60
while time.monotonic() < end:  # nothing is new, but its thread looks around every second
    try:
        idle.update()
    except RuntimeError:
        break
    time.sleep(0.05)
check(group.average, lambda: group.add(1), lambda: group.remove(0),
      publisher.publish, subscriber.update, idle.read)
group.shutdown()
print("no error")
"""


@pytest.mark.slow
def test_nothing_starts_a_new_ray() -> None:
    assert output_of(PROGRAM) == "calls of ray.init: 0\n"


@pytest.mark.slow
def test_what_is_of_an_earlier_session_says_so() -> None:
    assert output_of(LATER) == "no error\n"


def output_of(program: str) -> str:
    # A folder of its own, since the Ray of other tests may be in theirs.
    with tempfile.TemporaryDirectory(
        prefix="fw-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(HELPERS), "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout
