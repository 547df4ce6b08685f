"""Data of the race in files that can be carried to another machine: one `.npz` for each set.

Photographs hardly get smaller by what numpy packs with; images are kept as lossless WebP, columns of squares that need
about half the space.
"""

import io
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]

PART = 20_000  # training images in one file at most
COLUMN = 500  # images; WebP has at most 16,383 rows of pixels


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes arrays; those of more than a thousand images `[N, channels, height, width]` in bytes as WebP."""
    packed: Arrays = {}
    for name, array in arrays.items():
        if array.dtype == np.uint8 and array.ndim == 4 and len(array) > 1000:
            for number, start in enumerate(range(0, len(array), COLUMN)):
                packed[f"{name}.webp.{number:03}"] = _encoded(array[start : start + COLUMN])
            packed[f"{name}.shape"] = np.array(array.shape)
        else:
            packed[name] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **packed)  # type: ignore[arg-type]


def read_arrays(paths: list[Path]) -> Arrays:
    """Returns the arrays of one or more files; what several have comes one after the other."""
    found: dict[str, list[np.ndarray]] = {}
    for path in paths:
        with np.load(path) as file:
            names = list(file.files)
            for name in names:
                if ".webp." in name:
                    continue
                if name.endswith(".shape"):
                    name = name.removesuffix(".shape")
                    parts = [file[part] for part in sorted(names) if part.startswith(f"{name}.webp.")]
                    shape = file[f"{name}.shape"]
                    found.setdefault(name, []).append(_decoded(parts, shape))
                else:
                    found.setdefault(name, []).append(file[name])
    return {name: np.concatenate(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def files_of(place: Path, name: str) -> list[Path]:
    """Returns the files of a set: the given one itself, or `name.npz`, or its parts `name-0.npz`, … in a folder."""
    if place.is_file():
        return [place]
    whole = place / f"{name}.npz"
    return [whole] if whole.is_file() else sorted(place.glob(f"{name}-[0-9].npz"))


def write_images(folder: Path, name: str, arrays: Arrays, train: int, test: int) -> list[Path]:
    """Writes the first images of a set, in parts if there are many, and returns the files."""
    starts = range(0, min(train, len(arrays["train_x"])), PART)
    paths = []
    for number, start in enumerate(starts):
        rows = slice(start, min(start + PART, train))
        part = {key: arrays[key][rows] for key in ("train_x", "train_y")}
        if number == 0:
            part |= {key: arrays[key][:test] for key in ("test_x", "test_y")}
        paths.append(folder / (f"{name}.npz" if len(starts) == 1 else f"{name}-{number}.npz"))
        write_arrays(paths[-1], part)
    return paths


def _encoded(images: np.ndarray) -> np.ndarray:
    from PIL import Image

    pixels = np.repeat(images, 3 // images.shape[1], axis=1).transpose(0, 2, 3, 1)
    column = Image.fromarray(pixels.reshape(-1, *pixels.shape[2:]))
    blob = io.BytesIO()
    column.save(blob, "WEBP", lossless=True, quality=60, method=4, exact=True)
    return np.frombuffer(blob.getvalue(), np.uint8)


def _decoded(columns: list[np.ndarray], shape: np.ndarray) -> np.ndarray:
    from PIL import Image

    count, channels, height, width = map(int, shape)
    parts = [np.asarray(Image.open(io.BytesIO(column.tobytes())).convert("RGB")) for column in columns]
    images = np.concatenate([part.reshape(-1, height, width, 3) for part in parts])
    if len(images) != count:
        raise ValueError(f"{len(images)} images instead of {count}: the file is damaged")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)[:, :channels])
