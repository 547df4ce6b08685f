"""Files that nobody vouches for: nothing in them is executed, and nothing is written outside of where it belongs."""

import io
import os
import pickle
import tarfile
from pathlib import Path

from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Series, Statement
from consequent_lab.runs import RunFolder, checkpoint_seal
from faults.trial import Trial, require


class _Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def untrusted_files(folder: Path) -> list[Trial]:
    """Tries each kind of file once."""
    return [_pickled_checkpoint(folder / "pickle"), _archives(folder / "archives"), _names_with_markup(folder / "page")]


def _pickled_checkpoint(folder: Path) -> Trial:
    trial = Trial("a checkpoint with code in it, and the right digest", "refused, nothing is executed")
    import torch

    for number, protocol in enumerate((2, 4)):
        with trial.attempt(f"pickle protocol {protocol}"):
            made = folder / f"made{number}"
            run = RunFolder(folder / f"run{number}")
            run.path.mkdir(parents=True)
            buffer = io.BytesIO()
            torch.save({"state": _Touch(made)}, buffer, pickle_protocol=protocol)
            for payload in (buffer.getvalue(), pickle.dumps({"state": _Touch(made)}, protocol)):
                (run.path / "checkpoint.pt").write_bytes(payload + checkpoint_seal(payload))
                refused = False
                try:
                    run.checkpoint()
                except Exception:
                    refused = True
                require(refused, "it was read")
                require(not made.exists(), "it was executed")
    return trial


def _archives(folder: Path) -> Trial:
    from consequent_lab.downloads import DownloadError, unpack

    trial = Trial("an archive with ../, absolute names, links or devices", "refused, nothing is written elsewhere")
    kinds = {
        "../outside.bin": tarfile.REGTYPE,
        str(folder / "absolute.bin"): tarfile.REGTYPE,
        "inside/data.bin": tarfile.SYMTYPE,
        "inside/./data.bin": tarfile.LNKTYPE,
        "inside//data.bin": tarfile.CHRTYPE,
    }
    for number, (name, kind) in enumerate(kinds.items()):
        place = folder / str(number)
        place.mkdir(parents=True)
        archive = place / "archive.tar.gz"
        with tarfile.open(archive, "w:gz") as file:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, 4 if kind == tarfile.REGTYPE else 0, "/etc/passwd"
            file.addfile(entry, io.BytesIO(b"evil"))
        with trial.attempt(name):
            refused = False
            try:
                unpack(archive, "inside", place / "target", ["data.bin"])
            except DownloadError:
                refused = True
            require(refused, "it was unpacked")
            written = [path for path in folder.rglob("*") if path.suffix == ".bin"]
            require(not written, f"it wrote {written}")
    return trial


def _names_with_markup(folder: Path) -> Trial:
    """HTML in the names of a run must come out as text."""
    from consequent_lab.report.page import page

    trial = Trial("HTML in the name of a run", "the report shows it as text")
    for evil in ("<script>alert(1)</script>", "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>'):
        with trial.attempt(evil):
            series = Series(evil, {"iteration": [1.0, 2.0], "loss": [1.0, 0.5]})
            panel = Panel(evil, [series], [Axis("iteration", evil)], [Axis("loss", evil)])
            statement = Statement(evil, "toy", evil, evil, (True,), circumstances=evil, remark=evil)
            finding = Finding("name", evil, evil, [Figure("name", evil, evil, [panel])], [statement])
            text = page([finding])
            require(evil not in text, "it is in the page as it is")
    return trial
