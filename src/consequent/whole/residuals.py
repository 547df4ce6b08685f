"""A residual as its user writes it: its values for many samples, and its gradients by the parameters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from consequent.whole.uses import Linears, Noted, Weight

Batch = Sequence[Tensor]


class Part(NamedTuple):
    """The gradients of n residuals by one parameter: the sum over the uses s of ``g_s ⊗ x_s``."""

    inputs: Tensor  # x: [n, uses, columns of a weight]; ones, [n, 1, 1], of what is no weight
    output_grads: Tensor  # g: [n, uses, its rows]; the gradient's elements, [n, 1, elements]


class Rows(NamedTuple):
    """Some residuals, and their gradients by the parameters' names."""

    values: Tensor  # [n]
    parts: dict[str, Part]


class Residual(nn.Module):
    """One term of the loss.

    Args:
        name: of the term; empty if there is one alone.
        function: what the user wrote.
        model: the network, its first argument.
        batched: whether it is written for a batch, and not for one sample.
    """

    def __init__(self, name: str, function: Callable[..., Tensor], model: nn.Module, batched: bool) -> None:
        super().__init__()
        self.name, self.function, self.model, self.batched = name, function, model, batched

    def forward(self, *sample: Tensor) -> Tensor:
        """What one sample leaves over, as a vector; or each sample of a batch."""
        value = self.function(self.model, *sample)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{self} returned {what}: it must be a tensor of real numbers. Put several terms in a dict")
        if self.batched and (value.ndim == 0 or len(value) != len(sample[0])):
            raise ValueError(
                f"{self} returned the shape {list(value.shape)} for {len(sample[0])} samples; with batched=True the "
                "first dimension is theirs. Without it, write what one sample leaves over"
            )
        return value.reshape(len(value), -1) if self.batched else value.flatten()

    def values(self, batch: Batch) -> Tensor:
        """``[samples, components]``."""
        with torch.set_grad_enabled(self.batched):  # a batch's derivatives may be computed by autograd
            values: Tensor = self(*batch) if self.batched else vmap(self)(*batch)
            return values.detach()

    @torch.no_grad()
    def rows(self, batch: Batch, scale: float, *, is_first: bool = False) -> Rows:
        """The residuals times a scale, those of a sample side by side, and their gradients."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        weights = {name: Weight(p) for name, p in trained.items() if p.ndim == 2}
        samples, grads = len(batch[0]), []
        with torch.enable_grad():
            anchor = next(iter(trained.values())).new_zeros(samples).requires_grad_()
            each = {name: p.expand(samples, *p.shape).requires_grad_() for name, p in trained.items()}
            common = {name: p.view_as(p).requires_grad_() for name, p in trained.items()} if self.batched else {}

            def computed(each: dict[str, Tensor], anchor: Tensor, *sample: Tensor) -> Tensor:
                given = common or each
                biases = {id(given[name]): each[name] for name, p in common.items() if p.ndim == 1}
                with Linears({id(given[name]): weight for name, weight in weights.items()}, anchor, biases):
                    return self._with(given, sample)

            values = (computed if self.batched else vmap(computed))(each, anchor, *batch)
            if is_first:
                self._refuse_foreign(values)
            for component in range(values.shape[1] if values.requires_grad else 0):
                for weight in weights.values():
                    weight.component = component
                leaves, total = [anchor, *common.values(), *each.values()], (scale * values[:, component]).sum()
                found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)[1:]
                for name, grad in zip(common, found, strict=False):
                    if grad is not None:
                        raise ValueError(
                            f"{self} uses {name!r} otherwise than in a linear layer, so with batched=True its gradient "
                            "for each sample is not known. Write what one sample leaves over, without batched=True"
                        )
                grads.append(dict(zip(each, found[len(common) :], strict=True)))
        if len(bad := (~values.isfinite()).nonzero()):
            raise ValueError(
                f"{self} is not finite for {len(bad[:, 0].unique())} of {samples} samples, first for sample "
                f"{int(bad[0, 0])}: {values[int(bad[0, 0])].tolist()}. Nothing was changed"
            )
        parts = {}
        for name in each:
            uses = list(weights[name].uses.values()) if name in weights else []
            others = [its[name] for its in grads]
            if uses or any(grad is not None for grad in others):
                parts[name] = _part(uses, others, samples)
        if not parts:
            raise ValueError(
                f"{self} depends on no parameter that is trained: check what it computes from the model, and that "
                "torch.autograd.grad is called with create_graph=True"
            )
        return Rows(scale * values.detach().flatten(), parts)

    def _with(self, given: dict[str, Tensor], sample: Batch) -> Tensor:
        """What is left over with other tensors in the place of the parameters, wherever these are in the model."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        slots = {
            f"model.{place}.{name}".replace("..", "."): given[names[id(p)]]
            for place, module in self.model.named_modules()  # functional_call mends a module only once
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if names[id(p)] in given
        }
        value: Tensor = functional_call(self, slots, tuple(sample), tie_weights=False)
        return value

    def _refuse_foreign(self, values: Tensor) -> None:
        """Parameters that are not the model's would not be trained."""
        seen, waiting = set(), [values.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            is_foreign = isinstance(variable, nn.Parameter)
            if variable is not None and is_foreign:
                raise ValueError(
                    f"{self} uses a parameter of shape {list(variable.shape)} that is not the model's and would not be "
                    "trained: make it an attribute of the model, or call requires_grad_(False) on it"
                )

    def looked_at(self, few: Batch) -> tuple[int, float]:
        """The components of a sample's residual, and the bytes of their gradients; from one or two samples."""
        each = [[one[i : i + 1] for one in few] for i in range(len(few[0]))]
        try:
            alone = torch.cat([self.values(some) for some in each])
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = [list(one.shape[1 - self.batched :]) for one in each[0]]
            raise ValueError(
                f"{self} cannot be computed for one sample, of shapes {shapes}: {error}. A sample has no dimension for "
                "samples (dim=-1 is its last). For what is written for a batch, or with torch.autograd.grad, pass "
                "batched=True. For dropout and BatchNorm, call model.eval()"
            ) from error
        rows = self.rows(few, 1.0, is_first=True)
        together = rows.values.view(len(few[0]), -1)
        if self.batched and (alone.shape != together.shape or _differ(alone, together)):
            raise ValueError(
                f"{self} of a sample depends on other samples: of two it is {alone.tolist()} one by one and "
                f"{together.tolist()} together. Is [n, 1] added to [n]? For dropout and BatchNorm, call model.eval()"
            )
        numbers = sum(tensor.numel() for part in rows.parts.values() for tensor in part)
        return alone.shape[1], numbers * alone.element_size() / len(few[0])

    def __str__(self) -> str:
        return f"residual {self.name!r}" if self.name else "the residual"


def _part(uses: list[Noted], others: Sequence[Tensor | None], samples: int) -> Part:
    """The gradients by a parameter, of its uses as a weight and of others; of a sample, one for each component."""
    pairs, components = [], len(others)
    for use in uses:
        grads = _stacked([use.output_grads.get(component) for component in range(components)])
        pair = [value.reshape(*value.shape[:2], -1, value.shape[-1]) for value in (use.inputs[:, None], grads)]
        pairs.append(pair[::-1] if use.transposed else pair)
    part = Part(*(_side_by_side(list(side), components) for side in zip(*pairs, strict=True))) if pairs else None
    if all(grad is None for grad in others):
        assert part is not None
        return part
    elements = _stacked(others).reshape(samples * components, -1)
    if part is not None:
        elements = elements + torch.bmm(part.output_grads.mT, part.inputs).flatten(1)
    return Part(elements.new_ones(len(elements), 1, 1), elements[:, None])


def _differ(alone: Tensor, together: Tensor) -> bool:
    return bool((alone - together).abs().max() > 0.01 * alone.abs().max())


def _stacked(grads: Sequence[Tensor | None]) -> Tensor:
    """``[samples, components, …]``; None is zeros."""
    some = next(grad for grad in grads if grad is not None)
    return torch.stack([torch.zeros_like(some) if grad is None else grad for grad in grads], 1)


def _side_by_side(pieces: list[Tensor], components: int) -> Tensor:
    """``[n, uses, width]`` from pieces ``[samples, components or 1, some uses, width]``."""
    counts, (samples, _, _, width) = [piece.shape[2] for piece in pieces], pieces[0].shape
    whole = pieces[0].new_empty(samples, components, sum(counts), width)
    for piece, its in zip(pieces, whole.split(counts, 2), strict=True):
        its.copy_(piece)
    return whole.flatten(0, 1)
