"""The handwritten digits that scikit-learn carries with it: 1,797 images of 8×8 pixels, no download."""

import sklearn.datasets
import torch

from consequent_lab.samples import Data, Samples

TRAINING_SAMPLES = 1440  # 45 mini-batches of 32; the other 357 images are the test set.


def load_digits() -> Data:
    """Returns the digits, always split the same way.

    Images are rows of 64 pixels, normalised with the training set's mean and standard deviation.

    >>> digits = load_digits()
    >>> tuple(digits.train.inputs.shape), tuple(digits.test.inputs.shape)
    ((1440, 64), (357, 64))
    """
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(pixels, dtype=torch.float32)[order]
    train = inputs[:TRAINING_SAMPLES]
    whole = Samples((inputs - train.mean()) / train.std(), torch.tensor(labels)[order])
    return Data(whole[:TRAINING_SAMPLES], whole[TRAINING_SAMPLES:])
