"""Images of 32×32 pixels with values in [-½, ½]: CIFAR-10 from a folder, or digits that need no download."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sklearn.datasets
import torch
from torch import Tensor
from torch.nn.functional import interpolate

ROW = 1 + 3 * 32 * 32  # bytes: the class, then red, green and blue


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
        FileNotFoundError: if the folder has no data_batch_*.bin.
        ValueError: if such a file is not a whole number of rows, or names a class above 9.
    """
    return upsampled_digits() if folder is None else cifar10(folder)


def cifar10(folder: Path) -> Images:
    """Returns the images of the official binary batches (data_batch_1.bin, …: 3073 bytes a row)."""
    paths = sorted(folder.glob("data_batch_*.bin"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no data_batch_*.bin; --data takes the folder cifar-10-batches-bin")
    rows = []
    for path in paths:
        content = np.fromfile(path, dtype=np.uint8)
        if len(content) == 0 or len(content) % ROW:
            raise ValueError(f"{path} has {len(content)} bytes, which is no multiple of {ROW}: not CIFAR-10's format")
        rows.append(torch.from_numpy(content).view(-1, ROW))
    table = torch.cat(rows)
    labels = table[:, 0].long()
    if labels.max() > 9:
        raise ValueError(f"{folder} has a class {int(labels.max())}, CIFAR-10 has 0 to 9: not CIFAR-10's format")
    return Images("CIFAR-10", table[:, 1:].reshape(-1, 3, 32, 32).float() / 255 - 0.5, labels)


def upsampled_digits() -> Images:
    """Returns the 1,797 handwritten digits, enlarged from 8×8 pixels, three equal colours.

    Equal colours make the first layer's Gram matrix singular but for λ: the hardest case for rounding.
    """
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.5
    large = interpolate(small, size=(32, 32), mode="bilinear")
    return Images("digits, enlarged", large.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels))
