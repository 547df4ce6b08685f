"""`consequent collect`: the paper's runs, a compact file for each experiment, to be kept in a repository."""

from dataclasses import dataclass
from pathlib import Path

from consequent_lab.screen import console


@dataclass(frozen=True)
class Collect:
    """Write the runs of the paper's experiments as compact files of JSON lines.

    A run that is not finished is written as far as it got, and says so.

    Whatever reads run folders reads these files, too: OUTPUT/<recipe>.jsonl.
    """

    runs: Path = Path("runs")
    """Where run folders are."""
    output: Path = Path("results/paper")
    """Where the files go; what they have of runs that are not in RUNS stays as it is."""
    quick: bool = False
    """Those of `consequent reproduce --quick` instead."""

    def run(self) -> None:
        """Writes the files."""
        from consequent_lab.paper.archive import Archive, write_compact
        from consequent_lab.paper.experiments import recipe_names

        if not self.runs.is_dir():
            raise ValueError(f"--runs {self.runs} is no folder")
        archive = Archive(self.runs, unfinished=True)
        size = count = 0
        for recipe in recipe_names(self.quick):
            runs = [run for variant in archive.variants(recipe) for run in archive.runs(recipe, variant)]
            if runs:
                size += write_compact(runs, self.output).stat().st_size
                count += len(runs)
        screen = console()
        screen.print(f"{count} runs, {size / 1e6:.2f} MB: {self.output}", soft_wrap=True)
