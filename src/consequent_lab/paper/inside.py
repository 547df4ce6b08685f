"""Outputs following their virtual targets inside of a deep network, and the paper's first extension there.

A perceptron with eight hidden layers on the digits, in float64; a few seconds on any machine.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent import CSGD
from consequent.paper import first_extension
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Series, Statement
from consequent_lab.paper.measures import roughness
from consequent_lab.paper.statements import Outcome, judged

NAME = "inside"
HIDDEN = (64,) * 8
LAYERS = len(HIDDEN) + 1
BATCH, STEPS = 32, 135  # three epochs
SEEDS = (0, 1, 2)
DAMPING = 1e-3
C_RATE = 0.1  # the library's advice, 0.1 to 0.3
SGD_RATE = 0.03
TINY_DAMPING = 1e-9
DAMPED = 0.5  # of the weight change without damping
RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
STRAIGHT = 0.9  # a cosine
BLOWN_UP = 10.0  # loss: more than four times that of guessing


@dataclass(frozen=True)
class Training:
    """One training, and what its steps did to the outputs of every layer on their own mini-batch.

    Cosines are of wanted and produced changes, a list by layer for every step.
    """

    losses: list[float]  # of every mini-batch before its step
    own: list[list[float]]  # cosines, each layer's own weights changed alone
    real: list[list[float]]  # cosines of what really happens, all layers changed at once
    damped: list[float]  # norm of a step's weight change with λ ÷ with hardly any, for the same weights and mini-batch
    test_accuracy: float  # at the end

    @property
    def is_stable(self) -> bool:
        """Whether the loss stayed finite and below four times that of guessing, and is lower at the end."""
        end = self.losses[-45:]
        return len(self.losses) == STEPS and max(self.losses) < BLOWN_UP and fmean(end) < self.losses[0]


def _network(seed: int) -> tuple[nn.Sequential, list[nn.Linear]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = (64, *HIDDEN, 10)
        layers = [nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in pairwise(sizes)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    modules = [module for layer in layers for module in (layer, nn.ReLU())][:-1]
    return nn.Sequential(*modules), layers


@cache
def train(label: str, rate: float, seed: int) -> Training:
    """Returns a training with C-SGD, SGD or the first extension; it ends where the loss is no longer finite."""
    from consequent_lab.datasets import load_digits

    digits = load_digits()
    inputs, labels = digits.train.inputs.double(), digits.train.targets
    model, layers = _network(seed)
    optimizer = (
        CSGD(model, lr=rate, damping=DAMPING, bound=None)
        if label == "C-SGD"
        else torch.optim.SGD(model.parameters(), lr=rate)
    )
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(layer: nn.Module, given: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen[layer] = given[0], outputs

    for layer in layers:
        layer.register_forward_hook(note)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    own: list[list[float]] = []
    real: list[list[float]] = []
    damped: list[float] = []
    while len(losses) < STEPS:
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[batch]), labels[batch])
            before = {layer: seen[layer] for layer in layers}
            for _, outputs in before.values():
                outputs.retain_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                return Training(losses, own, real, damped, float("nan"))
            if label == "C-SGD":
                damped.append(_change(before, DAMPING) / _change(before, TINY_DAMPING))
            weights = {layer: layer.weight.detach().clone() for layer in layers}
            if label == "First extension":
                _extended_step(before, rate)
            else:
                optimizer.step()
            with torch.no_grad():
                model(inputs[batch])
                real.append([_cosine(seen[one][1] - out, -_grad(out)) for one, (_, out) in before.items()])
                changes = [(given @ (one.weight - weights[one]).T, out) for one, (given, out) in before.items()]
                own.append([_cosine(change, -_grad(out)) for change, out in changes])
    with torch.no_grad():
        right = model(digits.test.inputs.double()).argmax(dim=1) == digits.test.targets
    return Training(losses, own, real, damped, float(right.double().mean()))


@torch.no_grad()
def _extended_step(layers: dict[nn.Linear, tuple[Tensor, Tensor]], rate: float) -> None:
    """NLMS for every sample by itself, in every layer; output gradients are those of each sample's own loss."""
    for layer, (given, outputs) in layers.items():
        layer.weight += first_extension(given.detach().T, BATCH * _grad(outputs).T, 1e-12, step_size=rate)


@torch.no_grad()
def _change(layers: dict[nn.Linear, tuple[Tensor, Tensor]], damping: float) -> float:
    """Returns the norm of the change of all weights at learning rate 1: ‖ΔZ (XᵀX + λI)⁻¹ Xᵀ‖, samples as rows here."""
    norms = []
    for given, outputs in layers.values():
        gram = given @ given.T + damping * torch.eye(len(given), dtype=given.dtype)
        norms.append(float((_grad(outputs).T @ torch.linalg.solve(gram, given)).norm()))
    return math.hypot(*norms)


def _grad(outputs: Tensor) -> Tensor:
    assert outputs.grad is not None
    return outputs.grad


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def by_layer(cosines: list[list[float]]) -> list[float]:
    """Returns the median over steps, for every layer."""
    return [median(values) for values in zip(*cosines, strict=True)]


def finding(*runs: Path) -> Finding:
    """Computes the experiment; needs no runs."""
    ours = [train("C-SGD", C_RATE, seed) for seed in SEEDS]
    plain = [train("SGD", SGD_RATE, seed) for seed in SEEDS]
    extension = {rate: [train("First extension", rate, seed) for seed in SEEDS] for rate in RATES}
    c_sgd = {rate: [train("C-SGD", rate, seed) for seed in SEEDS] for rate in RATES}
    return Finding(
        name=NAME,
        title="Inside of a deep network, on the digits",
        summary=f"A perceptron with {len(HIDDEN)} hidden layers of {HIDDEN[0]} without biases on scikit-learn's "
        f"digits, mini-batches of {BATCH}, {STEPS} steps, three seeds. After every step the same mini-batch is shown "
        "again: did the outputs of each layer move as their gradients wanted? Its verdicts are counted apart.",
        figures=[_figure(ours, plain)],
        statements=statements(plain, c_sgd, extension),
    )


def statements(
    plain: list[Training], c_sgd: dict[float, list[Training]], extension: dict[float, list[Training]]
) -> list[Statement]:
    """Returns the paper's statements on these trainings: SGD's, and the others' by learning rate."""
    ours = c_sgd[C_RATE]
    own = [min(by_layer(one.own)) for one in ours]
    pairs = list(zip(ours, plain, strict=True))
    ahead = [sum(a > b for a, b in zip(by_layer(c.real), by_layer(s.real), strict=True)) for c, s in pairs]
    really = [fmean(by_layer(one.real)) for one in (*ours, *plain)]
    damped = [median(one.damped) for one in ours]
    stable, stable_ours = (
        [rate for rate, some in trainings.items() if all(one.is_stable for one in some)]
        for trainings in (extension, c_sgd)
    )
    rough = [roughness(one.losses) for one in ours]
    best = min(stable, key=lambda rate: fmean(fmean(one.losses[-45:]) for one in extension[rate]), default=None)
    theirs = [roughness(one.losses) for one in extension[best]] if best is not None else []

    def beside(text: str, **some: list[Training]) -> str:
        shown = [
            f"{name.replace('_', '-')} {100 * fmean(one.test_accuracy for one in those):.1f} (3 seeds)"
            for name, those in some.items()
            if all(math.isfinite(one.test_accuracy) for one in those)
        ]
        return f"Test accuracy in % after {STEPS} steps: {'; '.join(shown)}. {text}"

    extended = {"First_extension": extension[best]} if best is not None else {}
    outcomes = {
        "each_layer_by_itself": Outcome(
            f"The lowest layer's: {', '.join(f'{value:.3f}' for value in own)}.",
            [all(value > STRAIGHT for value in own)],
            beside(f"Learning rate {C_RATE:g}, not searched.", C_SGD=ours),
        ),
        "all_layers_at_once": Outcome(
            f"Higher in {', '.join(map(str, ahead))} of {LAYERS} layers. Mean over layers: C-SGD "
            f"{fmean(really[:3]):.2f}, SGD {fmean(really[3:]):.2f}.",
            [count == LAYERS for count in ahead],
            beside(f"Learning rates {C_RATE:g} and {SGD_RATE:g}, not searched.", C_SGD=ours, SGD=plain),
        ),
        "weights_change_less": Outcome(
            f"{', '.join(f'{value:.3g}' for value in damped)}.",
            [all(value <= DAMPED for value in damped)],
            beside(f"Learning rate {C_RATE:g}, not searched.", C_SGD=ours),
        ),
        "first_extension_is_unstable": Outcome(
            f"Stable: the first extension {_rates(stable)}; C-SGD {_rates(stable_ours)}. Mean rise in decades: C-SGD "
            f"{fmean(rough):.3f}" + (f", the first extension {fmean(theirs):.3f} at {best:g}." if theirs else "."),
            [max(stable_ours, default=0.0) > max(stable, default=0.0), min(theirs) > max(rough) if theirs else None],
            beside("All rates on the seeds that are reported.", C_SGD=ours, **extended),
        ),
    }
    return judged(NAME, "digits", outcomes, globals() | {"rates": len(RATES)})


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates) or "at none"


def _figure(ours: list[Training], plain: list[Training]) -> Figure:
    def series(label: str, some: list[list[list[float]]]) -> list[Series]:
        layers = [float(number) for number in range(1, LAYERS + 1)]
        return [
            Series(f"{label}, seed {seed}", {"layer": layers, "cosine": by_layer(one)}, label, "line+markers")
            for seed, one in enumerate(some)
        ]

    axes = [Axis("layer", "layer")], [Axis("cosine", "cosine of wanted and produced")]
    return Figure(
        NAME,
        "Do the outputs of a layer move as wanted?",
        "Cosine of the wanted change of a layer's outputs and the one that a step made, on its own mini-batch, median "
        f"over {STEPS} steps. Left: a layer's own weights changed alone. Right: all layers at once, as it really is.",
        [
            Panel("each layer by itself", series("C-SGD", [one.own for one in ours]), *axes),
            Panel(
                "all layers at once",
                series("C-SGD", [one.real for one in ours]) + series("SGD", [one.real for one in plain]),
                *axes,
            ),
        ],
    )
