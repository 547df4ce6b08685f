"""Ready-made consequentialist optimisers: the torch optimisers, built from a model instead of its parameters."""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from consequent.correction import Consequentialism
from consequent.maths.damping import DEFAULT, Damping
from consequent.options.settings import Options

__all__ = ["CSGD", "CAdam", "CAdamW", "CRMSprop"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _Consequentialist(Optimizer):
    """What all of them share; stands before a torch optimiser among the bases.

    ``damping`` lives in the parameter groups, beside ``lr``: a group may have its own, and it is saved in the state
    dict. A copy or a pickle takes the model along, since an optimiser without its model could not foresee anything:
    copy or pickle both together, ``copy.deepcopy((model, optimizer))``, and they stay a pair.
    """

    correction: Consequentialism

    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        *,
        damping: float | None = None,
        **options: Any,
    ) -> None:
        self._damping = damping
        own = {name: options.pop(name) for name in Options.__annotations__ if name in options}
        self._options = cast(Options, own)
        if isinstance(params, int | float):
            raise TypeError(f"{type(self).__name__}(model, {params}): the learning rate is a keyword, lr={params}")
        correction = Consequentialism(model, damping, **self._options)  # checks its arguments first
        try:
            super().__init__(model.parameters() if params is None else params, **options)
            correction.attach(self)
        except BaseException:
            correction.detach()
            raise
        self.correction = correction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its layers are corrected from the next forward pass on."""
        if not {"damping", "relative_damping"} & set(param_group):
            default = Damping.chosen(self._damping, self._options.get("relative_damping")) or DEFAULT
            param_group["relative_damping" if default.relative else "damping"] = default.value
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; one of a plain optimiser has no damping, and leaves it as it is."""
        names = ("damping", "relative_damping")
        own = [{name: group[name] for name in names if name in group} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, dampings in zip(self.param_groups, own, strict=True):
            if not any(name in group for name in names):
                group |= dampings

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        own = {"damping": self._damping, "options": self._options, "model": self.correction.model}
        return {**state, **own, "is_attached": self.correction.optimizer is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        model = state.pop("model", None)
        if model is None:  # from load_state_dict
            super().__setstate__(state)
            return
        self._damping, self._options = state.pop("damping"), state.pop("options")
        is_attached = state.pop("is_attached", True)
        super().__setstate__(state)
        if "_modules" not in vars(model):
            raise TypeError(
                f"{type(model).__name__} holds its own {type(self).__name__}: they cannot be copied or pickled. "
                "Keep the optimiser outside of the model, or save both by their state_dict()."
            )
        self.correction = Consequentialism(model, self._damping, **self._options).attach(self)
        if not is_attached:
            self.correction.detach()


class CSGD(_Consequentialist, SGD):
    r"""C-SGD, and with ``momentum`` and ``nesterov`` C-Momentum and C-Nesterov.

    .. math:: \Delta\hat W = -\mu\,\Delta Z\,(X^\top X + \lambda I)^{-1} X^\top

    Args:
        model: the model; the layers' inputs are watched, so its parameters alone would not do.
        params: parameters or parameter groups, as in torch; None is all of the model's. The paper gives the last
            layer a tenth of the learning rate: ``[{"params": body}, {"params": head, "lr": 0.01}]``.
        lr: μ, with the paper's meaning (see ``loss_reduction``): 1 would land a single linear layer on its targets.
            With momentum m, dense networks want about (1 − m) times the rate they want without.
        damping: λ, and all further arguments of :class:`consequent.Consequentialism`. (torch's ``dampening`` is
            something else: it belongs to momentum.)
        options: all further options of :class:`torch.optim.SGD`.

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
    """C-Adam: :class:`torch.optim.Adam` fed with consequentialist gradients. Arguments as for :class:`CSGD`."""


class CAdamW(_Consequentialist, AdamW):
    """C-AdamW: :class:`torch.optim.AdamW` fed with consequentialist gradients. Arguments as for :class:`CSGD`."""


class CRMSprop(_Consequentialist, RMSprop):
    """C-RMSProp: :class:`torch.optim.RMSprop` fed with consequentialist gradients. Arguments as for :class:`CSGD`."""
