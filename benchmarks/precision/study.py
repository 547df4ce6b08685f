"""What rounding does to the update: Gram matrices in float32, TF32 and bfloat16, on the activations of real training.

The reference is all in float64, from the same captured inputs and gradients. Every other update differs from it only in
the format of the Gram matrix and in a solve in float32.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

import consequent
from benchmarks.precision.formats import FORMATS
from benchmarks.precision.images import Images
from consequent.layers import kind_of
from consequent_lab.models import mlp, residual_net, resnet20
from consequent_lab.rounding import tf32


@dataclass(frozen=True)
class Setup:
    """A network in training, as in the paper's experiments."""

    name: str
    title: str
    model: Callable[[], nn.Sequential]  # its last module is the head
    batch: int
    learning_rate: float  # μ
    head_factor: float  # of the head's learning rate
    momentum: float
    damping: float  # λ
    flat: bool = False  # images go in as rows

    def optimizer(self, model: nn.Sequential) -> Optimizer:
        """Returns the C- version, attached to the model."""
        groups: list[dict[str, Any]] = [
            {"params": list(model[:-1].parameters())},
            {"params": list(model[-1].parameters()), "lr": self.learning_rate * self.head_factor},
        ]
        optimizer = SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0)
        consequent.attach(optimizer, model, damping=self.damping, bound=None)
        return optimizer

    def form(self, images: Tensor) -> Tensor:
        """Returns images as the network wants them."""
        return images.flatten(1) if self.flat else images


def setups(*, quick: bool) -> tuple[Setup, ...]:
    """Returns the networks: convolutions are solved on the feature side, the perceptron on the sample side."""
    residual = partial(resnet20, batch_norm=False)
    if quick:
        residual = partial(residual_net, (8, 16), 1)
    hidden = (64, 64) if quick else (800,) * 8
    images = 16 if quick else 128
    return (
        Setup(
            "resnet20",
            f"{'Residual net of 6 layers' if quick else 'ResNet-20'}, no BatchNorm, batch {images}",
            residual,
            batch=images,
            learning_rate=10 / 128,
            head_factor=0.1,
            momentum=0.95,
            damping=0.03,
        ),
        Setup(
            "mlp",
            f"MLP 3072-{len(hidden)}×{hidden[0]}-10, batch 32",
            partial(mlp, 3072, hidden, 10),
            batch=32,
            learning_rate=3 / 32,
            head_factor=1.0,
            momentum=0.0,
            damping=0.01,
            flat=True,
        ),
    )


@dataclass(frozen=True)
class Captured:
    """What one layer saw: inputs with the 1 of the bias, and output gradients, a row per sample and position."""

    name: str
    inputs: Tensor
    output_grads: Tensor

    @property
    def side(self) -> str:
        """The side with the smaller matrix."""
        return "samples" if self.inputs.shape[0] < self.inputs.shape[1] else "features"


@dataclass(frozen=True)
class LayerError:
    """The relative error of one layer's update in every format; None where the factorisation failed."""

    layer: str
    side: str
    size: int  # of the Gram matrix
    condition: float  # of the damped Gram matrix, in float64
    errors: dict[str, float | None]


@dataclass(frozen=True)
class Moment:
    """All layers at one moment of the training."""

    setup: Setup
    iteration: int
    loss: float
    layers: tuple[LayerError, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of Gram matrices that were tried."""
        return tuple(self.layers[0].errors)

    def errors(self, name: str) -> list[float]:
        """Returns the errors in a format, ascending, of the layers whose factorisation succeeded."""
        return sorted(error for layer in self.layers if (error := layer.errors[name]) is not None)

    def failures(self, name: str) -> int:
        """Returns how many factorisations failed in a format."""
        return len(self.layers) - len(self.errors(name))

    def record(self) -> dict[str, Any]:
        """Returns the moment for a JSON file."""
        return {
            "network": self.setup.name,
            "title": self.setup.title,
            "damping": self.setup.damping,
            "iteration": self.iteration,
            "loss": self.loss,
            "layers": [vars(layer) for layer in self.layers],
            "median_error": {name: statistics.median(self.errors(name) or [math.nan]) for name in self.formats},
            "largest_error": {name: max(self.errors(name), default=math.nan) for name in self.formats},
            "failed_factorisations": {name: self.failures(name) for name in self.formats},
        }


def moments(setup: Setup, images: Images, device: str, iterations: int, seed: int = 0) -> Iterator[Moment]:
    """Trains, and looks at a batch after 1 %, 10 % and all of the iterations."""
    torch.manual_seed(seed)
    model = setup.model().to(device)
    optimizer = setup.optimizer(model)
    watched = setup.model().to(device)  # the same weights without any correction's hooks
    generator = torch.Generator().manual_seed(seed)
    stops = {math.ceil(iterations * part) for part in (0.01, 0.1, 1)}
    for iteration in range(1, iterations + 1):
        inputs, labels = (tensor.to(device) for tensor in images.batch(setup.batch, generator))
        optimizer.zero_grad()
        loss = cross_entropy(model(setup.form(inputs)), labels)
        loss.backward()
        optimizer.step()
        if iteration in stops:
            watched.load_state_dict(model.state_dict())
            inputs, labels = (tensor.to(device) for tensor in images.batch(setup.batch, generator))
            seen = capture(watched, setup.form(inputs), labels)
            found = tuple(layer_error(captured, setup.damping) for captured in seen)
            yield Moment(setup, iteration, loss.item(), found)


def capture(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Captured]:
    """Returns what every Linear and Conv2d of the model sees on a batch, in the precision of the training."""
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def see(name: str, layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.append((name, layer, arguments[0].detach(), output))

    handles = [
        module.register_forward_hook(partial(see, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    try:
        cross_entropy(model(inputs), labels).backward()
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, layer, layer_inputs, output in seen:
        assert output.grad is not None
        kind = kind_of(layer)
        assert kind is not None
        call = kind.of(layer).canonical(layer_inputs)
        assert call is not None
        X = call.operation.input_rows(call.inputs)[0]
        X = pad(X, (0, 1), value=1.0) if layer.bias is not None else X
        found.append(Captured(name, X, call.operation.output_rows(output.grad)[0]))
    return found


@tf32(allowed=False)
def layer_error(captured: Captured, damping: float) -> LayerError:
    """Returns ‖U − U_ref‖ / ‖U_ref‖ for every format, U_ref the update computed in float64 throughout."""
    X, dZ = captured.inputs, captured.output_grads
    side = captured.side
    exact = _gram(X.double(), side)
    gradient = dZ.double().mT @ X.double()
    reference = _update(exact, X.double(), dZ.double(), gradient, side, damping)
    assert reference is not None, "float64 is enough for any λ in use"
    grams = {name: _gram(rounded(X), side).float() for name, rounded in FORMATS.items()}
    if X.is_cuda:  # beside its emulation, the hardware
        with tf32(allowed=True):
            grams["tf32 units"] = _gram(X, side)
    errors: dict[str, float | None] = {}
    for name, gram in grams.items():
        update = _update(gram, X, dZ, gradient.float(), side, damping)
        errors[name] = None if update is None else float((update.double() - reference).norm() / reference.norm())
    eigenvalues = torch.linalg.eigvalsh(exact).clamp(min=0) + damping
    condition = float(eigenvalues[-1] / eigenvalues[0])
    return LayerError(captured.name, side, len(exact), condition, errors)


def _gram(X: Tensor, side: str) -> Tensor:
    return X @ X.mT if side == "samples" else X.mT @ X


def _update(gram: Tensor, X: Tensor, dZ: Tensor, gradient: Tensor, side: str, damping: float) -> Tensor | None:
    """Returns the update, solved in the Gram matrix's own type, or None if its factorisation fails."""
    damped = gram + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(damped)
    if info:
        return None
    if side == "samples":
        return torch.cholesky_solve(dZ, factor).mT @ X
    return torch.cholesky_solve(gradient.mT, factor).mT
