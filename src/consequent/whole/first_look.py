"""A look at a few samples before any step: is each computed by itself, and how much memory does it take?"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from consequent.whole.jacobian import Jacobian, is_cheaper_by_products
from consequent.whole.residuals import Batch, Residual, nodes_of

FEW = 8
NOISE = 1000  # in units of the last place: a difference of so much is rounding

HINTS = {  # by whether residuals are batched
    False: "A sample has no batch dimension: concatenate along dim=-1. grad() and hessian() want a number, as "
    "model(x).squeeze(). Parameters are each sample's own: no `if` and no float() of them. For residuals of a whole "
    "batch, and for torch.autograd.grad, pass batched=True.",
    True: "For torch.autograd.grad, let x = x.clone().requires_grad_(), and pass create_graph=True. For derivatives by "
    "torch.func, write the residual of one sample, and leave batched=True out.",
}


class Sample(NamedTuple):
    """The numbers in a sample's residual; bytes of what is kept, of computing it, of columns that are formed."""

    components: int
    kept: float
    computed: float
    formed: float


def look(residual: Residual, batch: Batch, trained: dict[str, nn.Parameter]) -> Sample:
    """Compare samples alone with the same among others, and gradients for each sample with a backward pass for all."""
    few = pieces(batch, FEW)[0]
    ones = pieces(few, 1)
    try:
        values = residual.values(few, graph=True)
        alone = torch.cat([residual.values(ones[place]) for place in (0, -1)])
        rows = residual.rows(few, values.shape[1])
    except (RuntimeError, ValueError, IndexError) as error:
        if str(error).startswith(str(residual)):
            raise
        tried = ", ".join(f"{list(its.shape[1 - residual.batched :])} {its.dtype}" for its in few)
        raise ValueError(
            f"{residual} cannot be computed for the first {len(few[0])} samples ({tried}): {error}\n"
            f"{HINTS[residual.batched]} Samples must have the parameters' type. For dropout and BatchNorm, call "
            "model.eval()."
        ) from error
    jacobian = Jacobian(rows, {name: p.numel() for name, p in trained.items()})
    vector = torch.arange(1.0, len(jacobian.values) + 1).to(jacobian.values)
    sizes: list[int] = []
    for node in nodes_of(values):  # its gradients are as large as its results
        node.register_prehook(lambda grads: sizes.extend(grad.numel() for grad in grads if grad is not None))
    with torch.enable_grad():
        total = values.mT.flatten() @ vector
        plain = torch.autograd.grad(total, list(trained.values()), materialize_grads=True, allow_unused=True)
    wanted, eps = torch.cat([grad.flatten() for grad in plain]), torch.finfo(vector.dtype).eps
    norm, length = float(jacobian.gram().diagonal().clamp(min=0).sum().sqrt()), float(vector.norm())
    error_by_rounding = eps**0.4 * max(norm * length, float(wanted.norm())) + NOISE * eps * length
    is_wrong = float((jacobian.transposed_times(vector) - wanted).norm()) > error_by_rounding
    scale = norm * float(torch.cat([p.detach().flatten() for p in trained.values()]).norm())
    atol = max(0.0, eps**0.4 * scale + NOISE * eps)  # 0: derivatives are not finite, which the step says
    same = alone.shape[1] == values.shape[1] and alone.allclose(values[[0, -1]], 0.01, atol, equal_nan=True)
    if is_wrong or not same:
        raise ValueError(
            f"{residual} of a sample is {alone.tolist()} alone and {values[[0, -1]].tolist()} among others (the first "
            "and the last), or its gradient is. Does it mix samples, change their order, draw at random, or add [n, 1] "
            "to [n]? For dropout and BatchNorm, call model.eval(). is_grads_batched=True is not supported"
        )
    parts = [(name, part) for one in rows for name, part in one.parts.items()]
    kept, each = sum(tensor.numel() for _, part in parts for tensor in part), vector.element_size() / len(few[0])
    formed = max((trained[name].numel() for name, part in parts if not is_cheaper_by_products(part)), default=0)
    computed = kept + 3 * sum(sizes)  # results, their gradients, and what comes between
    return Sample(values.shape[1], kept * each, computed * each, formed * vector.element_size())


def pieces(batch: Batch, size: int) -> list[tuple[Tensor, ...]]:
    """So many samples at a time, which require gradients where the batch does."""
    split = ([piece.detach().requires_grad_(one.requires_grad) for piece in one.split(size)] for one in batch)
    return list(zip(*split, strict=True))
