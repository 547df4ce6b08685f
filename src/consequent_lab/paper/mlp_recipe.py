"""What the paper's third experiment runs: a deep perceptron on three data sets, SGD against C-SGD."""

from typing import Literal

from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.train_config import TrainConfig

Dataset = Literal["digits", "cifar10", "cifar100", "fashion-mnist"]
Normalisation = Literal["unit", "features"]

NAME = "mlp"
TITLES = {"digits": "Digits", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist": "Fashion-MNIST"}
DATASETS: tuple[Dataset, ...] = ("cifar10", "cifar100", "fashion-mnist")
NORMALISATIONS: tuple[Normalisation, ...] = ("unit", "features")
DAMPING = {"unit": 1e-3, "features": 1e-2}


def race(quick: bool = False) -> Race:
    """Returns the experiment, or a small one on the digits."""
    datasets: tuple[Dataset, ...] = ("digits",) if quick else DATASETS
    contestants = tuple(
        Contestant(
            variant_of(dataset, normalisation, label),
            label,
            _config(dataset, normalisation, label, quick),
            setting=title_of(dataset, normalisation),
            timed_with=variant_of(dataset, NORMALISATIONS[0], label),
        )
        for dataset in datasets
        for normalisation in NORMALISATIONS
        for label in ("C-SGD", "SGD")
    )
    if quick:
        search = Search(epochs=2, lowest=-8, highest=-4, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=40)
    return Race(NAME, contestants, Search(epochs=2), timed_iterations=1000)


def title_of(dataset: str, normalisation: str) -> str:
    """Returns a data set's name as in the paper.

    >>> title_of("cifar10", "features"), title_of("cifar100", "unit")
    ('CIFAR-10 NF', 'CIFAR-100')
    """
    return TITLES[dataset] + (" NF" if normalisation == "features" else "")


def variant_of(dataset: str, normalisation: str, label: str) -> str:
    """Returns a contestant's name.

    >>> variant_of("cifar10", "unit", "C-SGD")
    'cifar10-unit-c-sgd'
    """
    return f"{dataset}-{normalisation}-{label.lower()}"


def _config(dataset: Dataset, normalisation: Normalisation, label: str, quick: bool) -> TrainConfig:
    width, layers = (1600 if dataset == "cifar100" else 800), 8
    if quick:
        width, layers = 32, 3
    return TrainConfig(
        dataset=dataset,
        model="mlp",
        hidden=(width,) * layers,
        optimiser="sgd",
        consequentialist=label == "C-SGD",
        damping=DAMPING[normalisation],
        normalisation=normalisation,
        batch_size=32,
        epochs=6 if quick else 100,
        log_every=15 if quick else 500,
        checkpoint_every=90 if quick else 10_000,
    )
