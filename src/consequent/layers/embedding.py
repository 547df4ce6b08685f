"""``nn.Embedding`` and ``nn.EmbeddingBag``: products with a matrix X that has few entries other than zero.

In an ``nn.Embedding`` every row of X is one-hot: the rows of the weight that are looked up. So its second moment is
diagonal, ``XXᵀ = diag(n)``, where ``n[v]`` counts how often index v was looked up, and the consequentialist gradient is
a division of each row of the weight's gradient:

    ``U[v] = G[v] / (n[v] + λ)``

In an ``nn.EmbeddingBag`` a row of X has an entry for each index in the bag: 1 for sums, 1/length for means, or the
weight that the caller gave it.
"""

import warnings
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consequent.layers.operation import Canonical, Operation, at_least_float32, with_ones


@dataclass(frozen=True)
class _Table(Operation):
    """What both kinds have in common: a weight ``[features, out_features]`` whose rows are looked up.

    Attributes:
        padding_idx: of the row that is no parameter, as it gets no gradient; -1 if there is none.
        max_norm: what rows that are looked up are shortened to first, if they are longer.
        norm_type: the p of that norm.
        sparse: whether the weight's gradient is a sparse tensor.
    """

    padding_idx: int = -1
    max_norm: float | None = None
    norm_type: float = 2.0
    sparse: bool = False

    corrected_by_default: ClassVar[bool] = False
    is_transposed: ClassVar[bool] = True
    has_rows_of_outputs: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = True
    follows_autocast: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The operation that the layer would do now."""
        features, outputs = layer.weight.shape
        return cls(
            groups=1,
            features=features,
            outputs=outputs,
            weight_shape=(features, outputs),
            padding_idx=_padding_index(layer.padding_idx, features),
            max_norm=layer.max_norm,
            norm_type=layer.norm_type,
            sparse=layer.sparse,
            **cls._own_settings(layer),
        )

    @classmethod
    @abstractmethod
    def _own_settings(cls, layer: Any) -> dict[str, Any]:
        """Those of the layer's settings that only this kind has."""

    def _with_arguments(self, given: dict[str, Any], **own: Any) -> Self:
        """With the settings that a call of torch's function gives, and those that only this kind has."""
        return replace(
            self,
            padding_idx=_padding_index(given.get("padding_idx"), self.features),
            max_norm=given.get("max_norm"),
            norm_type=given.get("norm_type", 2.0),
            sparse=given.get("sparse", False),
            **own,
        )

    def is_current(self, layer: Any) -> bool:
        """Whether the layer has the same settings still."""
        return self == type(self).of(layer)

    @property
    def inputs_per_row(self) -> int:
        """An index; in bags there are as many as they are long."""
        return 1

    def _shorten(self, weight: Tensor, indices: Tensor) -> None:
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), indices, self.max_norm, self.norm_type)

    def input_gradient(self, output_grad: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """There is none: indices have no gradient."""
        raise TypeError(f"the inputs of {type(self).__name__} are indices: they have no gradient")

    def output_rows(self, outputs: Tensor) -> Tensor:
        """``[1, rows, out_features]``."""
        return outputs[None]

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """``[1, out_features, features]``."""
        return weight.mT[None]

    def shaped_like_weight(self, matrix: Tensor) -> Tensor:
        """``[features, out_features]``."""
        return matrix.squeeze(0).mT


@dataclass(frozen=True)
class Embedding(_Table):
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

    def prepare(self, weight: Tensor, inputs: Tensor) -> None:
        """Shorten the rows that are looked up to ``max_norm``, in place, as ``F.embedding`` does.

        To be called before the product and outside of its autograd function: it writes to the weight and is no part of
        the graph.
        """
        self._shorten(weight, inputs)

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


@dataclass(frozen=True)
class EmbeddingBag(_Table):
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

    def prepare(self, weight: Tensor, inputs: Tensor) -> None:
        """Shorten the rows that are looked up to ``max_norm``, in place, as ``F.embedding_bag`` does.

        To be called before the product and outside of its autograd function.
        """
        self._shorten(weight, inputs._indices()[1])

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


def _padding_index(index: int | None, size: int) -> int:
    """The index counted from the beginning; -1 if there is none."""
    return -1 if index is None else index % size


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
