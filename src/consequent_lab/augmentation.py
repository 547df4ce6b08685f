"""Training images that are moved and mirrored at random, otherwise in every iteration of a run."""

from collections.abc import Collection

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

MARGIN = 8  # an image is moved by up to its size divided by this


def moved_and_mirrored(images: Tensor, kinds: Collection[str], generator: torch.Generator) -> Tensor:
    """Returns each image moved by up to an eighth of its size (crop), or mirrored every other time (flip).

    What moves in from outside is 0.

    Args:
        images: `[N, channels, height, width]`.
        kinds: "crop", "flip", or both.
        generator: of the random numbers, on the images' device.

    >>> image = torch.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    >>> seen = {tuple(moved_and_mirrored(image, ["flip"], torch.Generator().manual_seed(seed)).flatten().tolist())
    ...         for seed in range(9)}
    >>> sorted(seen)
    [(1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 4.0, 3.0)]
    """
    count, channels, height, width = images.shape

    def draw(below: int) -> Tensor:
        return torch.randint(0, below, (count, 1), generator=generator, device=images.device)

    rows = torch.arange(height, device=images.device).expand(count, -1)
    columns = torch.arange(width, device=images.device).expand(count, -1)
    if "flip" in kinds:
        columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    if "crop" in kinds:
        down, right = max(1, height // MARGIN), max(1, width // MARGIN)
        images = F.pad(images, (right, right, down, down))
        rows, columns = rows + draw(2 * down + 1), columns + draw(2 * right + 1)
    places = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return images[places, channel, rows[:, None, :, None], columns[:, None, None, :]]
