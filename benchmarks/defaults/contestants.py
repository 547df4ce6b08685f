"""Who takes part: plain optimisers and their C- versions, the rates and the dampings that are tried."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn, optim

SGD_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
C_SGD_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
C_MOMENTUM_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)

DAMPINGS = (*(f"relative {rho}" for rho in (0.01, 0.03, 0.1, 0.2, 0.3, 1, 3)), "absolute 0.01", "absolute 1")
BOUNDS = (0.05, 0.1, 0.2, 0.4)
AVERAGES = ("averaging 0.95", "averaging 0.95, refresh 10")  # of inputs over batches, the second as in the race


@dataclass(frozen=True)
class Contestant:
    """An optimiser, plain or corrected.

    Attributes:
        optimiser: makes it from a model and a rate.
        rates: those that are tried.
        advised: the rate that one would start with.
        is_corrected: whether the correction is attached.
        plain: the plain optimisers that it is compared with; the better one counts.
        kin: the plain optimiser of the same kind, with which learning rates are compared.
        can_be_bounded: whether ``bound`` means anything for it.
    """

    optimiser: Callable[[nn.Module, float], optim.Optimizer]
    rates: tuple[float, ...]
    advised: float
    plain: tuple[str, ...]
    is_corrected: bool = True
    kin: str = ""
    can_be_bounded: bool = True


def sgd(model: nn.Module, rate: float) -> optim.Optimizer:
    """SGD."""
    return optim.SGD(model.parameters(), lr=rate)


def momentum(model: nn.Module, rate: float) -> optim.Optimizer:
    """SGD with momentum."""
    return optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def nesterov(model: nn.Module, rate: float) -> optim.Optimizer:
    """SGD with Nesterov's momentum."""
    return optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)


def adam(model: nn.Module, rate: float, memory: float = 0.999) -> optim.Optimizer:
    """Adam; its memory of squares is β₂."""
    return optim.Adam(model.parameters(), lr=rate, betas=(0.9, memory))


CONTESTANTS = {
    "sgd": Contestant(sgd, SGD_RATES, 0.1, is_corrected=False, plain=("sgd", "nesterov")),
    "nesterov": Contestant(nesterov, SGD_RATES, 0.01, is_corrected=False, plain=("sgd", "nesterov")),
    "adam": Contestant(adam, ADAM_RATES, 1e-3, is_corrected=False, plain=("adam",)),
    "c-sgd": Contestant(sgd, C_SGD_RATES, 0.1, plain=("sgd", "nesterov"), kin="sgd"),
    "c-momentum": Contestant(momentum, C_MOMENTUM_RATES, 0.01, plain=("sgd", "nesterov"), kin="nesterov"),
    "c-nesterov": Contestant(nesterov, C_MOMENTUM_RATES, 0.01, plain=("sgd", "nesterov"), kin="nesterov"),
    "c-adam": Contestant(adam, ADAM_RATES, 1e-3, plain=("adam",), kin="adam", can_be_bounded=False),
}

MEMORIES = (0.99, 0.95)  # β₂ of Adam, beside its own of 0.999
WITH_MEMORY = {
    f"{name} {memory}": replace(CONTESTANTS[name], optimiser=partial(adam, memory=memory))
    for name in ("adam", "c-adam")
    for memory in MEMORIES
}
KNOWN = CONTESTANTS | WITH_MEMORY


def options_of(damping: str) -> dict[str, float | None]:
    """What ``consequent.attach`` is given: a damping, averages if there are any, and last a bound if there is one.

    >>> options_of("relative 0.1")
    {'bound': None, 'averaging': 0.0, 'refresh': 1, 'relative_damping': 0.1}
    >>> options_of("absolute 1, averaging 0.95, refresh 10, bound 0.2")
    {'bound': 0.2, 'averaging': 0.95, 'refresh': 10, 'damping': 1.0}
    """
    names = {"relative": "relative_damping", "absolute": "damping"}
    options: dict[str, float | None] = {"bound": None, "averaging": 0.0, "refresh": 1}
    for part in damping.split(", "):
        name, value = part.split()
        options[names.get(name, name)] = int(value) if name == "refresh" else float(value)
    return options


def damping_for(contestant: str, damping: str) -> str:
    """What a contestant is run with where this damping is meant: nothing if it is plain, no bound if it is Adam.

    >>> damping_for("sgd", "relative 0.1, bound 0.2")
    ''
    >>> damping_for("c-adam", "relative 0.1, bound 0.2")
    'relative 0.1'
    """
    if not KNOWN[contestant].is_corrected:
        return ""
    return damping if KNOWN[contestant].can_be_bounded else unbounded(damping)


def unbounded(damping: str) -> str:
    """The damping without its bound.

    >>> unbounded("relative 0.1, bound 0.2")
    'relative 0.1'
    """
    return damping.partition(", bound")[0]


def with_bounds(damping: str) -> tuple[str, ...]:
    """A damping without a bound, and with each of those that are tried.

    >>> with_bounds("relative 0.1, bound 0.2")[:2]
    ('relative 0.1', 'relative 0.1, bound 0.05')
    """
    return (unbounded(damping), *(f"{unbounded(damping)}, bound {bound}" for bound in BOUNDS))
