"""A residual as its user writes it: its values for many samples, and its gradients by the parameters."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import vmap

from consequent.whole.uses import ParametersOfEachSample, Weight

Batch = Sequence[Tensor]


class Part(NamedTuple):
    """The gradients of n residuals by one parameter: the sum over the uses s of ``g_s ⊗ x_s``."""

    inputs: Tensor  # x: [n, uses, columns of a weight]; ones, [n, 1, 1], where the gradient itself is kept
    output_grads: Tensor  # g: [n, uses, its rows]; the gradient's elements, [n, 1, elements]


class Rows(NamedTuple):
    """Some residuals, and their gradients by the parameters' names."""

    values: Tensor  # [n]
    parts: dict[str, Part]


class Residual:
    """One term of the loss.

    Args:
        name: of the term; empty if there is one alone.
        function: what the user wrote.
        model: the network, its first argument.
        batched: whether it is written for a batch, and not for one sample.
    """

    def __init__(self, name: str, function: Callable[..., Tensor], model: nn.Module, batched: bool) -> None:
        self.name, self.function, self.model, self.batched = name, function, model, batched

    def __call__(self, *sample: Tensor) -> Tensor:
        """The residual of one sample, as a vector; or of each sample of a batch."""
        value = self.function(self.model, *sample)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{self} returned {what}: it must be a tensor of real numbers. Put several terms in a dict")
        if self.batched and (value.ndim == 0 or len(value) != len(sample[0])):
            raise ValueError(
                f"{self} returned the shape {list(value.shape)} for {len(sample[0])} samples; with batched=True the "
                "first dimension is theirs. Without it, write the residual of one sample"
            )
        return value.reshape(len(value), -1) if self.batched else value.flatten()

    def values(self, batch: Batch, *, graph: bool = False) -> Tensor:
        """``[samples, components]``."""
        with torch.set_grad_enabled(self.batched or graph):  # a batch's derivatives may be computed by autograd
            values: Tensor = self(*batch) if self.batched else vmap(self)(*batch)
            return values if graph else values.detach()

    @torch.no_grad()
    def rows(self, batch: Batch, weight: float) -> list[Rows]:
        """The residuals, each sample with this weight in the loss, and their gradients; by component."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        weights = {name: Weight(p) for name, p in trained.items() if p.ndim == 2}
        samples, rows = len(batch[0]), []

        def computed(each: dict[int, Tensor], anchor: Tensor, *sample: Tensor) -> Tensor:
            with ParametersOfEachSample({id(trained[name]): one for name, one in weights.items()}, each, anchor):
                return self(*sample)

        with torch.enable_grad():
            anchor = next(iter(trained.values())).new_zeros(samples).requires_grad_()
            each = {id(p): p.detach().expand(samples, *p.shape).requires_grad_() for p in trained.values()}
            values = (computed if self.batched else vmap(computed))(each, anchor, *batch)
            self._check(values, anchor)
            for one in weigh(values, weight).unbind(1) if values.requires_grad else ():
                uses: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in trained}
                for name, its in weights.items():
                    its.uses = uses[name]
                leaves = anchor, *each.values()
                _, *grads = torch.autograd.grad(one.sum(), leaves, retain_graph=True, allow_unused=True)
                parts = {name: _part(uses[name], grad) for name, grad in zip(trained, grads, strict=True)}
                rows.append(Rows(one.detach(), {name: part for name, part in parts.items() if part}))
        if not any(one.parts for one in rows):
            raise ValueError(f"{self} depends on no parameter that is trained: check what it computes from the model")
        return rows

    def _check(self, values: Tensor, anchor: Tensor) -> None:
        if values.dtype != anchor.dtype:
            raise ValueError(f"{self} is of {values.dtype}, and parameters are of {anchor.dtype}: convert the samples")
        for node in nodes_of(values):  # what is neither for each sample nor a sample would not be trained
            if node.name() == "CheckpointFunctionBackward":
                raise ValueError(
                    f"{self} has a reentrant checkpoint, whose parameters would not be trained: take it out"
                )
            leaf = getattr(node, "variable", None)
            if leaf is not None and (isinstance(leaf, nn.Parameter) or leaf.shape[:1] != values.shape[:1]):
                trained = (
                    "With batched=True only linear layers are trained; a coefficient is c(torch.ones_like(u)) with c = "
                    "nn.Linear(1, 1, bias=False)"
                    if self.batched
                    else "It must be an nn.Parameter of the model, and not the argument of grad or vmap"
                )
                raise ValueError(
                    f"{self} uses a tensor of shape {list(leaf.shape)} that requires gradients, and it would not be "
                    f"trained. {trained}. Otherwise call requires_grad_(False) on it"
                )

    def refuse_nan(self, values: Tensor) -> None:
        """Raise, and name the first sample that is not finite."""
        if len(bad := (~values.isfinite()).nonzero()[:, 0].unique()):
            raise ValueError(
                f"{self} is not finite for {len(bad)} of {len(values)} samples, first for sample {int(bad[0])}: "
                f"{values[int(bad[0])].tolist()}. Nothing was changed"
            )

    def __str__(self) -> str:
        return f"residual {self.name!r}" if self.name else "the residual"


def weigh(values: Tensor, weight: float) -> Tensor:
    """Values ``[samples, components]``, so that the sum of their squares is the weighted sum of the samples' means."""
    return math.sqrt(weight / max(1, values.shape[1])) * values


def nodes_of(values: Tensor) -> Iterator[Node]:
    """What a backward pass goes through."""
    seen: set[Node] = set()
    waiting = [values.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
            yield node


def _part(uses: list[tuple[Tensor, Tensor]], grads: Tensor | None) -> Part | None:
    """The gradients by a parameter, of its uses as a weight and of others."""
    if uses:
        inputs, output_grads = (torch.cat(side, 1) for side in zip(*uses, strict=True))
        (_, number, width), outputs = inputs.shape, output_grads.shape[2]
        if grads is None and number * (width + outputs) <= width * outputs:
            return Part(inputs, output_grads)
        product = torch.bmm(output_grads.mT, inputs)
        grads = product if grads is None else grads + product
    return None if grads is None else Part(grads.new_ones(len(grads), 1, 1), grads.reshape(len(grads), 1, -1))
