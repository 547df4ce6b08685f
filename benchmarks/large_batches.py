"""Why the C- versions may fall behind where a batch has many more samples than a layer has inputs.

`python benchmarks/large_batches.py > results/large_batches.txt`

A noisy regression from ten numbers to two by a residual network of width 64: 300 steps with constant rates on batches
of 64 and of 500. Four tables in Markdown, medians over seeds:

1. the error on new samples, without noise, at the end (in brackets the training loss, which has the noise in it): on
   2,000 training samples, and where every step has new samples, so that nothing can be learned by heart;
2. the same after 75 steps;
3. the gain of a step: how far it moves the network's outputs against the error that it moves most, in units of what was
   wanted of the last layer. Beyond 1 / rate that error changes its sign and grows. In brackets: the share of the same
   change for all samples in it;
4. handwritten digits, with right labels and with one in five replaced by chance.

The measure, fixed before values were seen: the median test error at the end over five seeds. The size of the training
set, its noise, the rates and tables 2 to 4 were chosen after trial runs, and averages came last. It takes about twelve
minutes on one core, two to three with `--seeds 1`. `--batches 16 64 250 500 2000` looks at others.
"""

import argparse
import platform
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import consequent

STEPS, EARLY = 300, 75
INPUTS, WIDTH, BLOCKS = 10, 64, 3
SAMPLES, NOISE = 2000, 0.3
TOO_LARGE = 1e6  # a loss beyond it is that of a run that diverged
LOOKS = (0, 10, 30, 100, 299)  # steps before which the gain is measured


class Contestant(NamedTuple):
    """An optimiser with its rate; corrected if it has a relative damping."""

    name: str
    rate: float
    relative_damping: float | None = None
    bound: float | None = 0.2
    is_averaged: bool = False

    def __str__(self) -> str:
        damping = "" if self.relative_damping in (None, 0.1) else f", ρ = {self.relative_damping:g}"
        averaged = ", averaged" if self.is_averaged else ""
        return f"{self.name} {self.rate:g}{damping}{averaged}{'' if self.bound else ', no bound'}"

    def of(self, model: nn.Module) -> torch.optim.Optimizer:
        """It, for a model."""
        kind = torch.optim.Adam if "Adam" in self.name else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=self.rate)
        if self.relative_damping is not None:
            averages = {"averaging": 0.95, "refresh": 10} if self.is_averaged else {}
            consequent.attach(optimizer, model, relative_damping=self.relative_damping, bound=self.bound, **averages)
        return optimizer


REGRESSION = (
    *(Contestant("SGD", rate) for rate in (0.03, 0.1, 0.2)),
    *(Contestant("C-SGD", rate, 0.1) for rate in (0.01, 0.03, 0.1)),
    Contestant("C-SGD", 0.1, 0.1, bound=None),
    *(Contestant("C-SGD", rate, 0.1, is_averaged=True) for rate in (0.03, 0.1)),
    *(Contestant("Adam", rate) for rate in (0.001, 0.003, 0.01)),
    *(Contestant("C-Adam", rate, 0.1) for rate in (0.001, 0.003, 0.01)),
    *(Contestant("C-Adam", 0.003, damping) for damping in (1.0, 10.0)),
    Contestant("C-Adam", 0.003, 0.1, is_averaged=True),
)
DIGITS = (
    *(Contestant("SGD", rate) for rate in (0.1, 0.3)),
    *(Contestant("C-SGD", rate, 0.1) for rate in (0.03, 0.1, 0.3)),
    *(Contestant("Adam", rate) for rate in (0.001, 0.003)),
    *(Contestant("C-Adam", rate, 0.1) for rate in (0.001, 0.003)),
    *(Contestant("C-Adam", 0.003, damping) for damping in (1.0, 10.0)),
)


class Block(nn.Module):
    """Residual: ``relu(x + B relu(A x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        return (x + self.outer(self.inner(x).relu())).relu()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 2))


def function(x: Tensor) -> Tensor:
    first = torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.7 * torch.cos(x[:, 3:6].sum(1))
    return torch.stack([first, torch.tanh(x[:, 6] + x[:, 7]) * x[:, 8] + 0.3 * x[:, 9] ** 2 - 0.3], 1)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over outputs, mean over samples: ``loss_reduction="mean"`` is right."""
    return (outputs - targets).square().sum(1).mean()


def batches(samples: int, batch: int, generator: torch.Generator) -> Iterable[Tensor]:
    """Indices, shuffled anew when too few are left for a batch."""
    while True:
        yield from torch.randperm(samples, generator=generator)[: samples // batch * batch].split(batch)


def errors(
    contestant: Contestant,
    seed: int,
    batch: int,
    *,
    new_samples: bool = False,
    look: Callable[[int, nn.Module, Tensor], None] | None = None,
) -> list[tuple[float, float]]:
    """Test error and training loss, after ``EARLY`` steps and at the end."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(STEPS * batch if new_samples else SAMPLES, INPUTS, generator=generator)
    targets = function(x) + NOISE * torch.randn(len(x), 2, generator=generator)
    test = torch.randn(2000, INPUTS, generator=generator)
    torch.manual_seed(seed)
    model = network()
    optimizer = contestant.of(model)
    found: list[tuple[float, float]] = []
    for step, rows in zip(range(STEPS), batches(len(x), batch, generator), strict=False):
        if look is not None:
            look(step, model, x[rows])
        optimizer.zero_grad()
        loss = squares(model(x[rows]), targets[rows])
        if not loss.item() < TOO_LARGE:  # diverged
            return [*found, *[(float("inf"), float("inf"))] * (2 - len(found))]
        loss.backward()
        optimizer.step()
        if step + 1 in (EARLY, STEPS):
            with torch.no_grad():
                test_error = float(squares(model(test), function(test)))
                training_loss = float(squares(model(x[:SAMPLES]), targets[:SAMPLES]))
            found.append((test_error, training_loss))
    return found


def gain(weights: dict[str, Tensor], x: Tensor, *, corrected: bool) -> tuple[float, float]:
    """The largest eigenvalue of what a step makes of the outputs' gradient on its own batch, by power iteration.

    With it, the share of its eigenvector that is the same for all samples.
    """
    change = torch.ones(len(x), 2, dtype=torch.float64)
    change += 0.1 * torch.randn(change.shape, generator=torch.Generator().manual_seed(0))
    largest = 0.0
    for _ in range(10):
        wanted = change / change.square().mean().sqrt()
        model = network()
        model.load_state_dict(weights)
        model.double()
        rate = 1e-6
        optimizer = Contestant("SGD", rate, 0.1 if corrected else None, bound=None).of(model)
        outputs = model(x.double())
        ((outputs * wanted).sum() / len(x)).backward()
        optimizer.step()
        with torch.no_grad():
            change = (outputs - model(x.double())).detach() / rate
        largest = float((change * wanted).sum() / wanted.square().sum())
    return largest, float(change.mean(0).square().mean() / change.square().mean())


def gains(contestant: Contestant, seed: int, batch: int) -> list[float]:
    """Gains and shares, one after the other."""
    found: list[float] = []

    def look(step: int, model: nn.Module, x: Tensor) -> None:
        if step in LOOKS:
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            random_state = torch.get_rng_state()
            found.extend(gain(weights, x, corrected=contestant.relative_damping is not None))
            torch.set_rng_state(random_state)

    errors(contestant, seed, batch, look=look)
    return found


def digits_errors(contestant: Contestant, seed: int, batch: int, wrong: float) -> tuple[float, float]:
    """Per cent of test digits that are taken for others, and the training loss."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.target), generator=generator)
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    x, test, y, truth = inputs[:1200], inputs[1200:], labels[:1200], labels[1200:]
    y = torch.where(torch.rand(len(y), generator=generator) < wrong, torch.randint(10, y.shape, generator=generator), y)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = contestant.of(model)
    for _, rows in zip(range(STEPS), batches(len(x), batch, generator), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        mistakes = float((model(test).argmax(1) != truth).double().mean())
        return 100 * mistakes, float(nn.functional.cross_entropy(model(x), y))


def print_table(title: str, heads: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> None:
    heads = list(heads)
    print(f"\n{title}\n\n| | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}", flush=True)
    for name, cells in rows:
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def medians(values: Iterable[Iterable[float]]) -> list[float]:
    return [statistics.median(those) for those in zip(*values, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 500])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.seeds)
    sizes = " ".join(map(str, arguments.batches))
    print(f"python benchmarks/large_batches.py --seeds {len(seeds)} --batches {sizes}")
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}, medians of the seeds")

    cases = [(batch, new) for batch in arguments.batches for new in (False, True)]
    heads = [f"batch {batch}, {'new samples' if new else f'{SAMPLES} samples'}" for batch, new in cases]
    early: list[tuple[str, list[str]]] = []

    def regression_rows() -> Iterable[tuple[str, list[str]]]:
        for contestant in REGRESSION:
            by_case = [[errors(contestant, seed, batch, new_samples=new) for seed in seeds] for batch, new in cases]
            texts = [
                ["{:.3f} ({:.3f})".format(*medians(run[when] for run in runs)) for runs in by_case] for when in (0, 1)
            ]
            early.append((str(contestant), texts[0]))
            yield str(contestant), texts[1]

    print_table(f"Test error (training loss) after {STEPS} steps", heads, regression_rows())
    print_table(f"The same after {EARLY} steps", heads, early)

    def gain_rows() -> Iterable[tuple[str, list[str]]]:
        for contestant in (Contestant("SGD", 0.1), *(Contestant("C-SGD", rate, 0.1) for rate in (0.01, 0.03, 0.1))):
            for batch in arguments.batches:
                middle = medians(gains(contestant, seed, batch) for seed in seeds)
                cells = [f"{size:.1f} ({share:.2f})" for size, share in zip(middle[::2], middle[1::2], strict=True)]
                yield f"{contestant}, batch {batch}", [*cells, f"{1 / contestant.rate:.0f}"]

    print_table("Gain of a step", [*(f"step {step}" for step in LOOKS), "1 / rate"], gain_rows())

    digit_cases = [(batch, wrong) for wrong in (0.0, 0.2) for batch in (32, 500)]

    def digit_rows() -> Iterable[tuple[str, list[str]]]:
        for contestant in DIGITS:
            found = [
                medians(digits_errors(contestant, seed, batch, wrong) for seed in seeds) for batch, wrong in digit_cases
            ]
            yield str(contestant), ["{:.1f} % ({:.3f})".format(*those) for those in found]

    heads = [f"batch {batch}, {'one in five by chance' if wrong else 'right labels'}" for batch, wrong in digit_cases]
    print_table(f"Digits: test mistakes (training loss) after {STEPS} steps", heads, digit_rows())


if __name__ == "__main__":
    main()
