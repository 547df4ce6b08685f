"""``nn.Embedding``: every row of X is one-hot, the row of the weight that is looked up.

So its second moment is diagonal, ``XXᵀ = diag(n)``, where ``n[v]`` counts how often index v was looked up, and the
consequentialist gradient is a division of each row of the weight's gradient:

    ``U[v] = G[v] / (n[v] + λ)``
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.layers.operation import Canonical, with_ones
from consequent.layers.table import Table


@dataclass(frozen=True)
class Embedding(Table):
    """Canonical inputs are indices ``[rows]`` in int64, outputs ``[rows, out_features]``; X is one-hot.

    The row of ``padding_idx`` is a constant of the layer and no part of the weight: positions that hold it are rows of
    zeros in X, and do not count.

    Attributes:
        scale_grad_by_freq: whether the layer divides each row of its gradient by how often the row was looked up. The
            correction takes the place of that division: see :meth:`corrected`.

    Example:
        >>> operation = Embedding.of(nn.Embedding(4, 2, padding_idx=0))
        >>> counts = operation.counts(torch.tensor([3, 1, 3, 0]))
        >>> counts
        tensor([0., 1., 0., 2.])
        >>> gradient = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [6.0, 3.0]])
        >>> operation.corrected(gradient, counts, damping=1.0)
        tensor([[0.0000, 0.0000],
                [0.5000, 0.5000],
                [0.0000, 0.0000],
                [2.0000, 1.0000]])
    """

    scale_grad_by_freq: bool = False

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)
    is_diagonal: ClassVar[bool] = True  # so is the second moment, and its diagonal are the counts

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def _own_settings(cls, layer: Any) -> dict[str, Any]:
        return {"scale_grad_by_freq": layer.scale_grad_by_freq}

    def canonical(self, inputs: Tensor) -> Canonical | None:
        """The call with these indices, of any shape."""
        if inputs.is_nested or inputs.dtype not in (torch.int64, torch.int32):
            return None
        samples = inputs.shape[0] if inputs.ndim else 1
        output_shape = None if inputs.ndim == 1 else (*inputs.shape, self.outputs)
        return Canonical(self, inputs.reshape(-1).long(), samples, output_shape)

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """A call of ``F.embedding``, whatever its settings."""
        if function is not F.embedding:
            return None
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given.get("input"), Tensor):
            return None
        called = self._with_arguments(given, scale_grad_by_freq=given.get("scale_grad_by_freq", False))
        return called.canonical(given["input"])

    # ---- the product ------------------------------------------------------------------------------------------------

    def _indices_in(self, inputs: Tensor) -> Tensor:
        return inputs

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``; there is no bias."""
        return torch.embedding(weight, inputs, self.padding_idx, self.scale_grad_by_freq, self.sparse)

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``X ΔZᵀ``, divided by the counts with ``scale_grad_by_freq``; sparse if the layer says so."""
        size, padding = self.features, self.padding_idx
        gradient: Tensor
        if self.sparse:  # torch raises if it is to be divided too
            backward = torch.ops.aten.embedding_sparse_backward
            gradient = backward(output_grad, inputs, size, padding, self.scale_grad_by_freq)
            return gradient
        if self.scale_grad_by_freq:  # torch divides as well, but forgets to in the derivative of this
            times = self.counts(inputs).clamp(min=1)[inputs]
            output_grad = output_grad / times[:, None].to(output_grad.dtype)
        gradient = torch.ops.aten.embedding_dense_backward(output_grad, inputs, size, padding, False)
        return gradient

    @property
    def canonical_form(self) -> Self:
        """The product is computed without ``scale_grad_by_freq``: the correction replaces that division."""
        return self.undivided

    @property
    def undivided(self) -> Self:
        """The same without ``scale_grad_by_freq``.

        For gradients of several calls that are corrected together: each call divides by its own counts, and the sum of
        such quotients cannot be multiplied by all counts afterwards.
        """
        return replace(self, scale_grad_by_freq=False) if self.scale_grad_by_freq else self

    # ---- as matrices ------------------------------------------------------------------------------------------------

    def counts(self, inputs: Tensor) -> Tensor:
        """``[features]`` in float32: how often each index was looked up; the diagonal of ``XXᵀ``."""
        counts = torch.zeros(self.features, dtype=torch.int64, device=inputs.device)
        counts.scatter_add_(0, inputs, torch.ones_like(inputs))  # bincount would make a GPU's host wait
        if self.padding_idx >= 0:
            counts[self.padding_idx] = 0
        return counts.float()

    def corrected(self, gradient: Tensor, counts: Tensor, damping: Tensor | float) -> Tensor:
        """``G (XXᵀ + λI)⁻¹``: each row of the gradient divided by ``counts + λ``.

        With ``scale_grad_by_freq`` the gradient is multiplied by the counts first, by which it was divided: the result
        is that of a layer without it. This holds for a single call; see :attr:`undivided` for several.

        A row that was not looked up has no gradient, and gets none. If it has one in spite of that, from elsewhere, it
        is divided by λ like all that is orthogonal to X; if λ is 0, it becomes 0.

        Args:
            gradient: ``[features, out_features]``, dense or sparse; a sparse one need not be coalesced.
            counts: ``[features]``.
            damping: λ in the paper.

        Returns:
            A new tensor like the gradient, sparse if that is.
        """
        levels = counts.to(torch.promote_types(counts.dtype, gradient.dtype))
        divisors = levels + damping
        factors = torch.where(divisors > 0, divisors.reciprocal(), 0.0)
        if self.scale_grad_by_freq:
            factors = factors * levels.clamp(min=1)
        if not gradient.is_sparse:
            return (gradient * factors[:, None]).to(gradient.dtype)
        update = gradient.detach().clone()
        update._values().mul_(factors[update._indices()[0], None])
        return update

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[1, rows, features]`` in float32, dense; ``padding_idx`` is a row of zeros."""
        rows = torch.zeros(inputs.shape[0], self.features, device=inputs.device)
        rows.scatter_(1, inputs[:, None], self._is_parameter(inputs).float()[:, None])
        return rows[None]

    def _is_parameter(self, inputs: Tensor) -> Tensor:
        return inputs != self.padding_idx

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[1, D, D]``, or one larger with ``ones``: the counts as a diagonal matrix, which is better not formed."""
        counts = self.counts(inputs)[None]
        return with_ones(counts.diag_embed(), counts, inputs.shape[0]) if ones else counts.diag_embed()

    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        """``[samples, samples]``: at how many positions two samples have the same index."""
        tokens = inputs.reshape(samples, -1)
        correlations = torch.empty(samples, samples, device=inputs.device)
        for sample, row in enumerate(tokens):  # all at once would be samples² · positions large
            correlations[sample] = ((tokens == row) & self._is_parameter(row)).sum(1)
        return correlations + tokens.shape[1] if ones else correlations
