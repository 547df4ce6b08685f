"""The pictures of docs/idea.md, drawn from what the library computes: `python benchmarks/idea_pictures.py`.

They have no background and a grey that is readable on white and on black, so that one file serves both.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import consequent
from consequent.filters import apa, lms, nlms
from consequent.paper import first_extension

GREY = "#808080"
PLAIN, OURS = "#4f94c1", "#d55e00"
STYLE = {
    "svg.hashsalt": "consequent",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
}


def filters() -> Figure:
    """Draws LMS and NLMS on samples of unequal size, NLMS and APA on samples that are alike."""
    torch.manual_seed(0)
    T, D = 400, 8
    truth = torch.randn(D)
    sizes = torch.where(torch.rand(T, 1) < 0.1, 4.0, 0.5)
    unequal = torch.nn.functional.normalize(torch.randn(T, D)) * sizes
    alike = 0.3 * torch.randn(T, D) + torch.randn(T, 1)

    def distance(history: Tensor) -> Tensor:
        return (history - truth).norm(dim=1) / truth.norm()

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
    left.set_title("samples of unequal size")
    largest = 1.0 / unequal.square().sum(1).max().item()
    left.plot(distance(lms(unequal, unequal @ truth, largest).weights), color=PLAIN, ls="--", label="LMS")
    left.plot(distance(nlms(unequal, unequal @ truth, 0.5).weights), color=OURS, label="NLMS")
    right.set_title("samples that are alike")
    right.plot(distance(nlms(alike, alike @ truth, 0.5).weights), color=PLAIN, ls="--", label="NLMS")
    right.plot(distance(apa(alike, alike @ truth, 0.5, order=4).weights), color=OURS, label="APA, 4 samples")
    for axes in (left, right):
        axes.set(yscale="log", xlabel="samples seen", ylim=(1e-4, 2))
        axes.legend(frameon=False)
    left.set_ylabel("distance from the true filter")
    return figure


def one_step() -> Figure:
    """Draws where the outputs of one dense layer go in one step, by three rules."""
    torch.manual_seed(3)
    N, D = 6, 12
    X = 0.7 * torch.randn(D, N) + torch.randn(D, 1)
    angles = torch.deg2rad(torch.tensor([10.0, 50.0, 90.0, 140.0, 200.0, 300.0]))
    wanted = torch.stack([angles.cos(), angles.sin()])
    rules: dict[str, Callable[[], Tensor]] = {
        "backpropagation": lambda: wanted @ X.T,
        "each sample normalised": lambda: first_extension(X, -wanted),
        "consequentialism": lambda: consequent.consequential_gradient(X.T, wanted.T, damping=1e-3),
    }
    figure, panels = plt.subplots(1, 3, figsize=(8, 3.2), sharex=True, sharey=True)
    for axes, (name, change) in zip(panels, rules.items(), strict=True):
        produced = change() @ X
        produced = produced * (produced * wanted).sum() / produced.square().sum()  # the length that fits best
        _arrows(axes, wanted, produced, OURS if name == "consequentialism" else PLAIN)
        cosine = torch.cosine_similarity(produced.flatten(), wanted.flatten(), dim=0)
        axes.set_title(f"{name}\ncosine {cosine:.2f}", fontsize=10)
        axes.set(xticks=[], yticks=[], aspect="equal")
    return figure


def _arrows(axes: Axes, wanted: Tensor, produced: Tensor, colour: str) -> None:
    origin = torch.zeros(wanted.shape[1])
    options = {"angles": "xy", "scale_units": "xy", "scale": 1}
    axes.quiver(origin, origin, *wanted, color=GREY, alpha=0.45, width=0.02, **options)
    axes.quiver(origin, origin, *produced, color=colour, width=0.012, **options)
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    axes.spines[:].set_visible(False)


def interference() -> Figure:
    """Draws which sample's change reaches which other sample, for a mini-batch of digits."""
    images = torch.tensor(load_digits().data[:24] / 16, dtype=torch.float32)
    X = torch.cat([images, torch.ones(24, 1)], dim=1).T
    gram = X.T @ X
    damping = 0.1 * gram.trace() / 24
    matrices = {
        "backpropagation: XᵀX": gram / gram.diag().mean(),
        "each sample normalised": gram / gram.diag(),
        "consequentialism, λ as by default": gram @ torch.linalg.inv(gram + damping * torch.eye(24)),
    }
    figure, panels = plt.subplots(1, 3, figsize=(8, 2.8))
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        axes.imshow(matrix, cmap="PuOr_r", vmin=-1, vmax=1)
        axes.set_title(name, fontsize=9)
        axes.set(xticks=[], yticks=[], xlabel="a change for this sample …")
    panels[0].set_ylabel("… reaches this one")
    return figure


def in_a_deep_network() -> Figure:
    """Draws, for every layer of a deep network, how well the change of its outputs follows the one that was wanted."""
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    labels = torch.tensor(data.target)
    sizes = [64, *[64] * 8, 10]
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(batch: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()

    consequent.attach(optimizer, model)
    cosines: dict[str, list[list[float]]] = {"backprop_cosine": [], "cosine": []}
    for batch in torch.randperm(len(images))[: 50 * 32].split(32):
        seen = consequent.foresight(optimizer, model, partial(backward, batch))
        for name, steps in cosines.items():
            steps.append([getattr(seen[str(2 * place)], name) for place in range(len(layers))])
    figure, axes = plt.subplots(figsize=(8, 2.8))
    named = {"backprop_cosine": ("backpropagation", PLAIN, "--"), "cosine": ("consequentialism", OURS, "-")}
    for name, (label, colour, dashes) in named.items():
        middle = torch.tensor(cosines[name]).median(0).values
        axes.plot(range(1, len(layers) + 1), middle, marker="o", color=colour, ls=dashes, label=label)
    axes.set(xlabel="layer", ylabel="cosine, wanted and produced", ylim=(0, 1.05), xticks=range(1, len(layers) + 1))
    axes.legend(frameon=False, loc="center left")
    return figure


PICTURES = {
    "filters": filters,
    "one-step": one_step,
    "interference": interference,
    "in-a-deep-network": in_a_deep_network,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/pictures"))
