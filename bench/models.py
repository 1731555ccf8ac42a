"""Shapes of real models, with random values."""

import numpy as np
from numpy.typing import NDArray

Shapes = list[tuple[int, ...]]

POLICY: Shapes = [(64, 64), (64,), (64, 64), (64,), (64, 4), (4,)]
"""A small policy network: 6 variables, 34 kB."""


def resnet20() -> Shapes:
    """Return the shapes of a 20-layer residual network for 32x32 images (He et al., 2015)."""
    shapes: Shapes = [(3, 3, 3, 16), *[(16,)] * 4]
    channels = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            for inputs in (channels, width):
                shapes += [(3, 3, inputs, width), *[(width,)] * 4]
            if block == 0 and stage > 0:
                shapes.append((1, 1, channels, width))
            channels = width
    return [*shapes, (64, 10), (10,)]


def resnet50() -> Shapes:
    """Return the shapes of ResNet-50 (He et al., 2015), 102 MB, as Keras lays it out."""
    shapes: Shapes = [(7, 7, 3, 64), (64,), *[(64,)] * 4]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(1, channels, width), (3, width, width), (1, width, 4 * width)]
            if block == 0:
                convolutions.insert(2, (1, channels, 4 * width))
            for size, inputs, outputs in convolutions:
                shapes += [(size, size, inputs, outputs), (outputs,), *[(outputs,)] * 4]
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def transformer() -> Shapes:
    """Return the shapes of BERT-base (Devlin et al., 2018): 109.5 million elements, 438 MB."""
    width, inner = 768, 3072
    shapes: Shapes = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        shapes += [(width, width), (width,)] * 4  # query, key, value, output
        shapes += [(width,), (width,)]
        shapes += [(width, inner), (inner,), (inner, width), (width,)]
        shapes += [(width,), (width,)]
    return [*shapes, (width, width), (width,)]


def random_parts(
    shapes: Shapes, dtype: type | np.dtype[np.generic] = np.float32, seed: int = 0
) -> list[NDArray[np.generic]]:
    """Return arrays of these shapes with normally distributed values."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def random_vector(
    size: int, dtype: type | np.dtype[np.generic] = np.float32, seed: int = 0
) -> NDArray[np.generic]:
    """Return a vector of normally distributed values."""
    return np.random.default_rng(seed).standard_normal(size, np.float32).astype(dtype)
