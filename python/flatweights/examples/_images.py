"""Images of 32x32x3, in batches as they are usual for training and evaluation.

Images are padded, cropped and, where it does not change what they show, flipped at random, and
standardised one by one; all that in `tf.data`, batch by batch, from bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flatweights.demo._digits import split_digits
from flatweights.examples._cifar import SIDE, Cifar

PADDING = 4
BATCH_OF_EVALUATION = 100


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, 8x8 in grey: brought to the size of the others.

    Attributes:
        seed: Of the split between what is trained on and what is held out.
        held_out: Which of the two.
    """

    seed: int
    held_out: bool = False
    name = "digits"
    classes = 10

    @property
    def size(self) -> int:
        """How many images there are."""
        (train,), test = split_digits(1, self.seed)
        return len((test if self.held_out else train).labels)

    def share(self, rank: int = 0, workers: int = 1) -> Any:
        """Return a `tf.data.Dataset` of one worker's images, as `Cifar.share` does."""
        import tensorflow as tf

        def enlarge(grey: Any, label: Any) -> Any:
            large = tf.image.resize(grey, (SIDE, SIDE))
            return tf.cast(tf.round(tf.image.grayscale_to_rgb(large)), tf.uint8), label

        shards, test = split_digits(workers, self.seed)
        chosen = test if self.held_out else shards[rank]
        return tf.data.Dataset.from_tensor_slices((255 * chosen.images, chosen.labels)).map(enlarge)


Images = Cifar | Digits


def training_batches(
    images: Images, rank: int, workers: int, batch: int, seed: tuple[int, ...]
) -> Any:
    """Return an endless `tf.data.Dataset` of batches, of one worker's share of the images.

    Sets TensorFlow's seed.

    Args:
        images: Which.
        rank: Whose share.
        workers: How many shares there are.
        batch: Images in one.
        seed: The same one gives the same batches.
    """
    import tensorflow as tf

    tf.random.set_seed(0)  # on which that of a dataset depends: set by whatever ran before
    order, changes = map(int, np.random.default_rng((*seed, rank)).integers(2**31, size=2))
    share = images.share(rank, workers).shuffle(-(-images.size // workers), seed=order).repeat()
    # Four random numbers for each image: what is done to it is the same in every run.
    random = tf.data.Dataset.random(changes).batch(4)

    def change(one: Any, random: Any) -> Any:
        image, label = one
        padded = tf.pad(image, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        image = tf.image.stateless_random_crop(padded, (SIDE, SIDE, 3), random[:2])
        if not isinstance(images, Digits):  # a mirrored digit is another one, or none
            image = tf.image.stateless_random_flip_left_right(image, random[2:])
        return tf.image.per_image_standardization(image), label

    changed = tf.data.Dataset.zip(share, random).map(change, num_parallel_calls=tf.data.AUTOTUNE)
    return changed.batch(batch, drop_remainder=True).prefetch(2)


def evaluation_batches(images: Images) -> Any:
    """Return a `tf.data.Dataset` of batches: each image once, as it is."""
    import tensorflow as tf

    def standardise(image: Any, label: Any) -> Any:
        return tf.image.per_image_standardization(image), label

    return images.share().map(standardise).batch(BATCH_OF_EVALUATION).prefetch(2)
