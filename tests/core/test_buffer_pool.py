"""Memory of large results is reused, within a bound, and never while it is in use."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from reference import clean_environment, run_python

import flatweights as fw
from flatweights import _core

SIZE = 1 << 20  # bytes; large enough to be kept
MOST_KEPT = _core.get_pool_limit()


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[Any]:
    gc.collect()
    fw.clear_pool()
    yield
    fw.clear_pool()


def address(array: Any) -> Any:
    return array.__array_interface__["data"][0]


def test_a_dropped_result_gives_its_memory_to_the_next() -> None:
    sources = [np.ones(SIZE // 4, np.float32)] * 2
    first = fw.average(sources)
    place = address(first)
    del first
    assert _core.pool_bytes() >= SIZE
    second = fw.average(sources)
    assert address(second) == place
    assert _core.pool_bytes() == 0
    assert (second == 1).all()


def test_memory_in_use_is_not_given_away() -> None:
    sources = [np.ones(SIZE // 4, np.float32)] * 2
    first = fw.average(sources)
    view = first[7:9]
    del first
    gc.collect()
    results = [fw.average([source * 0]) for source in sources]
    assert all((result == 0).all() for result in results)
    assert view.tolist() == [1, 1]


def test_every_kind_of_result_comes_from_the_pool() -> None:
    parts = [np.ones((64, 4096), np.float32), np.ones(3, np.float32)]
    for make in (
        lambda: fw.flatten(parts),
        lambda: fw.average([parts[0]]),
        lambda: fw.FlatWeights(parts),
        lambda: fw.FlatWeights(parts).copy(),
        lambda: fw.average([fw.FlatWeights(parts)]),
    ):
        fw.clear_pool()
        made = make()
        before = _core.pool_bytes()
        del made
        gc.collect()
        assert _core.pool_bytes() > before


def test_clear_pool_gives_everything_back() -> None:
    del_me = fw.flatten([np.ones(SIZE)])
    del del_me
    assert _core.pool_bytes() > 0
    fw.clear_pool()
    assert _core.pool_bytes() == 0


def test_small_results_are_not_kept() -> None:
    small = fw.flatten([np.ones(100)])
    del small
    assert _core.pool_bytes() == 0


def test_what_is_kept_is_bounded() -> None:
    # Never touched, so no memory is behind these.
    buffers = [_core.empty(MOST_KEPT // 4 - i * SIZE) for i in range(8)]
    while buffers:
        buffers.pop()
        assert _core.pool_bytes() <= MOST_KEPT
    assert _core.pool_bytes() > 0
    huge = _core.empty(MOST_KEPT + SIZE)
    del huge
    assert _core.pool_bytes() <= MOST_KEPT


LIMIT = "import flatweights as fw; print(fw.show_config()['pool keeps up to'])"


def test_without_a_word_a_small_share_of_the_memory_is_kept_at_most() -> None:
    limit = run_python(LIMIT).split()
    assert limit[1] == "MiB"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    assert 0 < int(limit[0]) * 2**20 <= min(2**30, pages / 32), "in whole MiB"


@pytest.mark.parametrize(("nbytes", "kept"), [("0", 0), (str(3 * SIZE), 3), (str(1 << 40), 4)])
def test_the_environment_may_say_how_much_is_kept(nbytes: str, kept: int) -> None:
    code = f"""
import flatweights as fw
from flatweights import _core
held = [_core.empty({SIZE}) for _ in range(4)]
del held[:]
print(_core.pool_bytes() // {SIZE}, fw.show_config()["pool keeps up to"])
"""
    env = clean_environment(FLATWEIGHTS_POOL_BYTES=nbytes)
    assert run_python(code, env).strip() == f"{kept} {int(nbytes) / 2**20:.10g} MiB"


def test_a_malformed_bound_is_an_error() -> None:
    texts = ["1G", "-1", "1.5", " 7", "9" * 30]
    code = f"""
import os
import numpy as np
import flatweights as fw
from flatweights import _core
many, out = [np.ones(64)] * 17, np.empty(64)
def average():  # of so many that it needs scratch memory
    fw.average(many, out=out)
for text in {texts!r}:
    os.environ["FLATWEIGHTS_POOL_BYTES"] = text
    for call in (fw.show_config, lambda: _core.empty({SIZE}), average):
        try:
            call()
        except ValueError as error:
            print(error)
"""
    expected = "FLATWEIGHTS_POOL_BYTES: expected a number of bytes, got '{}'"
    printed = run_python(code, clean_environment(FLATWEIGHTS_STREAM_ABOVE="1")).splitlines()
    assert printed == [expected.format(text) for text in texts for _ in range(3)]


def test_after_an_error_nothing_that_was_begun_is_lost() -> None:
    sources = [np.ones(SIZE), np.ones(SIZE - 1)]
    for _ in range(3):
        with pytest.raises(ValueError, match="source 1"):
            fw.average(sources)
    gc.collect()
    assert _core.pool_bytes() <= 2 * SIZE * 8, "one buffer, used again"


def test_an_impossible_size_raises_and_what_was_kept_makes_room_first() -> None:
    kept = fw.flatten([np.ones(SIZE)])
    del kept
    for nbytes in (2**64 - 1, 1 << 60):
        with pytest.raises(MemoryError):
            _core.empty(nbytes)
    assert _core.pool_bytes() == 0


def test_results_are_aligned_for_tensorflow_and_cache_lines() -> None:
    for nbytes in (0, 1, 100, SIZE, 5 * SIZE + 1):
        assert address(_core.empty(nbytes)) % 64 == 0


def test_a_forked_child_can_use_the_pool() -> None:
    code = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "import numpy as np, flatweights as fw\n"
        "fw.flatten([np.ones(1 << 18)])\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    ok = fw.flatten([np.ones(1 << 18)]).sum() == 1 << 18\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    assert run_python(code) == ""
