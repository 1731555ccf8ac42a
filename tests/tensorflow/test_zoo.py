"""Every architecture of `keras.applications` of reasonable size, of Keras 3 and `tf_keras`."""

import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras
from tf_elsewhere import Elsewhere, application, give_application
from tf_kinds import value

from flatweights.tensorflow import TensorFlowVariables

# More than 100 million parameters.
LARGE = {
    *("ConvNeXtLarge", "ConvNeXtXLarge", "EfficientNetV2L", "RegNetX320", "RegNetY320"),
    *("ResNetRS270", "ResNetRS350", "ResNetRS420"),
}


def architectures() -> Iterator[Any]:
    for module in (keras, tf_keras):
        for name, build in sorted(vars(module.applications).items()):
            if name[0].isupper() and callable(build) and name not in LARGE:
                yield pytest.param(module.__name__, name, id=f"{module.__name__}-{name}")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models are large: one way of moving weights is enough here."""
    monkeypatch.setenv("FLATWEIGHTS_TENSORFLOW", "bound")
    return "bound"


@pytest.mark.slow  # smaller models with the same layers go to another process elsewhere
@pytest.mark.parametrize(("module", "name"), list(architectures()))
def test_an_architecture_goes_round_and_to_another_process(
    module: Any, name: Any, elsewhere: Elsewhere
) -> None:
    elsewhere.start(give_application, module, name)
    model = application(module, name)
    weights = TensorFlowVariables(model)
    theirs = elsewhere.result()
    assert [id(v) for v in weights.variables.values()] == [id(v) for v in model.variables]
    assert weights.layout.signature == theirs.layout.signature, "order, shapes and dtypes"
    # ResNetRS numbers the names of its first layers itself: they match by position.
    is_counted = name.startswith("ResNetRS")
    assert is_counted or weights.layout == theirs.layout
    assert not weights.unbound
    flat = weights.get_flat()
    weights.set_weights(theirs, strict=not is_counted)
    for array, variable in zip(theirs.values(), model.variables, strict=True):
        np.testing.assert_array_equal(value(variable), array, strict=True)
    weights.set_flat(flat)
    np.testing.assert_array_equal(weights.get_flat(), flat)
    del model, weights, theirs
    keras.backend.clear_session()
    tf_keras.backend.clear_session()
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "MobileNet",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("MobileNetV2", "ResNet50", "VGG16")),
    ],
)
def test_keras_3_and_tf_keras_exchange_an_architecture(name: Any) -> None:
    new, old = (TensorFlowVariables(application(m, name)) for m in ("keras", "tf_keras"))
    assert new.layout.signature == old.layout.signature
    for source, target in ((new, old), (old, new)):
        source.set_flat(np.random.default_rng().normal(size=source.get_flat_size()))
        target.set_weights(source.get_weights())
        np.testing.assert_array_equal(target.get_flat(), source.get_flat())
    # `kernel` in one is `depthwise_kernel` in the other.
    assert (new.layout.names == old.layout.names) == (not name.startswith("MobileNet"))
