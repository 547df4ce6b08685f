"""How downloads get on."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from consequent_lab.screen import LiveDisplay


class DownloadDisplay(LiveDisplay):
    """A bar for every file on a terminal; elsewhere a plain line for every tenth of it."""

    def __init__(self, screen: Console) -> None:
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(screen, Progress(*columns, console=screen))
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def show(self, name: str, here: int, size: int) -> None:
        """Shows how much of a file is here."""
        if self._bars:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=size)
            self._bars.update(self._tasks[name], completed=here)
        elif (tenths := 10 * here // size) > self._tenths.get(name, -1):
            self._tenths[name] = tenths
            self._screen.print(f"{name}: {here / 1e6:,.1f} of {size / 1e6:,.1f} MB", markup=False)
