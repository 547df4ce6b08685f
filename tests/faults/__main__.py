"""``python -m faults --quick``: try faults and count what becomes of them."""

import sys

import tyro

from faults.command import Faults


def main(arguments=None):
    """Runs the study and returns its exit status."""
    try:
        tyro.cli(Faults, prog="faults", args=arguments).run()
    except (ValueError, OSError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
