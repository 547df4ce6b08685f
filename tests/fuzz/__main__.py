"""``python -m fuzz --loops 10000 --mode own``: run seed after seed, go on after failures, and sum up at the end."""

import argparse
import time

import torch

from fuzz.run import IllegalError, run
from fuzz.shrink import failure, shrink


def main():
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--loops", type=int, default=1000, help="how many")
    parser.add_argument("--mode", choices=["own", "averages"], default="own", help="own inputs, or averages")
    parser.add_argument("--seed", type=int, help="this seed alone, with all that is known about it")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out what does not matter")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.seed is not None:
        message = (shrink if arguments.shrink else failure)(arguments.seed, arguments.mode)
        print(message or f"seed {arguments.seed}: as it should be")
        return 1 if message else 0
    failed, illegal, start = [], 0, time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.loops):
        try:
            run(seed, arguments.mode)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {str(error).splitlines()[0]}", flush=True)
        except IllegalError:
            illegal += 1
    refused = f", {illegal} that torch refuses or that diverge" if illegal else ""
    print(f"{arguments.loops} loops in {time.monotonic() - start:.0f} s{refused}, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
