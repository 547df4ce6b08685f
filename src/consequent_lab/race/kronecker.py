"""K-FAC (Martens and Grosse, 2015) and FOOF (Benzing, 2022): averaged factors that are inverted now and then."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.optim import SGD

AVERAGING = 0.95  # of the factors
REFRESH = 10  # steps
FRESH = 200  # steps: in short runs averages of every tenth would be those of the first
KL_BOUND = 1e-3  # on lr² · gradient · natural gradient, by which a step of K-FAC is shortened, as is usual


class FOOF(SGD):
    """Nesterov's descent along `gradient · (A + λI)⁻¹` for every dense layer and convolution.

    `A` is the averaged second moment of a layer's inputs, a one for the bias appended, and λ the damping. Parameters of
    other layers keep their gradient. Factors are updated in each of the first `FRESH` steps, then every `REFRESH`;
    inverses likewise, or, if it is `sparing`, every `REFRESH` from the first step on.
    """

    def __init__(self, model: nn.Module, lr: float, damping: float, *, sparing: bool = False) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self._damping = damping
        self._fresh_inverses = 0 if sparing else FRESH
        self._steps = 0
        self._moments: dict[nn.Linear | nn.Conv2d, list[Tensor]] = {}
        self._inverses: dict[nn.Linear | nn.Conv2d, list[Tensor]] = {}
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.register_forward_hook(self._watch)

    def _is_due(self, fresh: int) -> bool:
        return self._steps < fresh or self._steps % REFRESH == 0

    def _watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and self._is_due(FRESH):
            output.register_hook(lambda gradient: self._average(layer, inputs[0].detach(), gradient))  # type: ignore[arg-type]

    @torch.no_grad()
    def _average(self, layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradient: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            patches = unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
            inputs, gradient = patches.transpose(1, 2), gradient.flatten(2).transpose(1, 2)
        rows = inputs.flatten(0, -2)
        if layer.bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        new = self._factors(rows, gradient.flatten(0, -2), len(inputs))
        old = self._moments.get(layer, new)
        self._moments[layer] = [before.lerp(now, 1 - AVERAGING) for before, now in zip(old, new, strict=True)]

    def _factors(self, rows: Tensor, gradients: Tensor, samples: int) -> list[Tensor]:
        """Returns a step's second moments, of rows of inputs and of gradients of outputs."""
        return [rows.T @ rows / len(rows)]

    def _inverted(self, moments: list[Tensor]) -> list[Tensor]:
        return [_inverse(moment, self._damping) for moment in moments]

    def _replaced(self, gradient: Tensor, inverses: list[Tensor]) -> Tensor:
        """Returns what a layer's gradient `[outputs, inputs]` becomes."""
        return gradient @ inverses[0]

    def _shortening(self, product: Tensor) -> Tensor | float:
        """Returns the factor of a step, whose gradients have this product with what they became."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with the gradients of all layers replaced."""
        if self._is_due(self._fresh_inverses):
            self._inverses = {layer: self._inverted(moments) for layer, moments in self._moments.items()}
        self._steps += 1
        changes: list[tuple[Tensor, Tensor]] = []
        products = []
        for layer, inverses in self._inverses.items():
            parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
            gradient = torch.cat([_gradient(parameter) for parameter in parameters], 1)
            replaced = self._replaced(gradient, inverses)
            products.append((gradient * replaced).sum())
            widths = [parameter[0].numel() for parameter in parameters]
            changes += list(zip(parameters, replaced.split(widths, 1), strict=True))
        factor = self._shortening(torch.stack(products).sum())
        for parameter, change in changes:
            parameter.grad = factor * change.reshape_as(parameter)
        return super().step(closure)


class KFAC(FOOF):
    """The same along `(G + μI)⁻¹ · gradient · (A + νI)⁻¹`, where μν is λ, shared by the factors' mean eigenvalues.

    `G` is the averaged second moment of the gradients of a layer's outputs on the very targets (the empirical Fisher),
    for a loss that is a mean over samples.
    """

    def _factors(self, rows: Tensor, gradients: Tensor, samples: int) -> list[Tensor]:
        # A sample's own gradient is N times its part in that of the mean.
        return [rows.T @ rows / len(rows), gradients.T @ gradients * samples]

    def _inverted(self, moments: list[Tensor]) -> list[Tensor]:
        inputs, outputs = (moment.diagonal().mean().clamp(min=1e-30) for moment in moments)
        ratio, root = (inputs / outputs).sqrt(), self._damping**0.5
        return [_inverse(moments[0], root * ratio), _inverse(moments[1], root / ratio)]

    def _replaced(self, gradient: Tensor, inverses: list[Tensor]) -> Tensor:
        return inverses[1] @ gradient @ inverses[0]

    def _shortening(self, product: Tensor) -> Tensor:
        rate = float(self.param_groups[0]["lr"])
        return (KL_BOUND / (rate**2 * product).clamp(min=KL_BOUND)).sqrt()


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"a parameter of shape {list(parameter.shape)} has no gradient: call backward() first")
    return parameter.grad.reshape(len(parameter), -1)


def _inverse(moment: Tensor, damping: Tensor | float) -> Tensor:
    damped = moment + damping * torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
