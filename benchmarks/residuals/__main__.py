"""The command line; what it does is said in the package's docstring."""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "2" if "times" in sys.argv else "1")  # before torch is imported

from benchmarks.residuals import __doc__ as description
from benchmarks.residuals import batches, runs, times
from benchmarks.residuals.contestants import CONTESTANTS
from benchmarks.residuals.problems import NEW_SAMPLES, PROBLEMS


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.residuals", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("run", "table", "figure", "one-step", "times", "batches"))
    parser.add_argument("path", nargs="?", type=pathlib.Path, help="of the figure")
    parser.add_argument("--problems", nargs="+", choices=(*PROBLEMS, NEW_SAMPLES), default=list(PROBLEMS))
    parser.add_argument("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of the processor, for each run")
    parser.add_argument("--seeds", type=int, default=5, help="finals of each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of runs and of times")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("results/residuals.jsonl"))
    arguments = parser.parse_args()
    if arguments.stage in ("table", "figure", "one-step"):
        from benchmarks.residuals import summary  # with matplotlib, which a machine with a GPU may not have

    if arguments.stage == "run":
        for name in arguments.problems:
            runs.run(
                name, arguments.contestants, arguments.seconds, arguments.seeds, arguments.results, arguments.device
            )
    elif arguments.stage == "table":
        print(summary.table(runs.read(arguments.results)))
    elif arguments.stage == "batches":
        batches.run(arguments.path)
        print(batches.table(arguments.path))
    elif arguments.stage == "times":
        times.times(arguments.path, arguments.device)
    elif arguments.stage == "one-step":
        summary.one_step(arguments.path)
    else:
        summary.figure(runs.read(arguments.results), arguments.path)


main()
