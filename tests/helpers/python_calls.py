"""The functions of Python that a call enters."""

import sys
from collections.abc import Callable
from typing import Any


def functions_in(call: Callable[[], object]) -> list[str]:
    """Return the functions of Python that ``call`` enters in this thread, after itself."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]
