"""`consequent data`: which data sets are there, and downloading those that are not."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from rich.console import Console
    from rich.table import Table

Name = Literal["cifar10", "cifar100", "fashion-mnist", "digits"]


@dataclass(frozen=True)
class Data:
    """List the data sets that are here, checked, and download those that are missing if asked.

    The files are the official ones: the binary versions of CIFAR-10 and CIFAR-100, the IDX files of Fashion-MNIST. The
    digits come with scikit-learn.
    """

    names: tyro.conf.Positional[tuple[Name, ...]] = ()
    """Which ones (default: all)."""
    data: Path | None = None
    """The folder with the files or the usual sub-folders (default: $CONSEQUENT_DATA, else ./data)."""
    download: bool = False
    """Download what is missing from the official addresses into the folder."""

    def run(self) -> None:
        """Downloads if asked, shows the table, and raises if anything is damaged or could not be downloaded."""
        from consequent_lab.datasets import NAMES, data_folder
        from consequent_lab.screen import console

        folder, names, screen = data_folder(self.data), self.names or NAMES, console()
        failures = _download(names, folder, screen) if self.download else {}
        states = [inspect(name, folder) for name in names]
        screen.print(table(states))
        if not self.download and any(state.checked in ("missing", "incomplete") for state in states):
            screen.print("What is missing is downloaded with --download.")
        damages = {state.name: state.problem for state in states if state.problem and state.name not in failures}
        if failures or damages:
            raise ValueError("\n".join([*failures.values(), *damages.values()]))


@dataclass(frozen=True)
class State:
    """What there is of a data set; `problem` says what is wrong with its files."""

    name: str
    where: str
    images: str
    classes: str
    checked: str
    problem: str = ""


def inspect(name: str, folder: Path) -> State:
    """Returns what there is of a data set, after reading all of it."""
    from consequent_lab.datasets import EMBEDDED, layout_of, load, locate

    embedded = name == EMBEDDED
    where = "in scikit-learn" if embedded else str(locate(layout_of(name), folder)[0])
    try:
        dataset = load(name, folder)
    except FileNotFoundError:
        missing = locate(layout_of(name), folder)[1]
        if len(missing) == len(layout_of(name).files):
            return State(name, "–", "–", "–", "missing")
        return State(name, where, "–", "–", "incomplete", f"{name}: {where} has no {', '.join(missing)}")
    except (ValueError, OSError) as error:
        return State(name, where, "–", "–", "damaged", f"{name}: {error}; remove it to download it anew")
    images = f"{len(dataset.train_labels):,} + {len(dataset.test_labels):,}"
    return State(name, where, images, str(dataset.classes), "–" if embedded else "sizes, labels")


def table(states: list[State]) -> "Table":
    """Returns the table of data sets."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    result = Table(box=SIMPLE_HEAD, pad_edge=False, caption="images: training + test")
    result.add_column("data set", no_wrap=True)
    result.add_column("where", overflow="fold")
    for heading in ("images", "classes", "checked"):
        result.add_column(heading, justify="right", no_wrap=True)
    colours = {"missing": "yellow", "incomplete": "red", "damaged": "red"}
    for state in states:
        colour = colours.get(state.checked, "green")
        where = Text(state.where)  # a path may hold what looks like rich's markup
        result.add_row(state.name, where, state.images, state.classes, Text(state.checked, style=colour))
    return result


def _download(names: tuple[str, ...], folder: Path, screen: "Console") -> dict[str, str]:
    """Returns what went wrong, by the name of the data set; one that fails does not keep the next from being tried."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from consequent_lab.datasets import layout_of
    from consequent_lab.downloads import SOURCES, obtain

    failures = {}
    name_column = TextColumn("{task.description}", markup=False)
    columns = (name_column, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen) as bars:
        for name in names:
            if name in SOURCES:
                try:
                    obtain(layout_of(name), SOURCES[name], folder, bars)
                except OSError as error:
                    failures[name] = f"{name}: {error}"
    return failures
