"""The paper's picture of a step: the output changes that were wanted, and those that the step really makes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from consequent.capture.records import Record
from consequent.capture.use import Use
from consequent.layers.operation import at_least_float32
from consequent.statistics.joint import JointInputs


@dataclass(frozen=True, repr=False)
class LayerForesight:
    """What one step did to one layer's outputs on the mini-batch it was computed from.

    Attributes:
        wanted: ``−μ ΔZ``, shaped like the layer's outputs, a tensor for each call of the layer.
        produced: ``ΔW X``, the change that the new weights make on the same inputs (its own layer's part: what the
            layers before it changed as well is not in it).
        ratio: ``‖produced‖ / ‖wanted‖``; 1 is ideal.
        cosine: between produced and wanted; 1 is straight toward the (virtual) targets. This is the whole step:
            momentum or Adam's scaling, which know of other mini-batches, take part in it.
        corrected_cosine: the cosine of the consequentialist gradient alone.
        backprop_cosine: the cosine that the plain gradient would have had.
        interference: ``XᵀX``, an entry per pair of samples, a matrix for each call of the layer: how much a change made
            for one sample spills over into another. Convolutions and sequences: summed over positions.
    """

    wanted: tuple[Tensor, ...]
    produced: tuple[Tensor, ...]
    ratio: float
    cosine: float
    corrected_cosine: float
    backprop_cosine: float
    interference: tuple[Tensor, ...]

    def __repr__(self) -> str:
        numbers = {name: getattr(self, name) for name in ("ratio", "cosine", "corrected_cosine", "backprop_cosine")}
        shapes = {name: [list(t.shape) for t in getattr(self, name)] for name in ("wanted", "produced", "interference")}
        parts = [f"{name}={value:.4g}" for name, value in numbers.items()]
        parts += [f"{name}: {', '.join(map(str, those))}" for name, those in shapes.items()]
        return f"LayerForesight({', '.join(parts)})"


class Foresight(dict[str, LayerForesight]):
    """The layers of the last step, by name. Printing it shows a table."""

    def __str__(self) -> str:
        width = max(len("layer"), *(len(name) for name in self), 0)
        lines = [
            f"{'':{width}}                   cosine between wanted and",
            f"{'layer':{width}}  produced/wanted  the step  correction  backpropagation",
        ]
        for name, layer in self.items():
            cosines = f"{layer.cosine:8.3f}  {layer.corrected_cosine:10.3f}  {layer.backprop_cosine:15.3f}"
            lines.append(f"{name:{width}}  {layer.ratio:15.4f}  {cosines}")
        return "\n".join(lines)


@dataclass
class _Watched:
    use: Use
    name: str
    inputs: Tensor | None
    output_grad: Tensor
    wanted: Tensor
    backprop: Tensor
    corrected: Tensor | None = None

    @property
    def kept_use(self) -> Use:
        """The use with its tensors, which are not kept elsewhere until the step is over."""
        return replace(self.use, inputs=self.inputs, output_grad=self.output_grad)


class Watch:
    """Takes notes before a step and compares after it."""

    def __init__(
        self,
        records: list[Record],
        names: Mapping[nn.Module, str],
        learning_rate_of: Callable[[Tensor], float],  # μ
        divisor: float,  # the loss's
    ) -> None:
        self.before: dict[Tensor, Tensor] = {}
        self.watched: list[_Watched] = []
        for record in records:
            if isinstance(record.statistic, JointInputs):
                continue  # of which no ΔZ is seen
            for parameter in (record.weight, *record.biases):
                self.before[parameter] = parameter.detach().clone()
            uses = list(record.uses)
            scale = divisor * learning_rate_of(record.first_use.key) * _scale_of_grad(uses)
            for use in uses:
                assert use.output_grad is not None
                plain = _output_change(use, lambda parameter: parameter.grad)
                wanted = -scale * _shaped(use, use.output_grad).to(plain.dtype)
                self.watched.append(_Watched(use, names[use.layer], use.inputs, use.output_grad, wanted, -plain))

    def note_corrected(self) -> None:
        """The gradients in ``.grad`` are the consequentialist ones now."""
        for call in self.watched:
            call.corrected = -_output_change(call.kept_use, lambda parameter: parameter.grad)

    def compare(self) -> Foresight:
        """After the step: what its weight change does to the outputs."""
        by_name: dict[str, list[_Watched]] = {}
        for watched in self.watched:
            by_name.setdefault(watched.name, []).append(watched)
        return Foresight({name: self._compare_layer(calls) for name, calls in by_name.items()})

    def _compare_layer(self, calls: list[_Watched]) -> LayerForesight:
        def change(parameter: Tensor) -> Tensor:
            return parameter.detach() - self.before[parameter]

        produced = tuple(_output_change(call.kept_use, change) for call in calls)
        wanted = tuple(call.wanted for call in calls)
        backprop = tuple(call.backprop for call in calls)
        wanted_norm, produced_norm = _norm(wanted), _norm(produced)
        return LayerForesight(
            wanted=wanted,
            produced=produced,
            ratio=produced_norm / wanted_norm if wanted_norm > 0 else float("nan"),
            cosine=_cosine(produced, wanted),
            corrected_cosine=_cosine(tuple(call.corrected for call in calls if call.corrected is not None), wanted),
            backprop_cosine=_cosine(backprop, wanted),
            interference=tuple(_interference(call) for call in calls),
        )


def _output_change(use: Use, change: Callable[[Tensor], Tensor | None]) -> Tensor:
    """What changes of the weight and the bias do to the layer's outputs."""
    weight = change(use.weight) if use.trains_weight else None
    bias = None if use.bias is None else change(use.bias)
    assert use.output_grad is not None
    if use.inputs is None or weight is None:
        shape = [1] * use.output_grad.ndim
        shape[-1 - use.operation.spatial_dims] = -1
        outputs = torch.zeros_like(use.output_grad, dtype=torch.promote_types(use.dtype, torch.float32))
        outputs = outputs if bias is None else outputs + bias.view(shape)
    else:
        outputs = use.operation.apply(use.inputs.to(weight.dtype), weight, bias)
    return _shaped(use, outputs)


def _shaped(use: Use, outputs: Tensor) -> Tensor:
    """As the layer's outputs are."""
    return outputs if use.output_shape is None else outputs.view(use.output_shape)


def _scale_of_grad(uses: list[Use]) -> float:
    """The factor by which ``.grad`` differs from ``ΔZᵀX``: 1 but for loss scaling, clipping, averaging over ranks."""
    products = squares = 0.0
    for parameter, plain in _plain_gradients(uses).items():
        if parameter.grad is not None:
            products += float((plain * parameter.grad).sum())
            squares += float(plain.square().sum())
    return products / squares if squares > 0 else 1.0


def _plain_gradients(uses: list[Use]) -> dict[Tensor, Tensor]:
    gradients: dict[Tensor, Tensor] = {}
    for use in uses:
        assert use.output_grad is not None
        output_grad = at_least_float32(use.output_grad)
        if use.inputs is not None:
            plain = use.operation.weight_gradient(at_least_float32(use.inputs), output_grad)
            gradients[use.weight] = gradients.get(use.weight, torch.zeros_like(plain)) + plain
        if use.bias is not None:
            plain = use.operation.bias_gradient(output_grad)
            gradients[use.bias] = gradients.get(use.bias, torch.zeros_like(plain)) + plain
    return gradients


def _interference(call: _Watched) -> Tensor:
    samples = call.use.samples
    if call.inputs is None:
        return call.wanted.new_full((samples, samples), call.use.rows / max(samples, 1))
    inputs = at_least_float32(call.inputs)
    return call.use.operation.interference(inputs, samples, ones=call.use.bias is not None)


def _norm(tensors: tuple[Tensor, ...]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _cosine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    norms = _norm(a) * _norm(b)
    product = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    return product / norms if norms > 0 else float("nan")
