"""The core refuses arguments that do not fit together, although Python never passes such.

Its functions move memory, so they check again what Python has checked, if that protects memory.
Checks of users' arguments are tested with the public functions.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flatweights import Layout, _core

SIZE = 3
ARRAY = Layout([""], [(SIZE,)], [np.float32], named=False).core
HALF = Layout([""], [(SIZE,)], [np.float16], named=False).core
TWO = Layout.of({"a": np.float32(0), "b": np.float64(0)}).core
PACKED = np.zeros(64, np.uint8)


def vector(value: float = 0.0) -> Any:
    return np.full(SIZE, value, np.float32)


def order(first: int, last: int, nearest: int = 0) -> None:
    _core.order_into(ARRAY, False, [vector()], [[vector()], [vector()]], first, last, nearest)


def advance(model: Any, difference: Any, *pairs: Any, held: Any = (1,)) -> None:
    _core.advance(ARRAY, model, HALF, difference, list(pairs), list(held), 2)


def running(memory: Any) -> _core.RunningSum:
    return _core.RunningSum(ARRAY, memory, (1.0, 1.0, 1.0))


def read_publication(nbytes: int) -> None:
    publication = _core.Publication(64)
    _core.PublicationReader(*publication.control, *publication.data, nbytes, 0)


def busy(command: bytes = b"") -> _core.Mailbox:
    """Return a mailbox whose worker runs ``command``."""
    mailbox = _core.Mailbox()
    mailbox.post(command, 0)
    assert mailbox.wait(0.0, 1)
    return mailbox


def read(kind: int, count: int, *extents: tuple[int, int, int, int]) -> None:
    header = struct.pack("II", kind, count)
    busy(header + b"".join(struct.pack("IIQQ", *extent) for extent in extents)).read_message(
        True, {}
    )


BLOCK = np.zeros(100, np.uint8)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "ranks that are none": (lambda: order(1, 1), ValueError, "expected ranks below"),
    "ranks beyond the sources": (lambda: order(0, 3), ValueError, "expected ranks below"),
    "more nearest than sources": (lambda: order(0, 2, 3), ValueError, "expected ranks below"),
    "no source": (lambda: _core.distances(ARRAY, False, []), IndexError, "out of range"),
    "more sources than are counted": (
        lambda: _core.order_into(ARRAY, False, [vector()], [[vector()]] * 65536, 0, 1, 0),
        ValueError,
        "expected at most 65535 sources, got 65536",
    ),
    "a source of fewer parts": (
        lambda: _core.first_nonfinite(TWO, False, [vector()], 1),
        ValueError,
        "source 1: expected 2 parts, got 1",
    ),
    "two packed buffers": (
        lambda: _core.average_into(TWO, True, [PACKED.repeat(2)], [[PACKED, PACKED]], [1.0]),
        ValueError,
        "source 0: expected one packed buffer",
    ),
    "fewer weights than sources": (
        lambda: _core.average_into(ARRAY, False, [vector()], [[vector()], [vector()]], [1.0]),
        ValueError,
        "expected one weight per source",
    ),
    "a sum of fewer weights": (
        lambda: _core.RunningSum(ARRAY).add(False, [[vector()], [vector()]], [1.0]),
        ValueError,
        "expected one weight for each source",
    ),
    "sums of other sizes": (
        lambda: _core.RunningSum(ARRAY).merge(_core.RunningSum(TWO)),
        ValueError,
        "expected another sum over parts of the same sizes",
    ),
    "memory of a sum": (
        lambda: running(np.zeros(2)),
        ValueError,
        r"memory: expected contiguous float64 \(\d+,\)",
    ),
    "rounding errors within the difference": (
        lambda: _core.encode_difference(
            ARRAY, False, [vector()], HALF, BLOCK[:64], None, np.zeros(64, np.uint8), BLOCK[8:72]
        ),
        ValueError,
        "expected buffers that do not overlap",
    ),
    "a difference within the model": (
        lambda: advance(BLOCK[:64], BLOCK[8:72]),
        ValueError,
        "difference: overlaps the model",
    ),
    "a copy within its source": (
        lambda: advance(BLOCK[:64], None, (BLOCK[:64], BLOCK[8:72])),
        ValueError,
        "expected buffers that do not overlap",
    ),
    "no version": (
        lambda: advance(PACKED.copy(), None, held=()),
        ValueError,
        "expected a list of one version",
    ),
    "fewer names": (
        lambda: TWO.put_packed_views(np.zeros(128, np.uint8), ("a",), {}),
        ValueError,
        "names: expected 2, got 1",
    ),
    "a slot too many": (
        lambda: TWO.cast_for_slot(2, np.zeros(1), None),
        IndexError,
        "no such slot",
    ),
    "fewer shapes": (
        lambda: _core.Layout(("a",), [], [np.dtype("f4")]),
        ValueError,
        "expected one shape and one dtype per name, got 1 names, 0 shapes, 1 dtypes",
    ),
    "fewer sources": (
        lambda: _core.move_parts([vector(), vector()], [vector()]),
        ValueError,
        "expected 2 sources, got 1",
    ),
    "an answer to no command": (
        lambda: _core.Mailbox().answer_with(b"", 0),
        RuntimeError,
        "mailbox: no command",
    ),
    "a long answer": (
        lambda: busy().answer_with(bytes(_core.MAILBOX_BYTES + 1), 0),
        ValueError,
        "answer: expected at most",
    ),
    "a segment too many": (
        lambda: _core.Mailbox().add_hold(True, 64),
        ValueError,
        "segment: expected less than 64, got 64",
    ),
    "a message without a header": (
        lambda: busy(b"abc").read_message(True, {}),
        ValueError,
        "message: expected a header, got 3 bytes",
    ),
    "a message of fewer extents": (
        lambda: read(0, 2, (0, 0, 0, 0)),
        ValueError,
        "message: expected 2 extents in 24 bytes",
    ),
    "an extent in a segment too many": (
        lambda: read(0, 1, (64, 0, 0, 0)),
        ValueError,
        "message: expected a segment below 64, got 64",
    ),
    "a publication too large": (
        lambda: _core.Publication(2**48 + 1),
        ValueError,
        r"nbytes: expected at most 2\*\*48, got 281474976710657",
    ),
    "a reader of more than there is": (
        lambda: read_publication(2**64 - 1),
        ValueError,
        r"nbytes: expected at most 2\*\*48, got 18446744073709551615",
    ),
    "too much offered": (
        lambda: _core.Segment(10).offer(1 << 40),
        ValueError,
        "offer: expected at most",
    ),
}


def test_the_core_refuses_what_does_not_fit_together() -> None:
    for case, (call, error, match) in REFUSED.items():
        print(case)
        with pytest.raises(error, match=match):
            call()
