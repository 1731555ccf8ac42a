"""The programs of `flatweights.examples`, each run once, small, in the Ray of these tests."""

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from reference import assert_mean, clean_environment
from safetensors.numpy import load_file

from flatweights import FlatWeights
from flatweights.examples import draw, explain, federated
from flatweights.ray import WorkerError
from flatweights.server import FedAvg

pytestmark = [pytest.mark.ray, pytest.mark.starts_actors]

GOAL = 100  # a policy without training gets 10 to 30
LAYERS = ("dense", "dense_1", "dense_2")

Program = Callable[..., str]


@pytest.fixture
def program(
    way: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Program:
    """Runs a program in an empty folder; returns its output."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *options: str) -> str:
        if name in ("cartpole_policy_gradient", "cartpole_replay", "digits_lbfgs"):
            import tensorflow as tf  # which stays as it is in this process

            threads = "set_intra_op_parallelism_threads"
            monkeypatch.setattr(tf.config.threading, threads, lambda count: None)
            monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
        curves = import_module(f"flatweights.examples.{name}").main(options)
        draw(Path("plot.png"), name, curves)
        assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
        return capsys.readouterr().out

    return run


def cells(output: str, row: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(row + "  ")]
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.mark.parametrize(
    "options",
    [
        ["--exchange=gradients", "--workers=1", "--graph"],
        pytest.param(["--exchange=weights", "--workers=1"], marks=pytest.mark.slow),
        pytest.param(["--exchange=weights", "--workers=2", "--graph"], marks=pytest.mark.slow),
        pytest.param(["--exchange=gradients", "--workers=2"], marks=pytest.mark.slow),
    ],
)
def test_linear_regression_finds_the_line(program: Program, options: list[str]) -> None:
    output = program("linear", *options)
    for parameter, value in (("slope", 0.1), ("intercept", 0.3)):
        assert float(cells(output, parameter)[1]) == pytest.approx(value, abs=1e-3)


@pytest.mark.slow
def test_a_result_off_the_line_fails(program: Program) -> None:
    with pytest.raises(SystemExit, match="more --steps"):
        program("linear", "--workers=1", "--steps=1")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "rounds"), [(1, 3), (2, 6)])
def test_plain_and_flat_actors_learn_the_same(program: Program, workers: int, rounds: int) -> None:
    output = program("keras_fit", f"--workers={workers}", f"--rounds={rounds}")
    rows = [
        cells(output, name) for name in ("Network, as in Ray's guide", "Network", "FlatNetwork")
    ]
    assert len({tuple(row[:2]) for row in rows}) == 1, "averages round alike, whoever makes them"
    assert float(rows[0][1]) > 0.95
    assert all(float(row[2].removesuffix(" ms")) > 0 for row in rows)


@pytest.mark.slow
def test_actors_fit_the_digits_as_one_process_does(program: Program) -> None:
    output = program("digits_lbfgs", "--actors=2", "--layers=3", "--iterations=80")
    found = re.search(r"the first 10 losses: the same within (\S+)", output)
    assert found
    assert float(found[1]) <= 1e-5
    alone, together = (cells(output, row) for row in ("one process", "2 actors"))
    assert float(alone[4]) > 0.95
    for accuracy in (3, 4):  # later, rounding differences have grown
        assert float(together[accuracy]) == pytest.approx(float(alone[accuracy]), abs=0.02)


# CartPole, judged by a policy in NumPy.


def mean_return(episodes: int, seed: int) -> float:
    """The mean return of the saved policy, with the likeliest actions."""
    saved = load_file("policy.safetensors")
    policy = {name.removeprefix("policy/"): array for name, array in saved.items()}
    environment = gymnasium.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        state, _ = environment.reset(seed=seed + episode)
        over = False
        while not over:
            hidden = state
            for layer in LAYERS:
                out = hidden @ policy[f"{layer}/kernel"] + policy[f"{layer}/bias"]
                hidden = np.tanh(out)
            state, reward, failed, cut, _ = environment.step(int(np.argmax(out)))
            total += float(reward)
            over = failed or cut
    return total / episodes


def play(program: Program, name: str, *options: str) -> str:
    return program(name, "--save=policy.safetensors", *options)


@pytest.mark.slow
def test_players_share_the_memory_of_the_weights(program: Program) -> None:
    output = play(program, "cartpole_policy_gradient", f"--goal={GOAL}", "--workers=1")
    assert "variables in shared memory: 6 of 6\n" in output
    assert mean_return(10, seed=1000) > 50


@pytest.mark.slow
def test_players_that_exchange_no_weights_end_with_the_same(program: Program) -> None:
    output = play(program, "cartpole_evolution", "--goal=45")
    saved = load_file("policy.safetensors")
    parts = [saved[f"{layer}/{part}"] for layer in LAYERS for part in ("kernel", "bias")]
    digest = sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    assert f"alike in driver and 2 players: {digest}" in output
    assert "no 18440 bytes of weights" in output
    assert mean_return(10, seed=1000) > 30


@pytest.mark.slow
def test_staleness_is_that_of_two_workers(program: Program) -> None:
    output = play(program, "cartpole_async", f"--goal={GOAL}")
    found = re.search(r"^staleness: (\S+) updates on average, (\d+) at most$", output, re.M)
    assert found
    # Between two gradients of one worker there is about one of the other.
    assert 0.5 < float(found[1]) <= float(found[2])


@pytest.mark.slow
def test_actors_take_the_newest_weights_of_a_learner(program: Program) -> None:
    output = program("cartpole_replay", "--goal=45")
    found = re.search(r"^(\d+) versions published, (\d+) times an actor took a newer", output, re.M)
    assert found
    assert int(found[1]) > 10
    assert int(found[2]) > 2  # more than the first one of each


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name", ["cartpole_policy_gradient", "cartpole_evolution", "cartpole_async"]
)
def test_a_program_reaches_400(program: Program, name: str, seed: int) -> None:
    play(program, name, f"--seed={seed}")
    assert mean_return(100, seed=1000) > 400


@pytest.mark.slow
def test_a_goal_that_is_not_reached_fails(program: Program) -> None:
    with pytest.raises(SystemExit, match=r"mean return \S+, not 475: it needs more --updates"):
        program("cartpole_policy_gradient", "--workers=1", "--updates=1")


# Federated averaging.

OPTIONS = Namespace(
    clients=40,
    concentration=1.0,
    deaths=1,  # in every round
    failing=0.4,
    fraction=0.25,
    hostile=0,
    local_epochs=1,
    personal=False,
    rounds=1,
    seed=0,
)


@pytest.fixture(scope="module")
def client(way: str) -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(federated.Client)
    handle = actor.remote(OPTIONS)
    yield handle
    ray.kill(handle)


def check_mean(client: Any, start: FlatWeights, clients: list[int], found: FlatWeights) -> None:
    """Compare with the weighted mean of the results of ``clients`` that train alone."""
    sizes = [float(len(labels)) for _, labels in federated.split_data(OPTIONS)[0]]
    vectors: list[NDArray[Any]] = []
    for one in clients:
        trained, _ = ray.get(client.train.remote(start, 0, one, "trains"))
        vectors.append(np.concatenate([array.reshape(-1) for array in trained.values()]))
    result = np.concatenate([array.reshape(-1) for array in found.values()])
    assert_mean(result, vectors, [sizes[one] for one in clients])


def test_clients_that_raise_are_listed_and_left_out(client: Any) -> None:
    start = ray.get(client.get_weights.remote()).copy()
    clients = [(3, "raises"), (17, "trains"), (8, "trains"), (30, "raises"), (5, "trains")]
    found = federated.play_round([client], start, 0, clients)
    assert list(found.failed) == [0, 3]
    assert all(isinstance(error, ConnectionError) for error in found.failed.values())
    assert "client 30 is off line" in str(found.failed[3])
    assert list(found.used) == [1, 2, 4]
    check_mean(client, start, [17, 8, 5], found.weights)


@pytest.mark.parametrize("deaths", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_averages_the_clients_that_neither_raise_nor_die(client: Any, deaths: int) -> None:
    options = Namespace(**{**vars(OPTIONS), "deaths": deaths})
    start = ray.get(client.get_weights.remote()).copy()
    drawn = federated.draw_clients(0, options)
    fates = [fate for _, fate in drawn]
    assert sorted(fates) == ["dies"] * deaths + ["raises"] * (4 - deaths) + ["trains"] * 6
    if deaths:
        # Some have answered before the process dies, and some wait behind it.
        assert "trains" in fates[: fates.index("dies")]
        assert "trains" in fates[fates.index("dies") :]
    server = FedAvg(start)
    accuracies, counts = federated.run_server([client], server, options)
    assert len(accuracies) == 1
    assert list(counts.values()) == [4 - deaths, deaths]
    survivors = [one for one, fate in drawn if fate == "trains"]
    check_mean(client, start, survivors, server.weights)


def test_the_last_layer_of_a_client_stays_in_its_own_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tensorflow as tf  # which stays as it is in this process

    threads = "set_intra_op_parallelism_threads"
    monkeypatch.setattr(tf.config.threading, threads, lambda count: None)
    actor = federated.Client(Namespace(**{**vars(OPTIONS), "personal": True}))
    start = actor.get_weights().copy()
    assert not [name for name in start if "head" in name]
    for client in (17, 5):
        found, _ = actor.train(start, 0, client, "trains", tmp_path)
        assert tuple(found) == tuple(start)
    with pytest.raises(ConnectionError, match="client 8 is off line"):
        actor.train(start, 0, 8, "raises", tmp_path)
    first = {file.stem: load_file(file) for file in tmp_path.iterdir()}
    assert {*first} == {"5", "17"}
    assert first["5"]["head/kernel"].shape == (32, 10)
    assert not np.array_equal(first["5"]["head/kernel"], first["17"]["head/kernel"])
    # It goes on from its own layer: its accuracy is that of the layer in the file.
    own = [actor.own_accuracy(start, 5, tmp_path) for _ in range(2)]
    actor.own_accuracy(start, 17, tmp_path)
    assert own == [actor.own_accuracy(start, 5, tmp_path)] * 2
    actor.train(start, 1, 17, "trains", tmp_path)
    second = {file.stem: load_file(file) for file in tmp_path.iterdir()}
    for name, value in second["5"].items():
        np.testing.assert_array_equal(value, first["5"][name])
    assert not np.array_equal(second["17"]["head/kernel"], first["17"]["head/kernel"])


@pytest.mark.slow
def test_both_servers_learn(program: Program) -> None:
    small = "--clients=10 --fraction=0.6 --failing=0.3 --deaths=20 --concentration=10 --rounds=20"
    output = program("federated", *small.split(), "--seed=1", "--workers=3")
    for server in ("FedAvg", "FedAdam"):
        last, mean, _, raised, died = cells(output, server)
        assert float(mean) >= 0.9
        assert f"round 20 of 20: accuracy {last}" in output
        assert (raised, died) == ("39", "1")  # two of six in each round


def test_the_table_tells_the_last_accuracy_from_the_mean_of_the_last_five_rounds() -> None:
    tail = [0.9, 0.9, 0.9, 0.92]
    row = {"last accuracy": "0.920", "mean of last 5": "0.906", "first 0.9": 2}
    assert federated.summarise([0.1, 0.91, *tail]) == row
    again = federated.summarise([0.95, 0.85, *tail])
    assert (again["mean of last 5"], again["first 0.9"]) == ("0.894", 1)
    assert list(federated.summarise([0.5, 0.7]))[1] == "mean of last 2"
    assert list(federated.summarise([0.5]).values()) == ["0.500", "0.500", "never"]


# A residual network.


@pytest.mark.slow
def test_a_residual_network_is_trained_evaluated_and_goes_on(program: Program) -> None:
    small = ("--num-residual-units=1", "--batch-size=8", "--steps=5", "--num-workers=1")
    rest = ("--eval-every=1", "--enough=0", "--checkpoint=weights.safetensors")
    output = program("resnet", *small, *rest, "--rounds=3", "--mode=graph", "--log-dir=logs")
    losses = [float(x) for x in re.findall(r"round \d of 3: loss (\S+?)[,\n]", output)]
    assert len(losses) == 3
    assert len(re.findall(r"^after round \d: loss \S+, accuracy 0\.\d+$", output, re.M)) == 3
    (events,) = Path("logs").glob("events.out.tfevents.*")
    logged = events.read_bytes()
    for name in (b"training/loss", b"images per second", b"evaluation/accuracy"):
        assert logged.count(name) == 3
    weights = FlatWeights.load("weights.safetensors")
    assert weights["sgd/iteration"] == 15
    assert all(np.isfinite(value).all() for value in weights.values())
    output = program("resnet", *small, *rest, "--rounds=4")
    assert re.findall(r"round (\d) of 4", output) == ["4"]
    assert FlatWeights.load("weights.safetensors")["sgd/iteration"] == 20


def test_a_ray_with_less_than_actors_reserve_is_refused(program: Program) -> None:
    with pytest.raises(SystemExit, match=r"^CPUs of Ray: expected at least 99, got 2$"):
        program("resnet", "--num-workers=99")
    with pytest.raises(SystemExit, match=r"^GPUs of Ray: expected at least 1, got 0$"):
        program("resnet", "--num-gpus=1")
    with pytest.raises(SystemExit, match=r"^CPUs of Ray: expected at least 64, got 2$"):
        program("keras_parallel", "--workers=64")


@pytest.mark.slow
def test_a_program_that_starts_ray_with_more_cpus_joins_a_cluster_that_is_there() -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", "flatweights.examples.keras_parallel", "--workers=64"],
        env=clean_environment(RAY_ADDRESS=address),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "CPUs of Ray: expected at least 64, got 2"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_defaults_learn_the_digits(program: Program, mode: str) -> None:
    program("resnet", f"--mode={mode}")


# Errors.


@ray.remote(num_cpus=0)
class Mortal:
    def __init__(self, wrong: bool = False) -> None:
        if wrong:
            raise ValueError("the data is missing")

    def stop(self) -> None:
        import os

        os._exit(1)


def death_of(actor: Any) -> Exception:
    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(actor.stop.remote())
    return caught.value  # type: ignore[no-any-return]


def test_a_dead_worker_is_one_line_with_the_remedy() -> None:
    line = explain(WorkerError({1: death_of(Mortal.remote())}))  # type: ignore[attr-defined]
    assert "\n" not in line
    assert line.startswith("rank 1: ActorDiedError: The actor died")
    assert line.endswith("Start again; if memory was short, with fewer workers.")


def test_an_error_in_a_constructor_is_told_in_a_line() -> None:
    line = explain(death_of(Mortal.remote(wrong=True)))  # type: ignore[attr-defined]
    assert "\n" not in line
    assert line.endswith("ValueError: the data is missing")
