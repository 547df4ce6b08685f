"""Numbers on disk: a JSON file that says what made it."""

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

DIGITS = 6  # of a measured number


def provenance(workers: int) -> dict[str, Any]:
    """Returns what a reader needs to judge and repeat a measurement."""
    return {
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("consequent", "torch")},
        },
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": cores(), "workers": workers},
    }


def measured_on(device: str) -> dict[str, Any]:
    """Returns the same, and what a measurement on a device depends on."""
    import torch

    found = provenance(workers=1)
    found["versions"] |= {"triton": version("triton") if find_spec("triton") else None, "cuda": torch.version.cuda}
    return found | {"device": {"type": device, "name": device_name(device), "threads": torch.get_num_threads()}}


def device_name(device: str) -> str:
    """Returns a device in words."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {cores()} cores"


def _program() -> list[str]:
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name]
    return ["consequent" if path.name == "cli.py" else path.name]  # python -m consequent_lab.cli


def cores() -> int:
    """Returns how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes the record; numbers that are not finite become null, as JSON knows neither NaN nor infinity."""
    text = json.dumps(plain_numbers(record, DIGITS), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Calls `write` with a file that takes the place of `path` once it is complete and on the disk, never before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name == "posix":  # the name, too, where the system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def package_version(package: str) -> str:
    """Returns the version of a package that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def plain_numbers(value: Any, digits: int) -> Any:
    """Returns what JSON can hold: numbers that are not finite are None, the others have so many digits.

    >>> plain_numbers({"loss": [0.123456789, math.inf], "epochs": 1234567}, 6)
    {'loss': [0.123457, None], 'epochs': 1234567}
    """
    if isinstance(value, dict):
        return {key: plain_numbers(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
