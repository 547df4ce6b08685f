"""``nn.EmbeddingBag``: a row of X has an entry for each index in the bag.

It is 1 for sums, 1/length for means, or the weight that the caller gave it.
"""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.layers.operation import Canonical, at_least_float32, with_ones
from consequent.layers.table import Table


@dataclass(frozen=True)
class EmbeddingBag(Table):
    """Canonical inputs are a sparse matrix X in COO format, ``[bags, features]``, outputs ``[bags, out_features]``.

    The entries of X are in the order of the bags. It need not be coalesced: an index that is twice in a bag may be two
    entries. Indices that do not contribute (``padding_idx``) are entries 0.

    Attributes:
        mode: "sum" or "mean"; a maximum is no matrix product.
        include_last_offset: whether the last offset is no bag's start but the end of the last one.
        dtype: of the weight.
    """

    mode: str = "mean"
    include_last_offset: bool = False
    dtype: torch.dtype = torch.float32

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.EmbeddingBag,)

    # ---- from a layer ---------------------------------------------------------------------------------------------

    @classmethod
    def _own_settings(cls, layer: Any) -> dict[str, Any]:
        return {"mode": layer.mode, "include_last_offset": layer.include_last_offset, "dtype": layer.weight.dtype}

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        """Why this layer is no matrix product; None if it is one."""
        if layer.mode == "max":
            return 'mode="max" is no matrix product'
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq makes its gradient another one than that of a matrix product"
        return None

    def inputs_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """X, which takes all arguments of ``forward`` together; None where :meth:`canonical_bag` is."""
        given = {**dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)), **kwargs}
        if not isinstance(given.get("input"), Tensor):
            return None
        return self.canonical_bag(given["input"], given.get("offsets"), given.get("per_sample_weights"))

    def canonical(
        self, inputs: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Canonical | None:
        """The call with these arguments of ``forward``, or with X; None where :meth:`canonical_bag` is."""
        bags = inputs if inputs.is_sparse else self.canonical_bag(inputs, offsets, per_sample_weights)
        return None if bags is None else Canonical(self, bags, bags.shape[0], None)

    def canonical_bag(
        self, inputs: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor | None:
        """X: the sparse matrix ``[bags, features]`` of which ``Z = W X`` are the layer's outputs.

        None if ``per_sample_weights`` require a gradient, since they are a part of X; for nested tensors; and where
        torch raises.

        Args:
            inputs: indices, ``[bags, length]``, or ``[indices]`` of all bags.
            offsets: ``[bags]``, where each bag begins in one-dimensional inputs, or ``[bags + 1]`` with
                ``include_last_offset``.
            per_sample_weights: what the indices' rows are multiplied by, in the shape of the inputs.
        """
        bag_of = self._bag_of(inputs, offsets)
        if bag_of is None or self.mode not in ("sum", "mean"):
            return None
        if per_sample_weights is not None and (
            per_sample_weights.requires_grad
            or self.mode != "sum"
            or per_sample_weights.is_nested
            or per_sample_weights.shape != inputs.shape
            or per_sample_weights.dtype != self.dtype
        ):
            return None
        bags = inputs.shape[0] if offsets is None else offsets.shape[0] - self.include_last_offset
        indices = inputs.reshape(-1).long()
        contributes = indices != self.padding_idx
        if per_sample_weights is not None:
            values = per_sample_weights.reshape(-1).masked_fill(~contributes, 0)
        elif self.mode == "sum":
            values = contributes.to(self.dtype)
        else:
            lengths = torch.zeros(bags, dtype=torch.int64, device=indices.device)
            lengths.scatter_add_(0, bag_of, contributes.long())
            values = contributes.to(self.dtype) / lengths.clamp(min=1)[bag_of]
        size = (bags, self.features)
        _let_torch_warn_of_sparse_tensors()
        return torch.sparse_coo_tensor(torch.stack([bag_of, indices]), values, size, check_invariants=False)

    def _bag_of(self, inputs: Tensor, offsets: Tensor | None) -> Tensor | None:
        """``[indices]``: the bag of each index; None where torch raises or depends on the device."""
        if inputs.is_nested or inputs.dtype not in (torch.int64, torch.int32):
            return None
        if inputs.ndim == 2 and offsets is None and inputs.shape[1] > 0:
            return torch.arange(inputs.shape[0], device=inputs.device).repeat_interleave(
                inputs.shape[1], output_size=inputs.numel()
            )
        if inputs.ndim != 1 or offsets is None or offsets.ndim != 1:
            return None
        starts = offsets[: offsets.shape[0] - self.include_last_offset]
        if starts.shape[0] == 0:
            return None
        if not offsets.is_cuda:  # looking costs nothing
            ends = offsets[-1] == inputs.shape[0] if self.include_last_offset else offsets[-1] <= inputs.shape[0]
            if offsets[0] != 0 or not ends or (offsets.diff() < 0).any():
                return None
        places = torch.arange(inputs.shape[0], device=inputs.device)
        return torch.searchsorted(starts.long(), places, right=True) - 1

    def product_called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Canonical | None:
        """A call of ``F.embedding_bag``, whatever its settings, if it is a matrix product."""
        if function is not F.embedding_bag:
            return None
        names = (
            *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
            *("per_sample_weights", "include_last_offset", "padding_idx"),
        )
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given.get("input"), Tensor) or given.get("scale_grad_by_freq", False):
            return None
        called = self._with_arguments(
            given, mode=given.get("mode", "mean"), include_last_offset=given.get("include_last_offset", False)
        )
        return called.canonical(given["input"], given.get("offsets"), given.get("per_sample_weights"))

    # ---- the product ------------------------------------------------------------------------------------------------

    def _indices_in(self, inputs: Tensor) -> Tensor:
        return inputs._indices()[1]

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``Z``: X times the weight; there is no bias.

        Through ``torch.embedding_bag``, which does not round to half precision under autocast as a product would.
        """
        bag_of, indices = inputs._indices()
        bags = torch.arange(inputs.shape[0] + 1, device=inputs.device)
        return torch.embedding_bag(
            weight,
            indices,
            torch.searchsorted(bag_of.contiguous(), bags),
            scale_grad_by_freq=False,
            mode=0,  # sums
            sparse=self.sparse,
            per_sample_weights=inputs._values().to(weight.dtype),
            include_last_offset=True,
            padding_idx=None if self.padding_idx < 0 else self.padding_idx,
        )[0]

    def weight_gradient(self, inputs: Tensor, output_grad: Tensor) -> Tensor:
        """``X ΔZᵀ``; sparse if the layer says so."""
        if self.sparse:
            bag_of, indices = inputs._indices()
            per_index = inputs._values()[:, None].to(output_grad.dtype) * output_grad[bag_of]
            backward = torch.ops.aten.embedding_sparse_backward
            gradient: Tensor = backward(per_index, indices, self.features, self.padding_idx, False)
            return gradient
        with torch.autocast(inputs.device.type, enabled=False):
            dense: Tensor = torch.sparse.mm(inputs.to(output_grad.dtype).mT, output_grad)
        return dense

    # ---- as matrices ------------------------------------------------------------------------------------------------

    def input_rows(self, inputs: Tensor) -> Tensor:
        """``[1, bags, features]``, dense."""
        return inputs.to_dense()[None]

    def gram(self, inputs: Tensor) -> Tensor:
        """``[1, bags, bags]``: ``XᵀX`` in the paper's orientation, in float32 or better; X is never dense."""
        rows = at_least_float32(inputs)
        return _sparse_product(rows, rows.mT)[None]

    def second_moment(self, inputs: Tensor, *, ones: bool) -> Tensor:
        """``[1, D, D]``, or one larger with ``ones``: for few indices and many bags."""
        rows = at_least_float32(inputs)
        moment = _sparse_product(rows.mT, rows)[None]
        return with_ones(moment, rows.sum(0).to_dense()[None], rows.shape[0]) if ones else moment

    def interference(self, inputs: Tensor, samples: int, *, ones: bool) -> Tensor:
        """``[samples, samples]``: each bag is a sample."""
        correlations = self.gram(inputs)[0]
        return correlations + 1 if ones else correlations


def _sparse_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two sparse matrices, dense."""
    with torch.autocast(left.device.type, enabled=False):
        dense: Tensor = torch.sparse.mm(left, right).to_dense()
    return dense


@lru_cache(maxsize=1)
def _let_torch_warn_of_sparse_tensors() -> None:
    """Torch says once that they are not checked, and that CSR is in a beta state: nothing for users of a layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = torch.empty(2, 0, dtype=torch.int64)
        torch.sparse_coo_tensor(empty, torch.empty(0), (1, 1), check_invariants=False).to_sparse_csr()
