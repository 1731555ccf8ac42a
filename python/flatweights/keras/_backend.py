"""Checks the version and the backend of Keras."""

import keras


def check_keras() -> None:
    """Raise unless Keras is version 3 and runs on TensorFlow.

    Raises:
        ImportError: If it does not; the message names functions that work there.
    """
    instead = (
        "Member.average of flatweights.ray averages arrays of any framework, such as those of "
        "model.get_weights()"
    )
    if not hasattr(keras, "backend") or int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(f"expected Keras 3, got {keras.__version__}; {instead}")
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(f"expected Keras on TensorFlow, got Keras on {backend}; {instead}")


check_keras()
