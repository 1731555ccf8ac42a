"""The size above which results bypass the caches, which their bits do not show."""

from pathlib import Path

import pytest
from reference import clean_environment, refusals, run_python

ABOVE = "import flatweights; print(flatweights.show_config()['bypasses caches above'])"
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def third_cache() -> str | None:
    """The size of the first processor's third-level cache according to Linux, in KiB: '32768K'."""
    for index in CACHES.glob("index*"):
        if (index / "level").read_text().strip() == "3":
            return (index / "size").read_text().strip()
    return None


@pytest.mark.skipif(third_cache() is None, reason="Linux tells of no third cache here")
def test_the_third_cache_is_the_default() -> None:
    size = third_cache()
    assert size is not None
    assert run_python(ABOVE).strip() == f"{int(size.removesuffix('K')) / 1024:g} MiB"


@pytest.mark.parametrize(
    ("nbytes", "told"), [("0", "0 MiB"), ("1572864", "1.5 MiB"), (str(2**40), "1048576 MiB")]
)
def test_the_environment_may_say_from_where(nbytes: str, told: str) -> None:
    env = clean_environment(FLATWEIGHTS_STREAM_ABOVE=nbytes)
    assert run_python(ABOVE, env).strip() == told


def test_an_empty_variable_says_nothing() -> None:
    env = clean_environment(FLATWEIGHTS_STREAM_ABOVE="")
    assert run_python(ABOVE, env) == run_python(ABOVE)


def test_a_malformed_size_is_an_error_before_anything_changes() -> None:
    texts = ["32M", "-1", "1.5", " 7", "7 ", "9" * 30]
    expected = "FLATWEIGHTS_STREAM_ABOVE: expected a number of bytes, got '{}'"
    printed = refusals("fw.show_config", "FLATWEIGHTS_STREAM_ABOVE", texts)
    assert printed == [[expected.format(text)] * 6 for text in texts]
