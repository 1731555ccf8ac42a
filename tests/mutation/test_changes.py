"""The wrong changes are of texts that are there; `python -m tests.mutation` makes them."""

from pathlib import Path

from tests.mutation.changes import CHANGES

ROOT = Path(__file__).parents[2]


def test_each_change_is_of_a_text_that_is_there_once_and_names_tests_that_exist() -> None:
    lost = [one for one in CHANGES if (ROOT / one.file).read_text().count(one.old) != 1]
    assert [(one.file, one.old) for one in lost] == []
    tests = {test for one in CHANGES for test in one.tests}
    assert [test for test in tests if not (ROOT / test).exists()] == []
