"""A look at a few samples before any step: is each computed by itself, and how much memory does it take?"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from consequent.minibatch.warning import ConsequentWarning
from consequent.whole.jacobian import Jacobian, is_cheaper_by_products
from consequent.whole.residuals import Batch, Residual, nodes_of

FEW = 8
NOISE = 1000  # in units of the last place: a difference of so much is rounding

HINTS = {  # by whether residuals are batched
    False: "A sample has no batch dimension: concatenate along dim=-1. grad() and hessian() want a number, as "
    "model(x).squeeze(). A layer that wants a batch, as BatchNorm, gets x[None]. Parameters are each sample's own: no "
    "`if` and no float() of them. For residuals of a whole batch, and for torch.autograd.grad, pass batched=True.",
    True: "For torch.autograd.grad, let x = x.clone().requires_grad_(). For derivatives by torch.func, write the "
    "residual of one sample, and leave batched=True out.",
}
EVALUATE = " For dropout and BatchNorm, call model.eval()."


class Sample(NamedTuple):
    """The numbers in a sample's residual; bytes of what is kept, of computing it, of columns that are formed."""

    components: int
    kept: float
    computed: float
    formed: float


def look(residual: Residual, batch: Batch, trained: dict[str, nn.Parameter]) -> Sample:
    """Compare samples alone with the same among others, and gradients for each sample with a backward pass for all."""
    last, number = len(batch[0]) - 1, min(len(batch[0]), FEW)
    spread = [
        place * last // max(1, number - 1) for place in range(number)
    ]  # those of a grid's row or column are alike
    few = [one[spread].detach().requires_grad_(one.requires_grad) for one in batch]
    ones = pieces(few, 1)
    try:
        values = residual.values(few, graph=True)
        alone = torch.cat([residual.values(one) for one in ones])
        rows = residual.rows(few, values.shape[1])
        rows_alone = [row for one in (ones[0], ones[-1]) for row in residual.rows(one, values.shape[1])]
    except (RuntimeError, ValueError, IndexError) as error:
        if str(error).startswith(str(residual)):
            raise
        tried = ", ".join(f"{list(its.shape[1 - residual.batched :])} {its.dtype}" for its in few)
        said = f"{residual} cannot be computed for {len(few[0])} samples ({tried}): {error}\n"
        raise ValueError(said + _hint(residual, few, next(iter(trained.values())).dtype)) from error
    sizes = {name: p.numel() for name, p in trained.items()}
    jacobian = Jacobian(rows, sizes)
    vector = torch.arange(1.0, len(jacobian.values) + 1).to(jacobian.values)
    computed: list[int] = []
    for node in nodes_of(values):  # its gradients are as large as its results
        node.register_prehook(lambda grads: computed.extend(grad.numel() for grad in grads if grad is not None))
    with torch.enable_grad():
        total = values.mT.flatten() @ vector
        plain = torch.autograd.grad(total, list(trained.values()), materialize_grads=True, allow_unused=True)
    wanted, eps = torch.cat([grad.flatten() for grad in plain]), torch.finfo(vector.dtype).eps
    norm = float(Jacobian(rows_alone, sizes).gram().diagonal().clamp(min=0).sum().sqrt())
    size_of_sums = float(vector.norm()) * (1 + norm) + float(wanted.norm())
    is_wrong = float((jacobian.transposed_times(vector) - wanted).norm()) > NOISE * eps * size_of_sums
    scale = norm * float(torch.cat([p.detach().flatten() for p in trained.values()]).norm())
    atol = max(0.0, NOISE * eps * (1 + scale))  # 0: derivatives are not finite, which the step says
    same = alone.shape == values.shape and alone.allclose(values, eps**0.4, atol, equal_nan=True)
    if is_wrong or not same:
        raise ValueError(
            f"{residual} of a sample is {alone[[0, -1]].tolist()} alone and {values[[0, -1]].tolist()} among others "
            "(the first and the last), or its gradient is. Does it mix samples, change their order, draw at random, "
            f"or add [n, 1] to [n]?{EVALUATE} is_grads_batched=True is not supported"
        )
    if FEW < len(batch[0]) == values.shape[1]:
        said = f"{residual} of one sample has {values.shape[1]} numbers, as many as there are samples. If it takes the "
        warnings.warn(said + "targets of all samples, pass them: step(x, y)", ConsequentWarning, stacklevel=7)
    if not wanted.any():
        said = f"no parameter changes {residual} of {len(values)} samples that were tried. If it has a second "
        warnings.warn(said + "derivative of ReLU, which is 0, use tanh or sines", ConsequentWarning, stacklevel=7)
    parts = [(name, part) for one in rows for name, part in one.parts.items()]
    kept, each = sum(tensor.numel() for _, part in parts for tensor in part), vector.element_size() / len(few[0])
    formed = max((sizes[name] for name, part in parts if not is_cheaper_by_products(part)), default=0)
    taken = kept + 3 * sum(computed)  # results, their gradients, and what comes between
    return Sample(values.shape[1], kept * each, taken * each, formed * vector.element_size())


def _hint(residual: Residual, few: Batch, dtype: torch.dtype) -> str:
    if any(its.is_floating_point() and its.dtype != dtype for its in few):
        return f"Samples must have the parameters' type, {dtype}."
    return HINTS[residual.batched] + EVALUATE * residual.model.training


def pieces(batch: Batch, size: int) -> list[tuple[Tensor, ...]]:
    """So many samples at a time, which require gradients where the batch does."""
    split = ([piece.detach().requires_grad_(one.requires_grad) for piece in one.split(size)] for one in batch)
    return list(zip(*split, strict=True))
