"""The study as a command: which faults, how many, and where the table goes."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from faults.soak import Soak
    from faults.trial import Trial


Kind = Literal["numbers", "damage", "disk", "untrusted", "kills", "ranks", "soak"]


@dataclass(frozen=True)
class Faults:
    """Try faults on training runs and count what becomes of them.

    Processes killed at random moments, one of two ranks lost, a full disk, damaged files, numbers that are not finite,
    factorisations that fail, memory that runs out, untrusted files; and a long run with faults at random beside
    some left in peace.
    """

    quick: bool = False
    """A few attempts of each, in about a minute."""
    only: tuple[Kind, ...] = ()
    """Kinds of faults to try (default: all). The file's other rows stay, and the new ones say what made them."""
    output: Path = Path("faults.json")
    """The JSON file."""

    def run(self) -> None:
        """Tries, shows the table and writes it; raises if anything went otherwise than it should."""
        from consequent_lab.records import write_json
        from consequent_lab.screen import console
        from faults.record import new_record, read_record, recorded, updated
        from faults.study import study

        screen = console()
        begun = time.perf_counter()
        old = read_record(self.output, quick=self.quick) if self.only and self.output.exists() else None
        with tempfile.TemporaryDirectory(prefix="consequent-faults-") as folder:
            trials, soaked = study(
                Path(folder),
                self.only or get_args(Kind),
                quick=self.quick,
                report=lambda text: screen.print(text, markup=False),
            )
        new = new_record(trials, soaked, quick=self.quick) if old is None else updated(old, trials, soaked)
        write_json(self.output, new)
        for line in table(*recorded(new)):
            screen.print(line, markup=False, soft_wrap=True)
        screen.print(f"Numbers: {self.output}\nTime: {time.perf_counter() - begun:.0f} s", markup=False)
        surprises = [text for trial in trials for text in trial.surprises]
        if soaked is not None and not soaked.is_as_expected:
            surprises.append(str(soaked))
        if surprises:
            raise ValueError("not everything went as it should:\n" + "\n".join(surprises))


def table(trials: "list[Trial]", soaked: "Soak | None") -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = ["| fault | tried | as it should be | what should happen |", "|---|---|---|---|"]
    for trial in trials:
        counts = f"{trial.tried} | {trial.as_expected}" if not trial.not_tried else f"not tried: {trial.not_tried} |"
        lines.append(f"| {trial.fault} | {counts} | {trial.expected} |")
    if soaked is None:
        return lines
    faults = sum(soaked.faults.values())
    lines.append(
        f"| {faults:,} faults at random in {soaked.steps:,} steps | 1 | {int(soaked.is_as_expected)} | "
        "memory flat, every fault counted as what it is, final loss within the spread of undisturbed runs |"
    )
    return lines
