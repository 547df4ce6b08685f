"""A look at a few samples before any step: whether each is computed by itself, and how much memory it takes."""

from typing import NamedTuple

import torch
from torch import nn

from consequent.whole.jacobian import Jacobian
from consequent.whole.residuals import Batch, Residual

FEW = 8


class Sample(NamedTuple):
    """How many numbers one sample leaves over, and the bytes of their gradients."""

    components: int
    memory: float


def look(residual: Residual, batch: Batch, trained: dict[str, nn.Parameter]) -> Sample:
    """Compare a sample alone with the same among others, and gradients for each sample with a backward pass for all."""
    with torch.enable_grad():  # samples may require gradients
        one, few = [its[:1] for its in batch], [its[:FEW] for its in batch]
    try:
        alone, values = residual.values(one), residual.values(few, graph=True)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = [list(its.shape[1 - residual.batched :]) for its in few]
        raise ValueError(
            f"{residual} cannot be computed for samples of shapes {shapes}: {error}. A sample has no dimension for "
            "samples (dim=-1 is its last). For what is written for a batch, or with torch.autograd.grad, pass "
            "batched=True. For dropout and BatchNorm, call model.eval()"
        ) from error
    rows = residual.rows(few, 1.0)
    jacobian = Jacobian([rows], {name: p.numel() for name, p in trained.items()}, 1e8)
    vector = torch.arange(1.0, len(rows.values) + 1).to(rows.values)
    with torch.enable_grad():
        total = values.flatten() @ vector
        plain = torch.autograd.grad(total, list(trained.values()), materialize_grads=True, allow_unused=True)
    wanted, length = torch.cat([grad.flatten() for grad in plain]), float(vector.norm())
    size = max(float(jacobian.gram().diagonal().sum()) ** 0.5 * length, float(wanted.norm()))
    tolerance = torch.finfo(vector.dtype).eps ** 0.4
    is_wrong = float((jacobian.transposed_times(vector) - wanted).norm()) > tolerance * size
    if is_wrong or alone.shape[1] != values.shape[1] or not torch.allclose(alone, values[:1], rtol=0.01, atol=0):
        raise ValueError(
            f"{residual} of a sample is {alone[0].tolist()} alone and {values[0].tolist()} among others, or its "
            "gradient is. Does it mix samples, change their order, draw at random, or add [n, 1] to [n]? For dropout "
            "and BatchNorm, call model.eval(). is_grads_batched=True and layers in torch.compile are not supported"
        )
    numbers = sum(tensor.numel() for part in rows.parts.values() for tensor in part)
    return Sample(values.shape[1], numbers * vector.element_size() / len(few[0]))
