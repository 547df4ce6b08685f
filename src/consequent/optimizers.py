"""Ready-made consequentialist optimisers: the torch optimisers, built from a model instead of its parameters."""

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from consequent.attach import attach
from consequent.correction import Correction
from consequent.settings import GONE, refuse_gone

__all__ = ["CSGD", "CAdam", "CAdamW", "CRMSprop"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_OPTIONS = {*inspect.signature(attach).parameters, *GONE} - {"optimizer", "model", "gone"}


class _Consequentialist(Optimizer):
    """What all of them share; stands before a torch optimiser among the bases.

    Attributes:
        correction: what :func:`consequent.attach` returned.
    """

    correction: Correction

    def __init__(self, model: nn.Module, params: Params | None = None, **options: Any) -> None:
        if isinstance(params, int | float):
            raise TypeError(f"{type(self).__name__}(model, {params}): the learning rate is a keyword, lr={params}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__} takes the model itself, got {type(model).__name__}")
        ours = {name: options.pop(name) for name in list(options) if name in _OPTIONS}
        torchs = inspect.signature(super().__init__).parameters
        refuse_gone(
            sorted(options.keys() - torchs.keys()), (_OPTIONS - GONE.keys()) | torchs.keys(), type(self).__name__
        )
        super().__init__(model.parameters() if params is None else params, **options)
        self.correction = attach(self, model, **ours)


class CSGD(_Consequentialist, SGD):
    """C-SGD, and with ``momentum`` and ``nesterov`` C-Momentum and C-Nesterov.

        ΔŴ = −μ ΔZ (XᵀX + λI)⁻¹ Xᵀ

    Args:
        model: the model.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: μ, with the paper's meaning: 1 would land a single linear layer on its targets.
        **options: those of :func:`consequent.attach` and of :class:`torch.optim.SGD`.

    Example:
        >>> import torch, consequent
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = consequent.CSGD(model, lr=0.01, momentum=0.9, nesterov=True, damping=0.03)
        >>> isinstance(optimizer, torch.optim.SGD)
        True
        >>> list(optimizer.correction.corrected)
        ['']
    """

    def __init__(
        self, model: nn.Module, params: Params | None = None, *, lr: float | Tensor = 0.1, **options: Any
    ) -> None:
        super().__init__(model, params, lr=lr, **options)


class CAdam(_Consequentialist, Adam):
    """C-Adam: :class:`torch.optim.Adam` fed with consequentialist gradients.

    Args:
        model: the model.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate; by default three times torch's, as the study of defaults has it.
        **options: those of :func:`consequent.attach` and of :class:`torch.optim.Adam`.
    """

    def __init__(
        self, model: nn.Module, params: Params | None = None, *, lr: float | Tensor = 3e-3, **options: Any
    ) -> None:
        super().__init__(model, params, lr=lr, **options)


class CAdamW(_Consequentialist, AdamW):
    """C-AdamW: :class:`torch.optim.AdamW` fed with consequentialist gradients.

    Args:
        model: the model.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate; by default three times torch's, as the study of defaults has it.
        **options: those of :func:`consequent.attach` and of :class:`torch.optim.AdamW`.
    """

    def __init__(
        self, model: nn.Module, params: Params | None = None, *, lr: float | Tensor = 3e-3, **options: Any
    ) -> None:
        super().__init__(model, params, lr=lr, **options)


class CRMSprop(_Consequentialist, RMSprop):
    """C-RMSProp: :class:`torch.optim.RMSprop` fed with consequentialist gradients.

    Args:
        model: the model.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate.
        **options: those of :func:`consequent.attach` and of :class:`torch.optim.RMSprop`.
    """

    def __init__(
        self, model: nn.Module, params: Params | None = None, *, lr: float | Tensor = 1e-2, **options: Any
    ) -> None:
        super().__init__(model, params, lr=lr, **options)
