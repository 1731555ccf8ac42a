"""Ctrl-C in `fit` while its step waits for another member; the coordinator is in this process."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from process_groups import with_sessions
from reference import clean_environment

from flatweights.ray.members._config import GroupConfig
from flatweights.ray.members._process_group import ProcessGroup

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MEMBER = """
import json, sys, time
from pathlib import Path
import keras, numpy as np
from flatweights.keras import average_gradients
from flatweights.ray.channels._member_channel import MemberChannel
from flatweights.ray.members._client import ChannelClient, Identity
from flatweights.ray.members._member import Member
from flatweights.ray.members._rendezvous import JoinReply

rank, session, address, token, has_timeout, stalled = json.loads(sys.argv[1])
stalled, token = Path(stalled), bytes.fromhex(token)
channel = MemberChannel(bytes.fromhex(address), token)
print(channel.mailbox.nonce.hex(), flush=True)
client = ChannelClient(None, Identity(token, "member"), channel, session)
member = Member("interrupted", client, JoinReply(rank, session, None), client.start(300.0))

def batches():
    for k in range(1000):
        if k == 5 and rank == 0:
            stalled.touch()
            while stalled.exists():
                time.sleep(0.01)
        if k == 5 and rank == 1 and has_timeout:
            while not stalled.exists():
                time.sleep(0.01)
            optimizer.apply.__self__.handle.timeout = 1.0
            member._turn.forget_steps()  # with the old one
        yield np.ones((4, 2)), np.ones(4)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = average_gradients(keras.optimizers.SGD(0.01), member=member)
model.compile(optimizer, "mse")
try:
    with member:
        model.fit(batches(), verbose=0)
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


@pytest.mark.parametrize("has_timeout", [False, True])
def test_an_interrupt_ends_fit_after_the_step_and_is_an_error_in_the_others(
    has_timeout: bool, tmp_path: Path
) -> None:
    stalled = tmp_path / "stalled"
    group = ProcessGroup("interrupted", GroupConfig.of(2), "here", None)
    entered = with_sessions(group, 0, 1)
    members = []
    for entry, ticket in entered:
        assert ticket.address is not None
        token = entry.token.hex()
        told = [*ticket[:2], ticket.address.hex(), token, has_timeout, str(stalled)]
        command = [sys.executable, "-c", MEMBER, json.dumps(told)]
        pipe = subprocess.PIPE
        members.append(subprocess.Popen(command, stdout=pipe, text=True, env=clean_environment()))
    outputs = []
    for (entry, _), process in zip(entered, members, strict=True):
        assert process.stdout is not None
        outputs.append(process.stdout)
        group.attach(entry.token, bytes.fromhex(outputs[-1].readline()))
    thread = threading.Thread(target=group.run)
    thread.start()
    channel = group.rendezvous.sessions[1].channel
    while not (stalled.exists() and channel is not None and channel.is_answered):
        assert members[0].poll() is None
        time.sleep(0.01)  # until rank 1 waits for rank 0
    members[1].send_signal(signal.SIGINT)
    if not has_timeout:  # the step ends once rank 0 comes to it
        stalled.unlink()
    kind, text = json.loads(outputs[1].readline())
    # Which comes first, the interrupt or the error of the step; or TensorFlow's error about both.
    assert "KeyboardInterrupt" in kind + text or "rank 0" in text, (kind, text)
    assert members[1].wait() == 0
    stalled.unlink(missing_ok=True)
    kind, text = json.loads(outputs[0].readline())
    # If it comes while TensorFlow makes the step's error, pybind11's RuntimeError names both.
    left = re.compile("WorkerError: rank 1 left with (KeyboardInterrupt|.*BY KeyboardInterrupt)")
    assert left.search(text), (kind, text)
    assert members[0].wait() == 0
    thread.join()  # the process group has ended
    for output in outputs:
        output.close()
