"""`consequent report`: what the experiments found, as one page and as static figures."""

from dataclasses import dataclass
from pathlib import Path

from consequent_lab.screen import console


@dataclass(frozen=True)
class Report:
    """Make a page of the paper's experiments from their runs: figures, statements, verdicts, tables.

    The page is one file that opens from disk and loads nothing. Runs may come from another machine.
    """

    runs: tuple[Path, ...] = (Path("runs"),)
    """Folders with runs of `consequent reproduce`; of a run that is in several, the first counts."""
    output: Path = Path("report.html")
    """The page."""
    figures: Path = Path("figures")
    """Where the figures go as PNG and SVG."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("--runs needs at least one folder")
        if self.output.suffix not in (".html", ".htm"):
            raise ValueError(f"--output must end in .html, got {self.output}")
        if self.figures.exists() and not self.figures.is_dir():
            raise ValueError(f"--figures must be a folder, and {self.figures} is a file")

    def run(self) -> None:
        """Writes the page and the figures."""
        from consequent_lab.paper.experiments import experiments, find
        from consequent_lab.records import write_atomically
        from consequent_lab.report.page import page
        from consequent_lab.report.static import draw

        for folder in self.runs:
            if not folder.is_dir():
                raise ValueError(f"--runs {folder}: no such folder; make the runs with `consequent reproduce all`")
        findings = find(list(experiments()), *self.runs)
        text = page(findings)
        written = [path for finding in findings for figure in finding.figures for path in draw(figure, self.figures)]
        write_atomically(self.output, lambda file: file.write(text.encode()))
        screen = console()
        screen.print(f"Page: {self.output} ({self.output.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
        screen.print(f"Figures: {len(written)} files in {self.figures}", soft_wrap=True)
        verdicts = [statement.verdict for finding in findings for statement in finding.statements]
        if missing := verdicts.count("not measured"):
            screen.print(
                f"{missing} of {len(verdicts)} statements are not measured: their runs, of `consequent reproduce`, are "
                "not here. (Runs of `consequent train` are shown by `consequent compare`.)",
                soft_wrap=True,
            )
