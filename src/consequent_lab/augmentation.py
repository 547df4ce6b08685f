"""Training images that are moved, mirrored and partly covered at random, otherwise in every epoch of a run."""

from collections.abc import Collection

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

MARGIN = 8  # an image is moved by up to its shorter side divided by this
COVER = 4  # the side of a square that is covered is the image's shorter side divided by this


def augmented(images: Tensor, kinds: Collection[str], generator: torch.Generator) -> Tensor:
    """Returns each image moved by up to an eighth of its size (crop), or mirrored every other time (flip).

    With cutout a square of a quarter of its size is 0 besides, anywhere in it, all channels alike (DeVries and Taylor,
    2017, have half of the size, and squares that may lie partly outside). Images are `[N, channels, height, width]`;
    what moves in from outside is 0.

    >>> image = torch.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    >>> seen = {tuple(augmented(image, ["flip"], torch.Generator().manual_seed(seed)).flatten().tolist())
    ...         for seed in range(9)}
    >>> sorted(seen)
    [(1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 4.0, 3.0)]
    """
    count, channels, height, width = images.shape
    device = images.device
    down = right = torch.zeros(count, dtype=torch.int64, device=device)
    if "crop" in kinds:
        margin = max(1, min(height, width) // MARGIN)
        images = F.pad(images, (margin,) * 4)
        down, right = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    if "flip" in kinds:
        mirrored = torch.rand(count, generator=generator, device=device) < 0.5
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    columns = columns + right[:, None]
    rows = torch.arange(height, device=device) + down[:, None]
    image = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    seen = images[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
    return _covered(seen, generator) if "cutout" in kinds else seen


def _covered(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns each image with a square of zeros."""
    count, _, height, width = images.shape
    side = max(1, min(height, width) // COVER)

    def inside(length: int) -> Tensor:
        """Which of the rows or columns the square lies in, for each image."""
        start = torch.randint(0, length - side + 1, (count, 1), generator=generator, device=images.device)
        place = torch.arange(length, device=images.device)
        return (place >= start) & (place < start + side)

    return images.masked_fill((inside(height)[:, :, None] & inside(width)[:, None, :])[:, None], 0)
