"""The handwritten digits that scikit-learn carries with it: 1,797 images of 8×8 pixels, no download."""

from dataclasses import dataclass

import sklearn.datasets
import torch
from torch import Tensor

TRAINING_SAMPLES = 1440  # 45 mini-batches of 32; the other 357 images are the test set.


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 pixels, normalised with the training set's mean and standard deviation; labels 0 to 9."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """Returns the digits, always split the same way.

    >>> digits = load_digits()
    >>> tuple(digits.train_inputs.shape), tuple(digits.test_inputs.shape)
    ((1440, 64), (357, 64))
    """
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(pixels, dtype=torch.float32)[order]
    targets = torch.tensor(labels)[order]
    train = inputs[:TRAINING_SAMPLES]
    inputs = (inputs - train.mean()) / train.std()
    return Digits(
        train_inputs=inputs[:TRAINING_SAMPLES],
        train_labels=targets[:TRAINING_SAMPLES],
        test_inputs=inputs[TRAINING_SAMPLES:],
        test_labels=targets[TRAINING_SAMPLES:],
    )
