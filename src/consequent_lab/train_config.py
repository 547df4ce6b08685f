"""What a training run is asked for. Imports nothing heavy: the command line reads this file for its options."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

DEFAULT_EPOCHS = 10
Optimiser = Literal["sgd", "momentum", "nesterov", "adam", "rmsprop"]
Normalisation = Literal["unit", "centred", "symmetric", "features"]
DATASETS = ("digits", "cifar10", "cifar100", "fashion-mnist")
MODELS = ("mlp", "resnet20", "resnet20-bn")


@dataclass(frozen=True)
class TrainConfig:
    """One training run, up to the machine it runs on.

    The last incomplete batch of an epoch is always dropped: every epoch then has the same number of iterations, on any
    device, with or without a CUDA graph. Another few samples are left out in every epoch.
    """

    dataset: str = "digits"
    """digits, which come with scikit-learn; cifar10, cifar100, fashion-mnist; or your own as module:function."""
    model: str = "mlp"
    """mlp, a perceptron; resnet20 or resnet20-bn, without or with BatchNorm; or your own as module:function."""
    hidden: tuple[int, ...] = (128,) * 8
    """mlp: the width of every hidden layer."""
    widths: tuple[int, ...] = (16, 32, 64)
    """resnet20: channels of every stage; every stage but the first halves the image."""
    blocks: int = 3
    """resnet20: of two convolutions, in every stage."""
    optimiser: Optimiser = "sgd"
    """One of torch's."""
    consequentialist: bool = True
    """Its C- version, or the plain one."""
    lr: float = 0.1
    """The learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate: it stays, or falls to 0 along half a cosine."""
    warm_up: int = 0
    """Iterations in which the learning rate first rises from 0, in equal steps."""
    weight_decay: float = 0.0
    """How fast weights shrink: by lr times this in every step, beside the correction (rmsprop: its own L2 penalty)."""
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = ()
    """Images, anew in every epoch: crop (moved by up to an eighth), flip (every other), cutout (a square covered)."""
    head_lr_factor: float = 1.0
    """The last layer's learning rate is this times the others'."""
    momentum: float = 0.95
    """momentum, nesterov: how much of the last step goes into the next."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam: how slowly the two moments change."""
    damping: float | None = None
    """λ of the C- versions as one number for all layers, without a bound on their steps, as in the paper."""
    relative_damping: float | None = None
    """λ as a fraction of the mean eigenvalue of a layer's inputs; None: the library's own, unless --damping says λ."""
    batch_size: int = 32
    """Samples per iteration."""
    iterations: int | None = None
    """How long to train; None: --epochs says it."""
    epochs: int | None = None
    """How often to go through the training set; None: 10 times, unless --iterations is given."""
    normalisation: Normalisation = "unit"
    """Inputs in [0, 1], [-0.5, 0.5] or [-1, 1], or every feature with mean 0 and variance 1."""
    seed: int = 0
    """Of the first weights and the order of samples."""
    log_every: int = 100
    """Iterations between two readings of what is known anyway: loss and accuracy of mini-batches, gradients' norms."""
    evaluate_every: int | None = None
    """Iterations between two evaluations; None: an epoch."""
    evaluate_training: bool = True
    """Evaluate on the full training set, too, not on the test set alone."""
    validation: float = 0.0
    """Hold out this fraction of the training set, and evaluate on it instead of the test set, as a search does."""
    gradient_norms: Literal["none", "applied", "both"] = "applied"
    """Norms by layer of the gradient that the optimiser gets; both: of the plain one, too."""
    checkpoint_every: int = 1000
    """Iterations between two checkpoints at most; there is one a minute, and one on Ctrl-C, in any case."""
    graph: bool | None = None
    """Replay the step as a CUDA graph; None: on a GPU, where it can be captured."""
    tf32: bool = True
    """Let a GPU round the inputs of products to TF32."""
    channels_last: bool = True
    """resnet20: the memory format that convolutions are faster with."""

    def __post_init__(self) -> None:
        for name, value, known in (("dataset", self.dataset, DATASETS), ("model", self.model, MODELS)):
            if value not in known and not is_own(value):
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, or your own as module:function, got {value!r}"
                )
        if self.iterations is not None and self.epochs is not None:
            raise ValueError("give iterations or epochs, not both")
        if self.damping is not None and self.relative_damping is not None:
            raise ValueError("give damping or relative_damping, not both")
        counts = ("blocks", "batch_size", "iterations", "epochs", "log_every", "evaluate_every", "checkpoint_every")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("lr", "head_lr_factor", "weight_decay", "warm_up", "damping", "relative_damping", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a fraction in [0, 1), got {self.validation}")
        if self.optimiser == "nesterov" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden layers need a width of at least 1, got {self.hidden}")
        if not self.widths or any(width < 1 for width in self.widths):
            raise ValueError(f"widths must name at least one stage of 1 channel or more, got {self.widths}")
        if any(after < before for before, after in pairwise(self.widths)):
            raise ValueError(f"widths must not shrink: shortcuts pad channels, they drop none; got {self.widths}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def optimiser_name(self) -> str:
        """The optimiser's name in tables.

        >>> TrainConfig(optimiser="nesterov").optimiser_name, TrainConfig(consequentialist=False).optimiser_name
        ('C-Nesterov', 'SGD')
        """
        names = {"sgd": "SGD", "rmsprop": "RMSprop"}
        name = names.get(self.optimiser, self.optimiser.capitalize())
        return f"C-{name}" if self.consequentialist else name

    @property
    def title(self) -> str:
        """The run in a few words.

        >>> TrainConfig(relative_damping=0.5, seed=3).title
        'C-SGD, lr 0.1, relative damping 0.5, mlp on digits, seed 3'
        >>> TrainConfig(damping=0.01).title
        'C-SGD, lr 0.1, damping 0.01, mlp on digits, seed 0'
        """
        damping = "" if self.damping is None else f", damping {self.damping:g}"
        damping += "" if self.relative_damping is None else f", relative damping {self.relative_damping:g}"
        return f"{self.optimiser_name}, lr {self.lr:g}{damping}, {self.model} on {self.dataset}, seed {self.seed}"

    @property
    def is_convolutional(self) -> bool:
        """Whether the model takes images rather than rows."""
        return self.model in ("resnet20", "resnet20-bn")

    def total_iterations(self, iterations_per_epoch: int) -> int:
        """Returns how many iterations the run has."""
        return self.iterations or (self.epochs or DEFAULT_EPOCHS) * iterations_per_epoch


def is_own(name: str) -> bool:
    """Says whether this names a function of the user's.

    >>> is_own("mine.models:deep"), is_own("digits"), is_own("C:/data")
    (True, False, False)
    """
    return re.fullmatch(r"\w+(\.\w+)*:\w+", name) is not None
