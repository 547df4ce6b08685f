"""The command `consequent`.

A command is a frozen dataclass with a `run` method, listed in `commands`. Its module imports nothing heavy at the top,
so that `consequent --help` answers at once.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NoReturn, Protocol

from consequent_lab.words_first import words_first

LAB_PACKAGES = ("rich", "tyro")  # of every command; some need more


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Does what the command is for."""


def commands() -> dict[str, Callable[..., Command]]:
    """Returns the commands by name."""
    from consequent_lab.bench import Bench
    from consequent_lab.collect_command import Collect
    from consequent_lab.compare_command import Compare
    from consequent_lab.data_command import Data
    from consequent_lab.demo import Demo
    from consequent_lab.race_command import Race
    from consequent_lab.report_command import Report
    from consequent_lab.reproduce_command import Reproduce
    from consequent_lab.train_command import Train
    from consequent_lab.watch_command import Watch

    return {
        "demo": Demo,
        "race": Race,
        "bench": Bench,
        "data": Data,
        "train": Train,
        "watch": Watch,
        "compare": Compare,
        "reproduce": Reproduce,
        "collect": Collect,
        "report": Report,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of this process, and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        return _say_version()
    missing = [name for name in LAB_PACKAGES if find_spec(name) is None]
    if missing:
        return _say_what_is_missing(missing)
    import tyro

    try:
        known = commands()
        if arguments and arguments[0] in known:
            name, options = arguments[0], [_as_spelt_here(argument) for argument in arguments[1:]]
            command = tyro.cli(known[name], prog=f"consequent {name}", args=words_first(known[name], options))
        else:  # says which commands there are
            command = tyro.extras.subcommand_cli_from_dict(
                {name: _in_short(command) for name, command in known.items()},
                prog="consequent",
                description="Consequentialist optimisers: experiments and measurements. Every command has a --help.",
                args=arguments,
            )
        command.run()
    except ModuleNotFoundError as error:
        return _say_what_is_missing([error.name or str(error)])
    except (ValueError, OSError) as error:
        print(f"consequent: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("consequent: interrupted", file=sys.stderr)
        return 130
    return 0


def _in_short(command: Callable[..., Command]) -> Callable[[], Command]:
    """Returns what stands for a command in the list of all: the first sentence of its description."""

    def stand_in() -> Command:
        return command()

    stand_in.__doc__ = (command.__doc__ or "").partition("\n\n")[0]
    return stand_in


def _say_version() -> int:
    """Prints what a report of a mistake should name; needs none of the lab's packages."""
    import torch

    import consequent

    print(f"consequent {consequent.__version__} (torch {torch.__version__}, Python {sys.version.split()[0]})")
    return 0


def _as_spelt_here(argument: str) -> str:
    """Returns an option as it is spelt here: both spellings of optimiser are understood.

    >>> _as_spelt_here("--optimizer=adam"), _as_spelt_here("optimizer.csv")
    ('--optimiser=adam', 'optimizer.csv')
    """
    return re.sub(r"^--([\w-]*)optimizer", r"--\1optimiser", argument)


def _say_what_is_missing(packages: list[str]) -> int:
    print(
        f"consequent: this needs {', '.join(packages)}. Install what is missing with\n"
        "    pip install '.[lab]'        (in a clone of the repository)",
        file=sys.stderr,
    )
    return 1


def _end(status: int) -> NoReturn:
    """Ends the process; one of several ranks at once.

    Threads of gloo that need Python once more while it shuts down abort the process ("terminate called without an
    active exception", seen once in many runs), and everything has been written by now.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _end(main())
