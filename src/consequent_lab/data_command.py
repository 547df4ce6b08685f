"""`consequent data`: which data sets are there, and downloading those that are not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from consequent_lab.screen import console

Name = Literal["cifar10", "cifar100", "fashion-mnist", "digits"]
COLOURS = {"missing": "yellow", "incomplete": "red", "damaged": "red"}


@dataclass(frozen=True)
class Data:
    """List the data sets that are here, checked, and download those that are missing if asked.

    The files are the official ones: the binary versions of CIFAR-10 and CIFAR-100, the IDX files of Fashion-MNIST. The
    digits come with scikit-learn.
    """

    names: tyro.conf.Positional[tuple[Name, ...]] = ()
    """Which ones; none: all of them."""
    data: Path | None = None
    """The folder with the files or the usual sub-folders; None: $CONSEQUENT_DATA, else ./data."""
    download: bool = False
    """Download what is missing from the official addresses into the folder."""

    def run(self) -> None:
        """Downloads if asked, shows the table, and raises if anything is damaged or could not be downloaded."""
        from consequent_lab.datasets import NAMES, data_folder

        folder, names, screen = data_folder(self.data), self.names or NAMES, console()
        failures = _download(names, folder, screen) if self.download else {}
        states = {name: inspect(name, folder) for name in names}
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption="images: training + test")
        table.add_column("data set", no_wrap=True)
        table.add_column("where", overflow="fold")
        for heading in ("images", "classes", "checked"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, state in states.items():
            colour = COLOURS.get(state.checked, "green")
            table.add_row(name, state.where, state.images, state.classes, Text(state.checked, style=colour))
        screen.print(table)
        if not self.download and any(state.checked in ("missing", "incomplete") for state in states.values()):
            screen.print("What is missing is downloaded with --download.")
        damages = [state.problem for name, state in states.items() if state.problem and name not in failures]
        if failures or damages:
            raise ValueError("\n".join([*failures.values(), *damages]))


class State(NamedTuple):
    """What there is of a data set; `problem` says what is wrong with its files."""

    where: str = "–"
    images: str = "–"
    classes: str = "–"
    checked: str = "missing"
    problem: str = ""


def inspect(name: str, folder: Path) -> State:
    """Returns what there is of a data set, after reading all of it."""
    from consequent_lab.datasets import EMBEDDED, LAYOUTS, load, locate

    where = "in scikit-learn"
    if name != EMBEDDED:
        place, missing = locate(LAYOUTS[name], folder)
        where = str(place)
        if len(missing) == len(LAYOUTS[name].files):
            return State()
        if missing:
            return State(where, checked="incomplete", problem=f"{name}: {where} has no {', '.join(missing)}")
    try:
        dataset = load(name, folder)
    except (ValueError, OSError) as error:
        return State(where, checked="damaged", problem=f"{name}: {error}; remove it to download it anew")
    images = f"{len(dataset.train_labels):,} + {len(dataset.test_labels):,}"
    return State(where, images, str(dataset.classes), "–" if name == EMBEDDED else "sizes, labels")


def _download(names: tuple[str, ...], folder: Path, screen: Console) -> dict[str, str]:
    """Returns what went wrong, by the name of the data set; one that fails does not keep the next from being tried."""
    from consequent_lab.datasets import LAYOUTS
    from consequent_lab.downloads import obtain

    failures = {}
    name_column = TextColumn("{task.description}", markup=False)
    columns = (name_column, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen) as bars:
        for name in names:
            if name in LAYOUTS:
                try:
                    obtain(LAYOUTS[name], folder, bars)
                except OSError as error:
                    failures[name] = f"{name}: {error}"
    return failures
