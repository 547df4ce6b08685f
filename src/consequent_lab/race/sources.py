"""Where the race has its data from: files that were carried along, official layouts, packages that embed them."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consequent_lab.datasets import load_digits
from consequent_lab.race.files import Arrays, files_of, read_arrays
from consequent_lab.race.task import Data

PICTURES = ("china", "flower", "astronaut")
TABLES = ("diabetes", "breast-cancer", "wine", "digits")
SIDE = 256  # of a picture, in pixels


@lru_cache(maxsize=4)
def arrays_of(name: str, place: Path | None) -> Arrays:
    """Returns the arrays of a set: "cifar10", "cifar100", "fashion-mnist", "pictures", "tables" or "sources".

    Args:
        name: of the set.
        place: a file, or a folder with `.npz` files or official layouts; None is the usual one of images, and the
            packages for all else.
    """
    if place is not None:
        files = files_of(place, name)
        if files:
            return read_arrays(files)
        if place.is_file():
            raise ValueError(f"{place} is no .npz of {name}")
    made = {"pictures": _pictures, "tables": _tables, "sources": _sources}
    if name in made:
        return made[name]()
    from consequent_lab.datasets import load

    dataset = load(name, place)
    tensors = {
        "train_x": dataset.train_images,
        "train_y": dataset.train_labels,
        "test_x": dataset.test_images,
        "test_y": dataset.test_labels,
    }
    return {key: tensor.numpy().astype(np.uint8) for key, tensor in tensors.items()}


# ---- images ------------------------------------------------------------------------------------------------------


def images(name: str, place: Path | None, train: int | None, test: int | None, *, flat: bool) -> Data:
    """Returns the first images of a set, each channel with mean 0 and variance 1 over the training images.

    Args:
        name: of the set.
        place: as in `arrays_of`.
        train: training images; None is all.
        test: test images; None is all.
        flat: an image is one row of features.
    """
    arrays = arrays_of(name, place)
    pixels = torch.from_numpy(arrays["train_x"][:train]).float()
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)

    def inputs(values: Tensor) -> Tensor:
        values = (values.float() - mean) / deviation
        return values.flatten(1) if flat else values

    return Data(
        inputs(pixels),
        torch.from_numpy(arrays["train_y"][:train].astype(np.int64)),
        inputs(torch.from_numpy(arrays["test_x"][:test])),
        torch.from_numpy(arrays["test_y"][:test].astype(np.int64)),
    )


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Returns images `[N, C, H, W]` moved by up to `padding` pixels in both directions, half of them mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    down, right = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=device)
    mirrored = torch.rand(count, generator=generator, device=device) < 0.5
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns) + right[:, None]
    rows = torch.arange(height, device=device) + down[:, None]
    places = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # [N, H, W] in the padded image
    flat = padded.flatten(2).gather(2, places.flatten(1)[:, None].expand(count, channels, height * width))
    return flat.view(images.shape)


def digits() -> Data:
    """Returns scikit-learn's handwritten digits, always split the same way."""
    known = load_digits()
    return Data(known.train_inputs, known.train_labels, known.test_inputs, known.test_labels)


# ---- signals over coordinates ------------------------------------------------------------------------------------


def picture(name: str, place: Path | None, side: int) -> Data:
    """Returns a photograph as a function: places `[side², 2]` and colours `[side², 3]`, both from −1 to 1.

    The test data are the same: what counts is how well the picture itself is met.
    """
    pixels = torch.from_numpy(arrays_of("pictures", place)[name]).float().permute(2, 0, 1)
    small = torch.nn.functional.adaptive_avg_pool2d(pixels, side)
    colours = small.flatten(1).T.contiguous() / 127.5 - 1
    places = torch.cartesian_prod(*(2 * [torch.linspace(-1, 1, side)]))
    return Data(places, colours, places[:1], colours[:1])


def distance_field(points: int, test_points: int) -> Data:
    """Returns the signed distance from the surface of eight balls and four boxes, at random points of [−1, 1]³."""
    generator = torch.Generator().manual_seed(0)
    places = 2 * torch.rand(points + test_points, 3, generator=generator) - 1
    distance = torch.full((len(places),), math.inf)
    for _ in range(8):
        centre = 1.4 * torch.rand(3, generator=generator) - 0.7
        radius = 0.1 + 0.2 * torch.rand(1, generator=generator)
        distance = torch.minimum(distance, (places - centre).norm(dim=1) - radius)
    for _ in range(4):
        centre = 1.4 * torch.rand(3, generator=generator) - 0.7
        sizes = 0.1 + 0.2 * torch.rand(3, generator=generator)
        beyond = (places - centre).abs() - sizes
        outside, inside = beyond.clamp(min=0).norm(dim=1), beyond.amax(1).clamp(max=0)
        distance = torch.minimum(distance, outside + inside)
    values = distance[:, None]
    return Data(places[:points], values[:points], places[points:], values[points:])


def _pictures() -> Arrays:
    import skimage.data
    import sklearn.datasets

    photographs = {
        "china": sklearn.datasets.load_sample_image("china.jpg"),
        "flower": sklearn.datasets.load_sample_image("flower.jpg"),
        "astronaut": skimage.data.astronaut(),  # type: ignore[no-untyped-call]
    }
    return {name: _square(pixels) for name, pixels in photographs.items()}


def _square(pixels: np.ndarray) -> np.ndarray:
    """Returns the middle of a photograph, averaged down to bytes `[SIDE, SIDE, 3]`."""
    height, width, _ = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    middle = torch.tensor(pixels[top : top + side, left : left + side]).float().permute(2, 0, 1)
    small = torch.nn.functional.adaptive_avg_pool2d(middle, SIDE)
    return small.permute(1, 2, 0).round().to(torch.uint8).numpy()


# ---- tables ------------------------------------------------------------------------------------------------------


def table(name: str, place: Path | None, seed: int) -> Data:
    """Returns a table, its columns standardised, a fifth of its rows as test data; the seed says which."""
    arrays = robot_arm() if name == "robot-arm" else arrays_of("tables", place)
    inputs = torch.from_numpy(arrays[f"{name}_x"]).float()
    targets = torch.from_numpy(arrays[f"{name}_y"])
    is_class = targets.dtype == torch.int64
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    kept = len(inputs) - len(inputs) // 5
    train, test = order[:kept], order[kept:]
    mean, deviation = inputs[train].mean(0), inputs[train].std(0)
    inputs = (inputs - mean) / torch.where(deviation > 0, deviation, 1.0)
    if not is_class:
        targets = targets.float().view(len(targets), -1)
        targets = (targets - targets[train].mean(0)) / targets[train].std(0)
    return Data(inputs[train], targets[train], inputs[test], targets[test])


def robot_arm(samples: int = 8192) -> Arrays:
    """Returns how far the tip of an arm of eight links is from its foot, by the angles of its joints, with noise."""
    generator = torch.Generator().manual_seed(0)
    angles = (2 * torch.rand(samples, 8, generator=generator) - 1) * math.pi / 2
    directions = angles.cumsum(1)
    lengths = 0.5 + torch.rand(8, generator=generator)
    tip = torch.stack([(lengths * directions.cos()).sum(1), (lengths * directions.sin()).sum(1)], 1)
    reach = tip.norm(dim=1) + 0.05 * torch.randn(samples, generator=generator)
    return {"robot-arm_x": angles.numpy(), "robot-arm_y": reach.numpy()}


def _tables() -> Arrays:
    from sklearn import datasets

    makers = {
        "diabetes": datasets.load_diabetes,
        "breast-cancer": datasets.load_breast_cancer,
        "wine": datasets.load_wine,
        "digits": datasets.load_digits,
    }
    arrays: Arrays = {}
    for name, make in makers.items():
        inputs, targets = make(return_X_y=True)
        arrays[f"{name}_x"] = inputs.astype(np.float32)
        arrays[f"{name}_y"] = targets.astype(np.float32 if name == "diabetes" else np.int64)
    return arrays


# ---- text --------------------------------------------------------------------------------------------------------


def text(place: Path | None, context: int, test_windows: int) -> Data:
    """Returns windows of bytes `[N, context]`, and each one's next bytes."""
    arrays = arrays_of("sources", place)

    def windows(name: str) -> tuple[Tensor, Tensor]:
        content = torch.from_numpy(arrays[name]).long()
        count = (len(content) - 1) // context
        return content[: count * context].view(count, context), content[1 : count * context + 1].view(count, context)

    inputs, targets = windows("train")
    test_inputs, test_targets = windows("test")
    return Data(inputs, targets, test_inputs[:test_windows], test_targets[:test_windows])


def _sources() -> Arrays:
    """Returns the standard library's modules as bytes; every tenth file is test data."""
    import sysconfig

    folder = Path(sysconfig.get_path("stdlib"))
    contents: dict[str, list[bytes]] = {"train": [], "test": []}
    for number, path in enumerate(sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/[a-z]*.py"))):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        contents["test" if number % 10 == 9 else "train"].append(path.read_bytes())
    return {name: np.frombuffer(bytearray(b"\n".join(parts)), np.uint8) for name, parts in contents.items()}
