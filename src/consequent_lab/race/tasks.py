"""The tasks, in the order of work; each has a tiny form that shows in seconds on a CPU that everything runs."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from consequent_lab.augmentation import augmented
from consequent_lab.datasets import load_digits
from consequent_lab.models import LanguageModel, mlp
from consequent_lab.race import sources
from consequent_lab.race.measures import Best, Final, TimeTo
from consequent_lab.race.networks import InBfloat16, fourier, residual, siren
from consequent_lab.race.task import Task
from consequent_lab.samples import Data, Samples

ALL = ("SGD", "Nesterov", "Adam", "Muon", "C-SGD", "C-Nesterov", "C-Adam", "FOOF", "K-FAC", "SOAP", "Shampoo")
DECAYED = ("C-Nesterov", "C-AdamW", "C-SGD", "Nesterov", "AdamW", "Muon", "FOOF", "SOAP", "K-FAC", "Shampoo")
WITH_BATCH_NORM = ("Nesterov-BN", "AdamW-BN", "Muon-BN")
OF_SIGNALS = (
    *("Adam", "Muon", "C-Adam", "C-Nesterov", "C-SGD", "Nesterov", "SOAP", "FOOF", "K-FAC", "Shampoo"),
    *("Adam-0.95", "C-Adam-0.95", "C-Muon"),
)


def squares_of(outputs: int) -> Callable[[float], float]:
    """Returns what `mse_loss` divides half of the squared error by, as a function of the samples."""
    return lambda samples: samples * outputs / 2


# ---- 1: the paper's perceptron -----------------------------------------------------------------------------------

MLP_MEASURE = TimeTo("train_loss", 0.01)
MLP_REPORTED = (
    Best("test_accuracy", rising=True),
    TimeTo("train_loss", 0.1),
    Final("train_loss"),
)
IMAGES = 16_000  # for training


def perceptron(dataset: str, batch_size: int, settings_from: str | None) -> Task:
    """Returns the paper's network on a set; its loss is that of all training images, four times an epoch."""
    shape, classes, width = {
        "cifar10": (3072, 10, 800),
        "cifar100": (3072, 100, 1600),
        "fashion-mnist": (784, 10, 800),
    }[dataset]
    return Task(
        name=f"mlp-{dataset}-b{batch_size}",
        title=f"the paper's perceptron of eight hidden layers on {dataset}, {IMAGES:,} images, batches of {batch_size}",
        load=lambda place, seed: sources.images(dataset, place, IMAGES, 4000, flat=True),
        model=lambda variant: mlp(shape, (width,) * 8, classes),
        loss=cross_entropy,
        metric="accuracy",
        measure=MLP_MEASURE,
        reported=MLP_REPORTED,
        contestants=(*ALL, "FOOF-sparing", "C-Nesterov-averaged", "C-Adam-averaged", "C-Muon"),
        batch_size=batch_size,
        epochs=12,
        evaluations=48,
        settings_from=settings_from,
    )


MORE_DAMPED = {name: {"relative_damping": 3.0} for name in ("C-SGD", "C-Nesterov", "C-AdamW")}  # from 0.3 to 30


def perceptron_tested(batch_size: int) -> Task:
    """Returns the paper's network on CIFAR-10, judged by its test accuracy: everybody is tuned for it, with decay."""
    task = perceptron("cifar10", batch_size, None)
    return replace(
        task,
        name=f"{task.name}-test",
        title=f"{task.title}, for the best test accuracy",
        measure=Best("test_accuracy", rising=True),
        reported=(Final("test_accuracy", rising=True), TimeTo("train_loss", 0.1), Final("train_loss")),
        contestants=("SGD", *DECAYED),
        searches_decay=True,
        starts=MORE_DAMPED,
    )


# ---- 2, 3: ResNet-20 ---------------------------------------------------------------------------------------------

RESNET_STARTS = {  # by benchmarks/resnet20_exploration.py
    "C-Nesterov": {"lr": 0.3, "relative_damping": 0.1, "decay": 1e-3},
    "C-SGD": {"lr": 3.0, "relative_damping": 0.1, "decay": 1e-3},
    "C-AdamW": {"lr": 2e-3, "relative_damping": 0.1, "decay": 1e-3},
    "AdamW": {"lr": 3e-3, "decay": 3e-4},
    "Muon": {"lr": 0.02, "other_lr": 1e-3, "decay": 1e-4},
    "C-Muon": {"lr": 9e-3, "other_lr": 1e-3, "decay": 7.5e-4},  # near the best that Muon's search has found
    "Nesterov-BN": {"decay": 1e-4},
}


def decays(*values: float) -> tuple[dict[str, float], ...]:
    """Returns settings that differ in their decay alone."""
    return tuple({"decay": value} for value in values)


COVERED = {  # decays first, then rates and dampings with the best of them; Muon's own, half and twice of it
    "C-Nesterov": (
        *decays(1e-3, 5e-4, 2.5e-4),
        {"decay": 5e-4, "lr": 0.15},
        {"decay": 5e-4, "lr": 0.6},
        {"decay": 5e-4, "relative_damping": 0.3},
        {"decay": 5e-4, "relative_damping": 0.3, "lr": 0.6},
    ),
    "Nesterov-BN": (
        *decays(1e-4, 2.5e-4, 5e-4),
        {"decay": 2.5e-4, "lr": 0.05},
        {"decay": 2.5e-4, "lr": 0.2},
        {"decay": 3.5e-4},
        {"decay": 3.5e-4, "lr": 0.2},
    ),
    "Muon": ({}, *decays(3.7e-4, 1.5e-3)),
}


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns images that are moved by up to 4 of their 32 pixels, half of them mirrored."""
    return augmented(images, ("crop", "flip"), generator)


def crop_flip_and_cutout(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the same with a square of 8 by 8 pixels covered."""
    return augmented(images, ("crop", "flip", "cutout"), generator)


def resnet() -> Task:
    """Returns ResNet-20 on CIFAR-10, augmented, judged by its test accuracy."""
    return Task(
        name="resnet20-cifar10",
        title="ResNet-20 on CIFAR-10, augmented (crop, flip), without BatchNorm unless it says BN, batches of 128, "
        "bfloat16",
        load=lambda place, seed: sources.images("cifar10", place, None, None, flat=False),
        model=lambda variant: InBfloat16(residual((16, 32, 64), 3, batch_norm=variant == "BN")),
        loss=cross_entropy,
        metric="accuracy",
        evaluated=4096,
        measure=Final("test_accuracy", rising=True),
        reported=(Final("train_loss"), Final("train_accuracy", rising=True)),
        contestants=(*DECAYED[:7], *WITH_BATCH_NORM, *DECAYED[7:], "C-Muon"),
        batch_size=128,
        epochs=100,
        evaluations=50,
        search_epochs=20,  # on all images: of fewer images a search learns to prefer more decay
        augment=crop_and_flip,
        searches_decay=True,
        starts=RESNET_STARTS,
    )


def resnet_in_20_epochs() -> Task:
    """Returns the same with as many epochs as a trial of its search has."""
    task = resnet()
    return replace(
        task,
        name=f"{task.name}-20ep",
        title=f"{task.title}, 20 epochs",
        epochs=20,
        search_epochs=None,
        settings_from=task.name,
        choices={"C-Nesterov": decays(5e-4, 1e-3, 2e-3), "Nesterov-BN": decays(1e-4, 2.5e-4, 5e-4, 1e-3)},
    )


def resnet_covered() -> Task:
    """Returns the same with cutout besides."""
    task = resnet()
    return replace(
        task,
        name=f"{task.name}-cutout",
        title=task.title.replace("crop, flip", "crop, flip, cutout"),
        search_epochs=None,
        augment=crop_flip_and_cutout,
        settings_from=task.name,
        choices=COVERED,
    )


def resnet_by_heart() -> Task:
    """Returns ResNet-20 on CIFAR-10 as it is, judged by how soon it knows all images."""
    return replace(
        resnet(),
        name="resnet20-cifar10-train",
        title="ResNet-20 on CIFAR-10 to 100 % training accuracy, without augmentation, batches of 128, bfloat16",
        evaluated=None,
        measure=TimeTo("train_accuracy", 1.0, rising=True),
        reported=(TimeTo("train_accuracy", 0.99, rising=True), Final("train_loss"), Best("test_accuracy", rising=True)),
        contestants=(*ALL[:8], *WITH_BATCH_NORM, *ALL[8:]),
        epochs=30,
        evaluations=60,
        search_epochs=None,
        augment=None,
        searches_decay=False,
    )


# ---- 4: coordinates ----------------------------------------------------------------------------------------------

SIGNAL_STARTS = {
    "Adam": {"lr": 1e-3},
    "C-Adam": {"lr": 1e-3},
    **{name: {"lr": 1e-2, "other_lr": 1e-3} for name in ("Muon", "C-Muon")},
    "SOAP": {"lr": 3e-3},
}
HIDDEN = (256,) * 5


def coordinates(kind: str, name: str, side: int, settings_from: str | None) -> Task:
    """Returns a photograph as a network, the full batch of 128² or batches of 16,384 of 256² pixels."""
    network, activation = {"siren": (siren, "SIREN"), "fourier": (fourier, "ReLU behind Fourier features")}[kind]
    batches = side * side // 16_384
    steps = 200 * batches  # with 1,000 Adam is beyond 120 dB, where nothing is left to be told apart
    return Task(
        name=f"{kind}-{side}-{name}",
        title=f"the picture '{name}' of {side}² pixels as a network of 5×256, {activation}, "
        f"{'the full batch' if batches == 1 else 'batches of 16,384'}",
        load=lambda place, seed: sources.picture(name, place, side),
        model=lambda variant: network(2, HIDDEN, 3),
        loss=mse_loss,
        metric="psnr",
        measure=Final("psnr", rising=True),
        reported=(TimeTo("psnr", 30.0, rising=True), TimeTo("psnr", 40.0, rising=True)),
        contestants=OF_SIGNALS,
        batch_size=16_384,
        epochs=steps // batches,
        evaluations=20,
        loss_reduction=squares_of(3),
        settings_from=settings_from,
        starts=SIGNAL_STARTS,
    )


def distances() -> Task:
    """Returns a signed-distance field in space as a SIREN, judged at other points."""
    return Task(
        name="siren-sdf",
        title="a signed-distance field of balls and boxes as a SIREN 5×256, batches of 16,384 points",
        load=lambda place, seed: sources.distance_field(131_072, 16_384),
        model=lambda variant: siren(3, HIDDEN, 1),
        loss=mse_loss,
        metric="psnr",
        measure=Final("test_psnr", rising=True),
        reported=(Final("psnr", rising=True),),
        contestants=OF_SIGNALS,
        batch_size=16_384,
        epochs=250,
        evaluations=50,
        loss_reduction=squares_of(1),
        starts=SIGNAL_STARTS,
    )


# ---- 5: tables ---------------------------------------------------------------------------------------------------


def tabular(name: str) -> Task:
    """Returns a table; every seed has its own split."""
    inputs, outputs, is_class = {
        "diabetes": (10, 1, False),
        "breast-cancer": (30, 2, True),
        "wine": (13, 3, True),
        "digits": (64, 10, True),
        "robot-arm": (8, 1, False),
    }[name]
    return Task(
        name=f"table-{name}",
        title=f"the table '{name}', three hidden layers of 256, batches of 32",
        load=lambda place, seed: sources.table(name, place, seed),
        model=lambda variant: mlp(inputs, (256,) * 3, outputs),
        loss=cross_entropy if is_class else mse_loss,
        metric="accuracy" if is_class else "",
        measure=Final("test_loss"),
        reported=(Final("test_accuracy", rising=True), Final("train_loss")) if is_class else (Final("train_loss"),),
        contestants=DECAYED,
        batch_size=32,
        epochs=20,
        evaluations=20,
        loss_reduction="mean" if is_class else squares_of(outputs),
        searches_decay=True,
        search_seeds=3,  # held-out rows are few: of one split alone the winner is luck
        splits=True,
    )


# ---- 6: text -----------------------------------------------------------------------------------------------------


def bytes_of_sources() -> Task:
    """Returns a GPT of 10.7 M parameters on the bytes of Python's standard library."""
    return Task(
        name="gpt-bytes",
        title="a byte-level GPT of 10.7 M parameters on Python's standard library, batches of 32 windows of 256, "
        "bfloat16",
        load=lambda place, seed: sources.text(place, 256, 128),
        model=lambda variant: InBfloat16(LanguageModel(layers=6, width=384, heads=6, context=256, vocabulary=256)),
        loss=_loss_of_tokens,
        evaluated=128,
        measure=Final("test_loss"),
        reported=(Final("train_loss"),),
        contestants=("AdamW", "C-AdamW", "Muon", "C-Nesterov", "Nesterov", "SOAP", "C-Muon"),
        batch_size=32,
        epochs=2,
        evaluations=24,
        loss_reduction=lambda windows: windows * 256,
        searches_decay=True,
    )


def _loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the demo ----------------------------------------------------------------------------------------------------


def handwritten_digits() -> Task:
    """Returns the paper's network in small, on data that needs no download."""
    return Task(
        name=DEMO,
        title="scikit-learn's digits, eight hidden layers of 128, batches of 32",
        load=lambda place, seed: load_digits(),
        model=lambda variant: mlp(64, (128,) * 8, 10),
        loss=cross_entropy,
        metric="accuracy",
        measure=MLP_MEASURE,
        reported=(Final("train_loss"), Final("test_accuracy", rising=True)),
        contestants=("Muon", "C-Adam", "C-SGD", "Adam", "SGD"),  # the costly ones first: workers then end together
        batch_size=32,
        epochs=10,
        evaluations=30,
        starts={name: {"lr": 1e-3} for name in ("Adam", "C-Adam")},
    )


# ---- the list ----------------------------------------------------------------------------------------------------

DEMO = "demo"
FIRST_MLP = "mlp-cifar10-b32"
TASKS = {
    task.name: task
    for task in (
        perceptron("cifar10", 32, None),
        perceptron("cifar10", 128, None),
        perceptron("cifar10", 512, None),
        perceptron("cifar100", 32, FIRST_MLP),
        perceptron("fashion-mnist", 32, FIRST_MLP),
        perceptron_tested(32),
        perceptron_tested(128),
        resnet(),
        resnet_in_20_epochs(),
        resnet_covered(),
        resnet_by_heart(),
        *(
            coordinates(kind, name, side, None if number == 0 else f"{kind}-{side}-{sources.PICTURES[0]}")
            for kind in ("siren", "fourier")
            for side in (128, 256)
            for number, name in enumerate(sources.PICTURES)
        ),
        distances(),
        *(tabular(name) for name in (*sources.TABLES, "robot-arm")),
        bytes_of_sources(),
        handwritten_digits(),
    )
}


def task_named(name: str, *, tiny: bool = False) -> Task:
    """Returns a task, or its tiny form: a smaller model, hardly any data, two epochs."""
    if name not in TASKS:
        alike = get_close_matches(name, TASKS, n=3)
        meant = f", perhaps {' or '.join(alike)}" if alike else ""
        raise ValueError(f"there is no task {name!r}{meant}; `consequent race` lists all of them")
    return tiny_form(TASKS[name]) if tiny else TASKS[name]


def tiny_form(task: Task) -> Task:
    """Returns a task that has the parts of another one, and ends within a second or two."""
    kind = task.name.split("-")[0]
    batch = 512 if kind in ("siren", "fourier") else 16
    loads: dict[str, Callable[[Path | None, int], Data]] = {
        "mlp": partial(_random_images, flat=True, classes=100 if "cifar100" in task.name else 10),
        "resnet20": partial(_random_images, flat=False, classes=10),
        "gpt": lambda place, seed: _cut(sources.text(place, 16, 16), 48, 16),
    }
    models: dict[str, Callable[[str], nn.Module]] = {
        "mlp": lambda variant: mlp(3 * 8 * 8, (16, 16, 16), 100 if "cifar100" in task.name else 10),
        "resnet20": lambda variant: residual((4, 8), 1, batch_norm=variant == "BN"),
        "siren": lambda variant: siren(3 if "sdf" in task.name else 2, (16, 16), 1 if "sdf" in task.name else 3),
        "fourier": lambda variant: fourier(2, (16, 16), 3),
        "gpt": lambda variant: LanguageModel(layers=1, width=16, heads=2, context=16, vocabulary=256),
    }
    full_load = task.load
    return replace(
        task,
        name=f"{task.name}-tiny",
        title=f"{task.title} (tiny: shows that it runs)",
        load=loads.get(kind, lambda place, seed: _cut(full_load(place, seed), 4 * batch, batch)),
        model=models.get(kind, task.model),
        loss_reduction=(lambda windows: windows * 16) if kind == "gpt" else task.loss_reduction,
        batch_size=batch,
        epochs=2,
        evaluations=2,
        search_epochs=None,
        settings_from=None if task.settings_from is None else f"{task.settings_from}-tiny",
    )


def _random_images(place: Path | None, seed: int, *, flat: bool, classes: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(80, 3, 8, 8, generator=generator)
    labels = torch.randint(0, classes, (80,), generator=generator)
    images = images.flatten(1) if flat else images
    whole = Samples(images, labels)
    return Data(whole[:64], whole[64:])


def _cut(data: Data, train: int, test: int) -> Data:
    return Data(data.train[:train], data.test[:test])
