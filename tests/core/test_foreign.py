"""Objects of other libraries, and objects that only claim to be arrays."""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flatweights as fw
from flatweights.server import FedAvg

TWO = np.ones(2)


class Raises:
    """An object whose conversion to an array raises, as for PyTorch's tensors with gradients."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error


class RaisesOnLook:
    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("closed")


class RaisesDLPack:
    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError("on another device")


class DLPackOfNothing:
    def __dlpack__(self, **options: Any) -> Any:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class ConvertsTo:
    """An object that converts to a tensor of strings, to Python objects, or to no array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("NumPy has another way; in TensorFlow's string tensors this aborts")


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = interface


class EndlessArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self)


def released() -> memoryview:
    view = memoryview(bytearray(16))
    view.release()
    return view


FOREIGN: dict[str, Any] = {
    "raises": Raises(RuntimeError("requires grad")),
    "raises KeyError": Raises(KeyError("x")),
    "raises AttributeError": Raises(AttributeError("x")),
    "raises on look": RaisesOnLook(),
    "raises in dlpack": RaisesDLPack(),
    "no capsule": DLPackOfNothing(),
    "strings as objects": ConvertsTo(np.array([b"a", b"b"], object)),
    "None for an array": ConvertsTo(None),
    "a list for an array": ConvertsTo([1.0, 2.0]),
    "a negative shape": Interface(shape=(-2,), typestr="<f8", data=(1, False), version=3),
    "Python objects": Interface(shape=(2,), typestr="|O", data=(1, False), version=3),
    "an endless conversion": EndlessArray(),
    "a released view": released(),
    "pointers": memoryview((ctypes.c_void_p * 2)()),
    "masked": np.ma.array([1.0, 2.0], mask=[False, True]),
}


def assign(value: Any) -> None:
    fw.FlatWeights({"w": TWO})["w"] = value


def add_second(value: Any) -> None:
    running = fw.RunningAverage()
    running.add(TWO)
    running.add(value)


SLOT = r"slot 0 '(w|0|a/w)': "
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "average": (lambda x: fw.average([x]), "source 0: "),
    "average after an array": (lambda x: fw.average([TWO, x]), "source 1: "),
    "average of dicts": (lambda x: fw.average([{"w": TWO}, {"w": x}]), f"source 1, {SLOT}"),
    "average of lists": (lambda x: fw.average([[x]]), f"source 0, {SLOT}"),
    "average of nested dicts": (lambda x: fw.average([{"a": {"w": x}}]), f"source 0, {SLOT}"),
    "flatten": (lambda x: fw.flatten({"w": x}), SLOT),
    "FlatWeights": (lambda x: fw.FlatWeights({"w": x}), SLOT),
    "Layout.of": (lambda x: fw.Layout.of([x]), SLOT),
    "assignment": (assign, SLOT),
    "norm": (fw.norm, "x: "),
    "axpy_": (lambda x: fw.axpy_(TWO.copy(), 1.0, x), "x: "),
    "RunningAverage": (lambda x: fw.RunningAverage().add(x), "source: "),
    "RunningAverage, again": (add_second, "source: "),
    "FedAvg": (lambda x: FedAvg(TWO).step(x), "average: "),
    "a weight": (lambda x: fw.average([TWO, TWO], weights=[1, x]), "weight 1: "),
    "a scale": (lambda x: fw.scale_(TWO.copy(), x), "a: "),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_cannot_be_an_array_is_refused_by_its_place(call: str) -> None:
    function, place = CALLS[call]
    for name, value in FOREIGN.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            function(value)
        assert re.match(f"{place}expected", str(raised.value)), (name, raised.value)


def test_results_are_not_written_behind_a_mask() -> None:
    def masked(values: Any) -> Any:
        return np.ma.array(values, mask=True)

    layout, packed = fw.Layout.of([TWO]), np.zeros(64, np.uint8)
    targets: dict[str, Callable[[], Any]] = {
        "out": lambda: fw.average([TWO, TWO], out=masked(TWO)),
        "out, slot 0 'w'": lambda: fw.average([{"w": TWO}], [1], out={"w": masked(TWO)}),
        "y": lambda: fw.scale_(masked(TWO), 2.0),
        "part 0": lambda: fw.unflatten_into([masked(TWO)], TWO),
        "flat": lambda: fw.unflatten(masked(TWO), layout),
        "buffer": lambda: fw.FlatWeights.wrap(masked(packed), layout),
        "source 1": lambda: fw.average([TWO, masked(TWO)], [1, 1]),
    }
    for place, call in targets.items():
        with pytest.raises(TypeError, match=f"^{place}: expected an array without masked elements"):
            call()
    with pytest.raises(TypeError, match="out: expected an array without masked elements"):
        fw.flatten([TWO], out=masked(TWO))


def test_an_array_whose_mask_hides_nothing_is_an_array() -> None:
    whole = np.ma.array([1.0, 2.0], mask=[False, False])
    assert fw.average([whole, TWO], out=whole).tolist() == [1.0, 1.5]
    assert fw.flatten([whole, whole]).tolist() == [1.0, 1.5, 1.0, 1.5]


def test_the_cause_is_kept() -> None:
    with pytest.raises(TypeError, match="got Raises: requires grad") as raised:
        fw.flatten([FOREIGN["raises"]])
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [MemoryError, SystemError])
def test_errors_that_no_argument_causes_stay_what_they_are(error: Any) -> None:
    with pytest.raises(error):
        fw.flatten([Raises(error("no room"))])


WEIGHTS: dict[str, tuple[Any, type[Exception], str]] = {
    "None among them": ([1, None], TypeError, "weight 1: expected a real number, got NoneType"),
    "a number": (3, TypeError, "weights: expected numbers in the order of the sources, got int"),
    "no number": (object(), TypeError, "weights: expected numbers .* got object"),
    "text": ("12", TypeError, "weights: expected numbers .* got a str"),
    "a set": ({1, 2}, TypeError, "weights: expected numbers .* got a set"),
    "another model": ({"w": 1}, TypeError, r"got a dict; pass all models in one list"),
    "its arrays": ([np.ones((8, 4)), np.ones(4)], TypeError, r"\(8, 4\); pass all models in one"),
    "a column": (np.ones((2, 1)), TypeError, r"weight 0: .* an array of shape \(1,\)"),
    "strings": (["1", 2], TypeError, "weight 0: expected a real number, got str"),
    "NumPy's strings": (np.array(["1", "2"]), TypeError, "weight 0: expected a real number"),
    "complex": ([1, 2j], TypeError, "weight 1: expected a real number, got complex"),
    "NumPy's complex": ([1, np.complex64(2)], TypeError, "weight 1: .* got complex64"),
    "0-d complex": ([1, np.array(2 + 3j)], TypeError, "weight 1: .* got complex128"),
    "dates": ([1, np.datetime64(1, "s")], TypeError, "weight 1: expected a real number"),
    "far too many": (
        range(1, 10**6),
        ValueError,
        "expected 2 weights, one per source, got 3 or more",
    ),
    "beyond a repr": ([10**5000, 1], ValueError, "weight 0: expected a finite weight, .* got inf"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_no_numbers_are_refused_by_position(case: str) -> None:
    weights, kind, message = WEIGHTS[case]
    with pytest.raises(kind, match=message):
        fw.RunningAverage().add_all([TWO, TWO], weights)
    with pytest.raises(kind, match=message):
        fw.average([TWO, TWO], weights)


def test_numbers_of_all_kinds_are_weights() -> None:
    kinds: list[Any] = [
        [np.float32(3), np.int64(1)],
        np.array([3, 1], np.float16),
        (np.array(3.0), True),
        iter([3, 1]),
    ]
    for weights in kinds:
        assert fw.average([np.zeros(1), np.ones(1)], weights).tolist() == [0.25]
