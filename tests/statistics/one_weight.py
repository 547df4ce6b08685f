"""One weight and the uses of it, without a model or a correction; and what the naive reference makes of them."""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import reference
import torch
from by_layer import called
from hypothesis import strategies as st
from torch import Tensor, nn

from consequent.capture.records import Record
from consequent.capture.use import Entry, Use
from consequent.maths.damping import Damping

DAMPINGS = st.sampled_from([Damping(0.3), Damping(7.0), Damping(0.2, relative=True)])
FACTORS = st.sampled_from([1.0, 0.25, -2.0])  # by which the gradient was scaled since the backward pass


@dataclass
class Case:
    """Calls of layers that share one weight, in float64.

    Attributes:
        layers: that were called, in this order.
        inputs: of each call.
        output_grads: ΔZ of each call.
        trains_weight: otherwise only the biases have gradients.
    """

    layers: list[nn.Module]
    inputs: list[Tensor]
    output_grads: list[Tensor]
    trains_weight: bool = True

    @property
    def weight(self):
        return self.layers[0].weight

    @property
    def biases(self):
        """In the order in which they are met."""
        biases = [bias for bias in map(reference.bias_of, self.layers) if bias is not None]
        return list(dict.fromkeys(biases))

    def uses(self):
        """New ones, as a backward pass leaves them."""
        return [self._use(*call) for call in zip(self.layers, self.inputs, self.output_grads, strict=True)]

    def _use(self, layer, inputs, output_grad):
        call = called(layer, inputs)
        use = Use(
            layer=layer,
            operation=call.operation,
            weight=self.weight,
            bias=reference.bias_of(layer),
            trains_weight=self.trains_weight,
            entry=Entry(layer, call.samples, inputs.numel()),
            rows=call.operation.rows(output_grad),
            dtype=output_grad.dtype,
            samples=call.samples,
        )
        use.take(call.inputs if self.trains_weight else None, output_grad)
        return use

    def backpropagate(self, factor=1.0):
        """Put the plain gradients, times the factor, into ``.grad`` of all parameters."""
        parameters = [*([self.weight] if self.trains_weight else []), *self.biases]
        outputs = [layer(inputs) for layer, inputs in zip(self.layers, self.inputs, strict=True)]
        grads = [factor * grad for grad in self.output_grads]
        for parameter, gradient in zip(parameters, torch.autograd.grad(outputs, parameters, grads), strict=True):
            parameter.grad = gradient

    def gradients(self):
        """``[groups, out_features, columns]``: what is in ``.grad``, the biases' columns last."""
        layer = self.layers[0]
        groups = getattr(layer, "groups", 1)
        parts = [bias.grad.numpy().reshape(groups, -1, 1) for bias in self.biases if bias.grad is not None]
        if self.weight.grad is not None:
            matrices = reference.gradient_matrices(layer, reference.to_numpy(self.weight.grad), None)
            parts.insert(0, np.stack(matrices))
        return np.concatenate(parts, axis=-1).copy()

    def rows(self):
        """``[groups, rows, columns]``: X, with a column for each parameter that has a gradient."""
        blocks = []
        for layer, inputs in zip(self.layers, self.inputs, strict=True):
            features = np.stack(reference.input_rows(layer, inputs))
            columns = [features] if self.weight.grad is not None else []
            for bias in self.biases:
                if bias.grad is not None:
                    columns.append(np.full((*features.shape[:2], 1), float(reference.bias_of(layer) is bias)))
            blocks.append(np.concatenate(columns, axis=-1))
        return np.concatenate(blocks, axis=1)

    def expected(self, damping):
        """``[groups, out_features, columns]``: the consequentialist gradient, naively."""
        pairs = zip(self.layers, self.output_grads, strict=True)
        dZ = np.concatenate([np.stack(reference.output_rows(layer, grad)) for layer, grad in pairs], axis=1)
        given = ("relative", damping.value) if damping.relative else damping.value
        groups = zip(self.rows(), dZ, strict=True)
        return np.stack([reference.consequential_gradient(X, of_group, given) for X, of_group in groups])


@st.composite
def cases(draw, most_uses=3):
    """Random shapes: dense layers or convolutions in groups, with several uses, whose biases may be shared."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    features, outputs, groups = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.sampled_from([None, 1, 2]))
    layers = []
    for kind in draw(st.lists(st.sampled_from(["none", "own", "first"]), min_size=1, max_size=most_uses)):
        if groups is None:
            layer = nn.Linear(features, outputs, bias=kind != "none")
        else:
            layer = nn.Conv1d(groups * features, groups * outputs, 2, groups=groups, bias=kind != "none")
        layer = layer.double()
        first = next((bias for bias in map(reference.bias_of, layers) if bias is not None), None)
        if kind == "first" and first is not None:
            layer.bias = first
        if layers:
            layer.weight = layers[0].weight
        layers.append(layer)
    shape = (features,) if groups is None else (groups * features, 3)
    inputs = [torch.randn(draw(st.integers(1, 5)), *shape).double() for _ in layers]
    output_grads = [torch.randn_like(layer(x)) for layer, x in zip(layers, inputs, strict=True)]
    return Case(layers, inputs, output_grads)


def dense_case(biases=(True,), features=5, rows=3, **options):
    """One of dense layers, a use for each of them."""
    torch.manual_seed(0)
    layers = [nn.Linear(features, 2, bias=bias).double() for bias in biases]
    for layer in layers:
        layer.weight = layers[0].weight
    inputs = [torch.randn(rows, features).double() for _ in layers]
    return Case(layers, inputs, [torch.randn(rows, 2).double() for _ in layers], **options)


def gathered(kind, uses):
    """The statistic of all uses, from the first one on."""
    return reduce(lambda statistic, use: statistic.add(use), uses[1:], kind.of(uses[0]))


def check_solved(case, statistic, damping, *, may_wait=True, factor=1.0, rtol=1e-8):
    """Solve with the statistic for the scaled plain gradient, and compare the new gradients; returns the solution."""
    case.backpropagate(factor)
    return check_solved_as_it_is(case, statistic, damping, factor * case.expected(damping), may_wait, rtol)


def check_solved_as_it_is(case, statistic, damping, expected, may_wait=True, rtol=1e-8):
    """The same for what is in ``.grad`` now."""
    before = case.gradients()
    solution = statistic.solve(Record(case.weight, statistic), damping, may_wait=may_wait)
    assert bool(solution.finite)
    assert (int(solution.rescued), int(solution.fallen_back)) == (0, 0)
    solution.write(True)
    np.testing.assert_allclose(case.gradients(), expected, rtol=rtol, atol=rtol * np.abs(expected).max())
    if solution.change is not None:
        np.testing.assert_allclose(float(solution.change.energy), (expected * before).sum(), rtol=rtol)
        np.testing.assert_allclose(float(solution.change.trace), (case.rows() ** 2).sum(), rtol=rtol)
        assert solution.change.outputs_per_column == before.shape[1] / before.shape[2]
    return solution
