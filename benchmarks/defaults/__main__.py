"""The command line of the study; what it does is said in the package's docstring."""

import argparse
import dataclasses
import os
import pathlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the workers

from benchmarks.defaults import __doc__ as description
from benchmarks.defaults import study, summary
from benchmarks.defaults.contestants import KNOWN

STAGES = ("search", "confirm", "fixed", "stress", "summary", "time")


def rate_of(text: str) -> tuple[str, float]:
    """A contestant and its rate, from ``name=rate``."""
    name, _, rate = text.partition("=")
    if name not in KNOWN:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KNOWN)}")
    return name, float(rate)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.defaults", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=STAGES, help="one or more of them, in order")
    parser.add_argument("--tasks", nargs="+", choices=tuple(study.TASKS), help="only these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("runs/defaults.jsonl"))
    parser.add_argument(
        "--dampings", nargs="+", help="only these: 'relative 0.1', 'absolute 1', 'relative 0.1, bound 0.2'"
    )
    parser.add_argument("--contestants", nargs="+", choices=tuple(KNOWN), help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of 0, 1 and 2")
    parser.add_argument("--damping", default="relative 0.1", help="of stress, of tables by task and of bounds")
    parser.add_argument("--rate", type=rate_of, nargs="+", default=[], help="rates of the stage fixed: c-sgd=0.1 …")
    parser.add_argument("--quick", action="store_true", help="a few tasks with a few steps")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    scope = study.SMALL if arguments.quick else study.FULL
    if arguments.tasks:
        scope = dataclasses.replace(scope, tasks=tuple(arguments.tasks))
    if arguments.dampings:
        scope = dataclasses.replace(scope, dampings=tuple(arguments.dampings))
    if arguments.contestants:
        scope = dataclasses.replace(scope, contestants=tuple(arguments.contestants))
    if arguments.seeds:
        scope = dataclasses.replace(scope, seeds=tuple(arguments.seeds))
    rates = {name: contestant.advised for name, contestant in KNOWN.items()} | dict(arguments.rate)
    results = study.Results(arguments.results)
    for stage in arguments.stages:
        if stage == "summary":
            print(summary.tables(scope, results, rates, arguments.damping))
        elif stage == "time":
            study.time_tasks(scope)
        else:
            runs = {
                "search": lambda: study.search(scope, results),
                "confirm": lambda: study.confirm(scope, results),
                "fixed": lambda: study.fixed(scope, rates),
                "stress": lambda: study.stress(scope, results, arguments.damping),
            }[stage]()
            print(f"{stage}: ", end="")
            study.run_all(runs, results, arguments.workers)


if __name__ == "__main__":
    main()
