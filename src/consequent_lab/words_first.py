"""Words of a command line may stand anywhere: before its options, behind them, or on both sides of one."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin


def words_first(command: Any, arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments with the words before the options: tyro takes one stretch of words only.

    An option that takes any number of values, or is not known, has all words behind it.

    >>> from consequent_lab.race_command import Race
    >>> words_first(Race, ["times", "--device", "cpu", "digits", "--tiny", "--images", "9", "1", "gpt"])
    ['times', 'digits', 'gpt', '--device', 'cpu', '--tiny', '--images', '9', '1']
    """
    takes = {field.name.replace("_", "-"): _values_of(field.type) for field in fields(command)}
    words, options, left = [], [], 0.0
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.replace("_", "-").removeprefix("--")
            left = 0 if "=" in name else takes.get(name, takes.get(name.removeprefix("no-"), float("inf")))
            options.append(argument)
        elif left > 0:
            left -= 1
            options.append(argument)
        else:
            words.append(argument)
    return words + options


def _values_of(kind: Any) -> float:
    """Returns how many values an option of this type takes; infinity is any number."""
    if kind is bool:
        return 0
    if get_origin(kind) is tuple:
        return float("inf") if Ellipsis in get_args(kind) else len(get_args(kind))
    return 1
