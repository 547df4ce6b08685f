"""The folder of one run, and what survives when the run is killed.

    runs/<recipe>/<variant>/seed<k>/
        config.json        what was asked for
        environment.json   on what it ran: an entry for every time it was started
        metrics.jsonl      a line per reading, only ever appended to
        checkpoint.pt      everything that a run needs to go on, and a digest behind it; the weights alone are
                           torch.load("checkpoint.pt", weights_only=True)["state"]["learner"]["model"]
        done.json          how it ended; without it the run is not finished

A checkpoint knows how long the metrics were when it was written, and their digest. A run that goes on from it cuts off
what came later, a torn last line included, and writes it again. Files other than the metrics take the place of their
predecessors at once, when they are complete and on the disk, and hold a digest of themselves. Reading needs no torch,
except for checkpoints.
"""

import functools
import hashlib
import io
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from consequent_lab.records import measured_on, plain_numbers, write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)

CHECKPOINT_SEAL = b"\nconsequent checkpoint, sha256 "  # and 64 digits; torch.load passes over what follows its archive
FORMER_OPTIONS = {"foresight"}
DIGITS = 9  # of numbers in the metrics: enough to tell any two float32 numbers apart


class DamagedFileError(ValueError):
    """A file of a run is not what was written; the message names it."""


class RunFolder:
    """One run on disk. Whoever writes to it holds it with :meth:`opened`, which makes it; reading needs nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, runs: Path, recipe: str, variant: str, seed: int) -> "RunFolder":
        """Returns the folder of a run.

        >>> RunFolder.of(Path("runs"), "mlp", "c-sgd", 0).path.as_posix()
        'runs/mlp/c-sgd/seed0'
        """
        return cls(runs / recipe / variant / f"seed{seed}")

    # ---- opening ------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, config: "DataclassInstance") -> Iterator[None]:
        """Holds the folder for writing, and writes the config or checks that it is the one that is there.

        Raises:
            ValueError: if the folder has another config; the message names what differs.
            BlockingIOError: if another process holds it.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:  # the system takes a lock back when the process ends, however it ends
            lock = FileLock(self.path / ".lock", timeout=0).acquire()
        except Timeout as error:
            raise BlockingIOError(f"{self.path} is being written to by another process") from error
        with lock:
            for leftover in self.path.glob(".*.*.*"):  # of a writer that was killed
                leftover.unlink()
            if (self.path / "config.json").exists():
                self._refuse_other(config)
            else:
                self._write_json("config.json", asdict(config))
            try:
                yield
            except BaseException:
                if {path.name for path in self.path.iterdir()} <= {".lock", "config.json"}:  # it never began
                    (self.path / "config.json").unlink()
                    _remove_empty(self.path / ".lock", made)
                raise

    def _refuse_other(self, config: "DataclassInstance") -> None:
        there, wanted = asdict(self.config(type(config))), asdict(config)
        differences = [
            f"{name} is {there[name]!r} there and {wanted[name]!r} now"
            for name in wanted
            if there[name] != wanted[name]
        ]
        if differences:
            raise ValueError(
                f"{self.path} holds a run with another config: {'; '.join(differences)}. "
                "Give this run a folder of its own, or remove that one."
            )

    # ---- config and environment ---------------------------------------------------------------------------------

    def config(self, kind: "type[Config]") -> "Config":
        """Returns the config, of a kind of dataclass; options that are newer than it have their defaults."""
        path = self.path / "config.json"
        return config_from(_read_object(path), kind, str(path))

    def add_environment(self, start: dict[str, Any]) -> None:
        """Adds an entry to environment.json, the list of the run's starts."""
        self._write_json("environment.json", {"starts": [*self.environment(), start]})

    def environment(self) -> list[dict[str, Any]]:
        """Returns the entries of environment.json; none before the first start."""
        path = self.path / "environment.json"
        if not path.exists():
            return []
        starts: list[dict[str, Any]] = _read_object(path)["starts"]
        return starts

    # ---- metrics ------------------------------------------------------------------------------------------------

    def append(self, line: dict[str, Any]) -> None:
        """Appends a line to the metrics; numbers that are not finite become null."""
        data = (json.dumps(plain_numbers(line, DIGITS), ensure_ascii=False, allow_nan=False) + "\n").encode()
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(data)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines so far. An unfinished run's last line may be torn, and is then left out.

        Raises:
            DamagedFileError: if a line cannot be read, or a finished run's metrics are not those it finished with.
        """
        path, data, outcome = self.path / "metrics.jsonl", self._metrics_bytes(), self.outcome()
        if outcome is not None:
            self._check_metrics(data, outcome["metrics"], "when the run was finished")
            if len(data) > outcome["metrics"]["bytes"]:
                raise DamagedFileError(f"{path} is damaged: it has grown since the run was finished")
        *lines, _torn = data.split(b"\n")
        return [parsed(line, f"{path}, line {number},") for number, line in enumerate(lines, start=1)]

    def _check_metrics(self, data: bytes, expected: dict[str, Any], when: str) -> None:
        path, length = self.path / "metrics.jsonl", expected["bytes"]
        if len(data) < length:
            raise DamagedFileError(f"{path} is damaged: it has {len(data)} bytes, and had {length} {when}")
        if hashlib.sha256(data[:length]).hexdigest() != expected["sha256"]:
            raise DamagedFileError(f"{path} is damaged: its first {length} bytes are not those that were there {when}")

    def _metrics_so_far(self) -> dict[str, Any]:
        """Brings the metrics to the disk and returns what they can be recognised by."""
        if (self.path / "metrics.jsonl").exists():
            with (self.path / "metrics.jsonl").open("rb+") as file:
                os.fsync(file.fileno())
        data = self._metrics_bytes()
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _metrics_bytes(self) -> bytes:
        path = self.path / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Puts a checkpoint in the place of the last one, which stays until this one is complete.

        It is of tensors, numbers, strings, and dicts and lists of these.
        """
        import torch

        buffer = io.BytesIO()
        torch.save({"metrics": self._metrics_so_far(), "state": state}, buffer)
        payload = buffer.getbuffer()
        self._write("checkpoint.pt", payload, checkpoint_seal(payload))

    def resume(self) -> dict[str, Any] | None:
        """Returns the state of the last checkpoint and cuts off the metrics that came after it.

        Returns:
            None if there is no checkpoint; then the metrics are empty.

        Raises:
            DamagedFileError: if the checkpoint or the metrics are not what was written. Nothing was changed then.
        """
        data, checkpoint, length = self._metrics_bytes(), self._load_checkpoint(), 0
        if checkpoint is not None:
            length = checkpoint["metrics"]["bytes"]
            self._check_metrics(data, checkpoint["metrics"], "at the last checkpoint")
        if len(data) > length:
            os.truncate(self.path / "metrics.jsonl", length)
        return None if checkpoint is None else checkpoint["state"]

    def checkpoint(self) -> dict[str, Any] | None:
        """Returns the state of the last checkpoint, on the CPU, or None; changes nothing."""
        checkpoint = self._load_checkpoint()
        return None if checkpoint is None else checkpoint["state"]

    def _load_checkpoint(self) -> dict[str, Any] | None:
        import torch

        path = self.path / "checkpoint.pt"
        if not path.exists():
            return None
        data = memoryview(path.read_bytes())
        length = len(CHECKPOINT_SEAL) + 64
        payload, seal = data[:-length], data[-length:]
        if seal != checkpoint_seal(payload):
            raise DamagedFileError(
                f"{path} is damaged: its contents do not have the digest that was written with them. "
                "Remove it to start this run again from the beginning, or bring back a copy."
            )
        loaded: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        return loaded

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self, outcome: dict[str, Any]) -> None:
        """Marks the run as done, and says how it ended."""
        self._write_json("done.json", {**outcome, "metrics": self._metrics_so_far()})

    def outcome(self) -> dict[str, Any] | None:
        """Returns how the run ended, or None if it has not."""
        path = self.path / "done.json"
        return _read_object(path) if path.exists() else None

    # ---- files --------------------------------------------------------------------------------------------------

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        text = json.dumps(sealed(value), indent=1, ensure_ascii=False, allow_nan=False)
        self._write(name, (text + "\n").encode())

    def _write(self, name: str, *parts: "bytes | memoryview") -> None:
        write_atomically(self.path / name, lambda file: file.writelines(parts))


def config_from(values: dict[str, Any], kind: "type[Config]", where: str) -> "Config":
    """Returns a config from what JSON made of it; options that did not exist when it was written have their defaults.

    Former options that changed nothing in what was learnt are passed over. Errors name where it was read.
    """
    values = {name: value for name, value in values.items() if name not in FORMER_OPTIONS}
    unknown = sorted(set(values) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is no option of {kind.__name__}; made by another version?")
    try:
        return kind(**{name: _as_tuple(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise DamagedFileError(f"{where} is not a valid config: {error}") from error


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object that these bytes are; raises DamagedFileError, naming where they are from."""
    try:
        value = json.loads(data)
    except ValueError as error:  # of the text's encoding, too
        raise DamagedFileError(f"{where} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{where} is damaged: not a JSON object")
    return value


def sealed(value: dict[str, Any], following: bytes = b"") -> dict[str, Any]:
    """Returns a JSON object with a digest of itself, and of what follows it in its file."""
    return {**value, "sha256": _digest(value, following)}


def unsealed(value: dict[str, Any], where: str, following: bytes = b"") -> dict[str, Any]:
    """Returns the object without its digest; raises DamagedFileError, naming where it is from, if that does not fit."""
    rest = {name: part for name, part in value.items() if name != "sha256"}
    if value.get("sha256") != _digest(rest, following):
        raise DamagedFileError(f"{where} is damaged: its contents do not have the digest that was written with them")
    return rest


def _digest(value: dict[str, Any], following: bytes) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + following).hexdigest()


def environment(device: str) -> dict[str, Any]:
    """Returns what a run's numbers may depend on: versions, device, commit."""
    return measured_on(device) | {"commit": _commit(Path(__file__).parent)}


@functools.cache  # the process runs the code that it has imported, whatever is committed later
def _commit(folder: Path) -> str | None:
    """Returns the commit that the code is from, with a plus if it was changed since; None outside of a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    # An installed copy may lie below somebody else's repository, which does not track it.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder.parent))
    return f"{commit}+" if commit and changed else commit


def checkpoint_seal(payload: "bytes | memoryview") -> bytes:
    """Returns what follows a checkpoint in its file: a digest by which damage is found."""
    return CHECKPOINT_SEAL + hashlib.sha256(payload).hexdigest().encode()


def _read_object(path: Path) -> dict[str, Any]:
    return unsealed(parsed(path.read_bytes(), str(path)), str(path))


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(part) for part in value) if isinstance(value, list) else value


def _remove_empty(lock: Path, folders: list[Path]) -> None:
    """Removes a lock and the folders that were made for it, the innermost first, as far as nothing else is in them."""
    with suppress(OSError):
        lock.unlink()
        for folder in folders:
            folder.rmdir()
