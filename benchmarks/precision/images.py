"""Images of 32×32 pixels with values in [-½, ½]: CIFAR-10 from a folder, or digits that need no download."""

from dataclasses import dataclass
from pathlib import Path

import sklearn.datasets
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from consequent_lab.datasets import load


@dataclass(frozen=True)
class Images:
    """Images as `[N, 3, 32, 32]` and their classes 0 to 9."""

    name: str
    pixels: Tensor
    labels: Tensor

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns a random batch."""
        chosen = torch.randint(0, len(self.labels), (size,), generator=generator)
        return self.pixels[chosen], self.labels[chosen]


def load_images(folder: Path | None) -> Images:
    """Returns CIFAR-10's training images from the folder, or scikit-learn's digits where none is given.

    Raises:
        FileNotFoundError: if the folder has not all of CIFAR-10's binary files.
        ValueError: if one of them is not what it should be.
    """
    if folder is None:
        return upsampled_digits()
    cifar10 = load("cifar10", folder)
    return Images("CIFAR-10", cifar10.train_images.float() / 255 - 0.5, cifar10.train_labels)


def upsampled_digits() -> Images:
    """Returns the 1,797 handwritten digits, enlarged from 8×8 pixels, three equal colours.

    Equal colours make the first layer's Gram matrix singular but for λ: the hardest case for rounding.
    """
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.5
    large = interpolate(small, size=(32, 32), mode="bilinear")
    return Images("digits, enlarged", large.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels))
