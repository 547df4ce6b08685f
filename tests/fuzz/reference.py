"""The definition, written down without looking at the library: a float64 copy of the model, probes, dense solves.

No hooks. The copy's modules get subclasses of their own classes: every layer adds a zero to its output, whose gradient
is ΔZ. ``backward`` is ``torch.autograd.grad``, and writes to ``.grad`` what should be there.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fuzz.matrices import dims_of, gradients, input_matrices, output_matrices, weight_matrices, with_ones
from fuzz.nets import LAYERS


@dataclass(eq=False)
class Call:
    """A call of a layer whose weight is trained."""

    layer: nn.Module
    X: list  # one matrix for each group, a row per sample and position
    probe: Tensor  # the zero that was added to what came out
    samples: int
    uses: list  # the calls of this weight in the same forward pass of the model; None: it is outside of the model
    ones: bool  # whether the bias is trained

    @property
    def number_of_uses(self):
        return 1 if self.uses is None else len(self.uses)


@dataclass(eq=False)
class Optimizer:
    """One of the optimisers, and what averages have seen since its last step."""

    names: set
    steps: int = 0
    looks: bool = True
    calls: list = field(default_factory=list)
    entered: float = 0.0  # what the losses of these forward passes divide by


@dataclass
class Average:
    """S of a layer's inputs and how many rows are in it; of the last look n and what its losses divide by."""

    moments: list
    weight: float
    rows: int
    divisor: float


def watched_class(cls, reference):
    """The class with probes if it is a layer; if it is the model, its calls are known of."""

    class Watched(cls):
        def __call__(self, *args, **kwargs):
            if self is not reference.model or reference.current is not None:
                return super().__call__(*args, **kwargs)
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim)
            reference.current = (len(tensor), {})
            for optimizer in reference.optimizers if torch.is_grad_enabled() else ():
                optimizer.entered += reference.case.divisor(len(tensor))
            try:
                return super().__call__(*args, **kwargs)
            finally:
                reference.current = None

        def forward(self, *args, **kwargs):
            z = super().forward(*args, **kwargs)
            if not isinstance(self, LAYERS) or not torch.is_grad_enabled() or not self.weight.requires_grad:
                return z
            probe = torch.zeros_like(z, requires_grad=True)
            reference.called(self, args[0].detach().clone(), probe)
            return z + probe

    return Watched


class Reference:
    """One side of a run: what every action should do to the gradients."""

    def __init__(self, case):
        self.case, self.dtype = case, torch.float64
        self.model = copy.deepcopy(case.net.model).double()
        self.names = {p: name for name, p in self.model.named_parameters()}
        parts = [set(self.names.values()) - case.second, case.second]
        self.optimizers = [Optimizer(names) for names in parts if names]
        self.layers = {}  # those that are corrected, by weight
        for layer in [module for module in self.model.modules() if isinstance(module, LAYERS)]:
            self.layers.setdefault(layer.weight, []).append(layer)
        for name in case.excluded:
            self.layers.pop(self.model.get_submodule(name).weight, None)
        self.averaged = {weight for weight in self.layers if case.averaging and self.may_be_averaged(weight)}
        self.current, self.is_outside = None, False  # of the forward pass under way: N, and the calls of each weight
        self.calls, self.pending, self.notes, self.averages = [], [], [], {}
        self.changes = {}  # of the outputs, relative to the inputs, by passes since the last step
        self.forget()
        for module in self.model.modules():
            module.__class__ = watched_class(type(module), self)

    def may_be_averaged(self, weight):
        """Not if layers share it, or if its bias lies in another optimiser."""
        biases = [layer.bias for layer in self.layers[weight] if layer.bias is not None]
        holders = {self.names[p] in self.case.second for p in (weight, *biases)}
        return len(self.layers[weight]) == len(holders) == 1

    # ---- passes -----------------------------------------------------------------------------------------------------

    def called(self, layer, x, probe):
        samples, uses = len(x) if x.ndim > max(1, dims_of(layer) + 1) else 1, None
        if self.current is not None and not (self.is_outside and layer.weight not in self.averaged):
            samples, uses = self.current[0], self.current[1].setdefault(layer.weight, [])
        ones = layer.bias is not None and layer.bias.requires_grad
        call = Call(layer, input_matrices(layer, x), probe, samples, uses, ones)
        holder = [one for one in self.optimizers if self.names[layer.weight] in one.names]
        for known in (self.calls, *([] if uses is None else [uses]), *(one.calls for one in holder)):
            known.append(call)

    def use_checkpoints(self, kind):
        """The mathematics are the same without, but that "reentrant" calls layers once more, outside of the model."""

        def outside(part, x):
            self.is_outside = True
            h = part(x)
            self.is_outside = False
            return h

        self.model.checkpoint = outside if kind == "reentrant" else None

    def forget(self):
        """Nothing is in ``.grad``."""
        self.sizes, self.conditions = {}, {}  # by weight: how long a correction may be, and how wrong by rounding
        self.unknown = set()  # parameters with a correction that is not finite, though autograd's gradient may be

    def zero(self, how):
        for p in self.model.parameters():
            p.grad = None if p.grad is None or how != "zeros" else torch.zeros_like(p.grad)
        self.forget()

    def backward(self, loss, retain_graph=False, only=None, is_plain=False):
        """What a pass adds to ``.grad``: of parameters ``only``, and plain if gradients were differentiated."""
        own = [call for call in self.calls if call.layer.weight in self.layers.keys() - self.averaged]
        calls, trained = [] if is_plain else own, [p for p in self.model.parameters() if p.requires_grad]
        probes = [call.probe for call in calls]
        found = torch.autograd.grad(loss, [*probes, *trained], retain_graph=True, allow_unused=True)
        total = {p: grad for p, grad in zip(trained, found[len(calls) :], strict=True) if grad is not None}
        for call, output_grad in zip(calls, found, strict=False):
            if output_grad is not None:
                for p, difference in self.difference(call, output_grad):
                    total[p] = total[p] + difference
        for p, grad in total.items():
            if only is None or self.names[p] in only:
                p.grad = grad.clone() if p.grad is None else p.grad + grad

    def difference(self, call, output_grad):
        """What own inputs add to the plain gradients of the call's weight and bias."""
        layer, factor = call.layer, self.case.divisor(call.samples) / call.number_of_uses
        differences, energy, length, trace, is_finite = [], 0.0, 0.0, 0.0, True
        for rows, dZ in zip(call.X, output_matrices(layer, output_grad), strict=True):
            X = with_ones(rows, call.ones)
            G, moment = dZ.T @ X, X.T @ X
            if not (G.isfinite().all() and moment.isfinite().all()):
                self.unknown |= {layer.weight, layer.bias}
                differences.append(torch.zeros_like(G))
                is_finite = False
                continue
            U = self.solved(layer.weight, moment, G, len(X), factor * dZ)
            energy, length = energy + float((U * G).sum()), length + float(U.square().sum())
            trace += float(moment.trace())
            differences.append(factor * U - G)
        change = energy / length / trace * len(G.T) / len(G) if length > 0 else 0.0
        self.changes.setdefault(layer.weight, []).extend([change] if is_finite and change > 0 else [])
        return zip((layer.weight, layer.bias), gradients(layer, differences, call.ones), strict=False)

    def solved(self, weight, moment, G, rows, scale):
        """``G (XXᵀ + λI)⁻¹``; the result is of the size ``scale / √λ``, or smaller."""
        damping, trace = self.case.damping_of(self.names[weight]), float(moment.trace())
        level = damping
        if isinstance(damping, tuple):
            level = damping[1] * trace / min(rows, len(moment)) if trace > 0 else 1.0
        damped = moment + level * torch.eye(len(moment), dtype=moment.dtype)
        values = torch.linalg.eigvalsh(damped)
        condition = float(values[-1]) / max(float(values[0]), 1e-16 * float(values[-1]))
        self.conditions[weight] = max(self.conditions.get(weight, 1.0), condition)
        self.sizes[weight] = self.sizes.get(weight, 0.0) + float(scale.norm()) / (2 * level**0.5)
        return torch.linalg.solve(damped, G.T).T

    def note(self, action):
        """Remember what should be in ``.grad`` now, and how large that is for all parameters of a layer together."""
        expected = {}
        for weight, layers in [*self.layers.items(), *((p, []) for p in self.names)]:
            together = [weight, *{layer.bias for layer in layers if layer.bias is not None}]
            finite = [p.grad for p in together if p.grad is not None and p.grad.isfinite().all()]
            size = max(sum(float(grad.square().sum()) for grad in finite) ** 0.5, 1e-4 * self.sizes.get(weight, 0.0))
            for p in together:
                grad = None if p.grad is None else p.grad.clone()
                known = (grad, size, self.conditions.get(weight, 1.0), p not in self.unknown)
                expected.setdefault(self.names[p], known)
        self.notes.append(expected)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, closure, both):
        if closure is not None:
            closure()
        for optimizer in self.optimizers if both else self.optimizers[:1]:
            weights = [weight for weight in self.layers if self.names[weight] in optimizer.names]
            moving = [weight for weight in self.layers if weight.grad is not None and weight.requires_grad]
            is_bounded = self.case.bound is not None and len(moving) > 1
            for weight in weights:
                biases = {layer.bias for layer in self.layers[weight]}
                grads = [p.grad for p in (weight, *biases) if p is not None and p.grad is not None]
                changes = self.changes.pop(weight, None) or [0.0]
                change = sum(changes) / len(changes) * sum(float(grad.square().sum()) for grad in grads)
                if weight in self.averaged:
                    change = self.multiply(weight, optimizer)
                change = self.case.rate * change**0.5
                for grad in grads if is_bounded and change > self.case.bound else ():
                    grad *= self.case.bound / change
            optimizer.steps += 1
            unseen = [w for w in weights if w in self.averaged - self.averages.keys() and w.grad is not None]
            optimizer.looks = optimizer.steps % self.case.refresh == 0 or bool(unseen)
            optimizer.calls, optimizer.entered = [], 0
        self.calls = []

    def multiply(self, weight, optimizer):
        """Correct a gradient by averages; the squared change of the outputs by a step of rate 1, relative to inputs."""
        if optimizer.looks:
            self.look(weight, optimizer)
        average, (layer,) = self.averages.get(weight), self.layers[weight]
        if average is None or weight.grad is None or not weight.requires_grad:
            return 0.0
        ones = layer.bias is not None and layer.bias.grad is not None and layer.bias.requires_grad
        divisor, new, energy, trace = average.divisor, [], 0.0, 0.0
        for group, G in enumerate(weight_matrices(layer, weight.grad, layer.bias.grad if ones else None)):
            moment = average.rows * average.moments[group][: len(G.T), : len(G.T)]
            new.append(divisor * self.solved(weight, moment, G, max(round(average.weight), 1), G.new_zeros(1)))
            energy, trace = energy + divisor * float((new[-1] * G).sum()), trace + float(moment.trace())
        for p, grad in zip((weight, layer.bias), gradients(layer, new, ones), strict=False):
            p.grad.copy_(grad)
        return energy / trace * len(G.T) / len(G) if trace > 0 else 0.0

    def look(self, weight, optimizer):
        """Take in the inputs of all calls since the last step."""
        calls = [call for call in optimizer.calls if call.layer.weight is weight]
        X = [with_ones(torch.cat(group)) for group in zip(*(call.X for call in calls), strict=True)]
        moments, old = [x.T @ x for x in X], self.averages.get(weight)
        if not calls or not all(moment.isfinite().all() for moment in moments):
            return
        outside = sum(self.case.divisor(call.samples) for call in calls if call.uses is None)
        inside = optimizer.entered if any(call.uses is not None for call in calls) else 0
        divisor = 1 if self.case.reduction == "sum" else inside + outside
        kept = self.case.averaging * old.weight if old else 0.0
        if old:
            moments = [m + kept * before for m, before in zip(moments, old.moments, strict=True)]
        total = kept + len(X[0])
        self.averages[weight] = Average([moment / total for moment in moments], total, len(X[0]), divisor)

    def reload(self):
        """What was seen since an optimiser's last step is not saved."""
        self.changes = {}
        for optimizer in self.optimizers:
            optimizer.calls, optimizer.entered = [], 0
