"""Ready-made consequentialist optimisers: the torch optimisers, built from a model instead of its parameters."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from consequent.correction import Consequentialism
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.damping import Damping
from consequent.options.arguments import refusing_unknown
from consequent.options.parameter_groups import default_damping
from consequent.options.selection import Patterns
from consequent.options.settings import LossReduction, Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CSGD", "CAdam", "CAdamW", "CRMSprop"]

Betas = tuple[float | Tensor, float | Tensor]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _Consequentialist(Optimizer):
    """What all of them share; stands before a torch optimiser among the bases.

    ``damping`` lives in the parameter groups, beside ``lr``: a group may have its own, and it is saved in the state
    dict. A copy or a pickle takes the model along, since an optimiser without its model could not foresee anything:
    copy or pickle both together, ``copy.deepcopy((model, optimizer))``, and they stay a pair.
    """

    correction: Consequentialism

    def __init__(self, given: dict[str, Any]) -> None:
        """Make the torch optimiser, and correct its gradients.

        Args:
            given: all arguments by name, as a class's own signature has them: those that are not ours go to torch.
        """
        given = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        model, params, self._damping = given.pop("model"), given.pop("params"), given.pop("damping")
        self._options = Options(**{name: given.pop(name) for name in Options.__annotations__})  # type: ignore[typeddict-item]
        if isinstance(params, int | float):
            raise TypeError(f"{type(self).__name__}(model, {params}): the learning rate is a keyword, lr={params}")
        correction = Consequentialism(model, self._damping, **self._options)  # checks its arguments first
        try:
            super().__init__(model.parameters() if params is None else params, **given)
            correction.attach(self)
        except BaseException:
            correction.detach()
            raise
        self.correction = correction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its layers are corrected from the next forward pass on."""
        if not {"damping", "relative_damping"} & set(param_group):
            default = Damping.chosen(self._damping, self._options.get("relative_damping")) or default_damping(self)
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
        correction = self.correction
        now = {"loss_reduction": correction.loss_reduction, "check": correction.check}
        options = {**self._options, **now, "bound": correction.bound, "promise": correction.promise}
        own = {"damping": self._damping, "options": options, "model": correction.model}
        own |= {"correction_state": correction.state_dict(), "is_attached": correction.optimizer is not None}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        model = state.pop("model", None)
        if model is None:  # from load_state_dict
            super().__setstate__(state)
            return
        self._damping, self._options = state.pop("damping"), state.pop("options")
        is_attached, correction_state = state.pop("is_attached", True), state.pop("correction_state", None)
        super().__setstate__(state)
        if "_modules" not in vars(model):
            raise TypeError(
                f"{type(model).__name__} holds its own {type(self).__name__}: they cannot be copied or pickled. "
                "Keep the optimiser outside of the model, or save both by their state_dict()."
            )
        options = {**self._options, "bound": BOUND}  # the state has its own, which may do nothing
        self.correction = Consequentialism(model, self._damping, **options).attach(self)
        if correction_state is None:  # in pickles of earlier versions
            correction_state = {**self.correction.state_dict(), "bound": self._options.get("bound", BOUND)}
        self.correction.load_state_dict(correction_state)
        if not is_attached:
            self.correction.detach()


class CSGD(_Consequentialist, SGD):
    """C-SGD, and with ``momentum`` and ``nesterov`` C-Momentum and C-Nesterov.

        ΔŴ = −μ ΔZ (XᵀX + λI)⁻¹ Xᵀ

    Args:
        model: the model; the layers' inputs are watched, so its parameters alone would not do.
        params: parameters or parameter groups, as in torch; None is all of the model's. The paper gives the last
            layer a tenth of the learning rate: ``[{"params": body}, {"params": head, "lr": 0.01}]``.
        lr: μ, with the paper's meaning (see ``loss_reduction``): 1 would land a single linear layer on its targets.
            With momentum m, dense networks want about (1 − m) times the rate they want without.
        momentum: m, of the velocity.
        dampening: of momentum, in torch's sense; has nothing to do with ``damping``.
        weight_decay: added to the corrected gradient, times the weight: decoupled from the correction.
        nesterov: look ahead: C-Nesterov.
        maximize: go up the gradient instead of down.
        foreach: torch's choice of implementation: all parameters together.
        differentiable: autograd may go through the step.
        fused: torch's choice of implementation: one kernel.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank. This and all further arguments
            are those of :class:`consequent.Consequentialism`, which says more of them.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        promise: how much of the loss a step of SGD may promise to take away; None: any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what ``optimizer.correction.foresight()`` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.

    Example:
        >>> import torch, consequent
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = consequent.CSGD(model, lr=0.01, momentum=0.9, nesterov=True, damping=0.03)
        >>> isinstance(optimizer, torch.optim.SGD)
        True
        >>> list(optimizer.correction.corrected)
        ['']
    """

    @refusing_unknown
    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        *,
        lr: float | Tensor = 0.1,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        damping: float | None = None,  # λ in the paper
        relative_damping: float | None = None,
        loss_reduction: LossReduction = "mean",
        include: Patterns | None = None,
        exclude: Patterns = (),
        averaging: float = 0.0,
        refresh: int = 1,
        largest_block: int | None = None,
        bound: float | None = BOUND,
        promise: float | None = None,
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        super().__init__(locals())


class CAdam(_Consequentialist, Adam):
    """C-Adam: :class:`torch.optim.Adam` fed with consequentialist gradients.

    Args:
        model: the model; the layers' inputs are watched, so its parameters alone would not do.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate; by default three times torch's, as the study of defaults has it.
        betas: how slowly the averages of the gradient and of its square forget.
        eps: added to the denominator.
        weight_decay: added to the corrected gradient, times the weight.
        amsgrad: divide by the largest second moment so far.
        foreach: torch's choice of implementation: all parameters together.
        maximize: go up the gradient instead of down.
        capturable: the step may be captured in a CUDA graph.
        differentiable: autograd may go through the step.
        fused: torch's choice of implementation: one kernel.
        decoupled_weight_decay: as in AdamW.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank. This and all further arguments
            are those of :class:`consequent.Consequentialism`, which says more of them.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        promise: how much of the loss a step of SGD may promise to take away; None: any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what ``optimizer.correction.foresight()`` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.
    """

    @refusing_unknown
    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        *,
        lr: float | Tensor = 3e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        damping: float | None = None,  # λ in the paper
        relative_damping: float | None = None,
        loss_reduction: LossReduction = "mean",
        include: Patterns | None = None,
        exclude: Patterns = (),
        averaging: float = 0.0,
        refresh: int = 1,
        largest_block: int | None = None,
        bound: float | None = BOUND,
        promise: float | None = None,
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        super().__init__(locals())


class CAdamW(_Consequentialist, AdamW):
    """C-AdamW: :class:`torch.optim.AdamW` fed with consequentialist gradients.

    Args:
        model: the model; the layers' inputs are watched, so its parameters alone would not do.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate; by default three times torch's, as the study of defaults has it.
        betas: how slowly the averages of the gradient and of its square forget.
        eps: added to the denominator.
        weight_decay: the weight shrinks by it, times lr, in every step.
        amsgrad: divide by the largest second moment so far.
        maximize: go up the gradient instead of down.
        foreach: torch's choice of implementation: all parameters together.
        capturable: the step may be captured in a CUDA graph.
        differentiable: autograd may go through the step.
        fused: torch's choice of implementation: one kernel.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank. This and all further arguments
            are those of :class:`consequent.Consequentialism`, which says more of them.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        promise: how much of the loss a step of SGD may promise to take away; None: any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what ``optimizer.correction.foresight()`` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.
    """

    @refusing_unknown
    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        *,
        lr: float | Tensor = 3e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        damping: float | None = None,  # λ in the paper
        relative_damping: float | None = None,
        loss_reduction: LossReduction = "mean",
        include: Patterns | None = None,
        exclude: Patterns = (),
        averaging: float = 0.0,
        refresh: int = 1,
        largest_block: int | None = None,
        bound: float | None = BOUND,
        promise: float | None = None,
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        super().__init__(locals())


class CRMSprop(_Consequentialist, RMSprop):
    """C-RMSProp: :class:`torch.optim.RMSprop` fed with consequentialist gradients.

    Args:
        model: the model; the layers' inputs are watched, so its parameters alone would not do.
        params: parameters or parameter groups, as in torch; None is all of the model's.
        lr: the learning rate.
        alpha: how slowly the average of the squared gradient forgets.
        eps: added to the denominator.
        weight_decay: added to the corrected gradient, times the weight.
        momentum: m, of the velocity.
        centered: divide by the standard deviation instead of the root mean square.
        capturable: the step may be captured in a CUDA graph.
        foreach: torch's choice of implementation: all parameters together.
        maximize: go up the gradient instead of down.
        differentiable: autograd may go through the step.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank. This and all further arguments
            are those of :class:`consequent.Consequentialism`, which says more of them.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        promise: how much of the loss a step of SGD may promise to take away; None: any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what ``optimizer.correction.foresight()`` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.
    """

    @refusing_unknown
    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        *,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        damping: float | None = None,  # λ in the paper
        relative_damping: float | None = None,
        loss_reduction: LossReduction = "mean",
        include: Patterns | None = None,
        exclude: Patterns = (),
        averaging: float = 0.0,
        refresh: int = 1,
        largest_block: int | None = None,
        bound: float | None = BOUND,
        promise: float | None = None,
        check: bool = False,
        foresight: bool = False,
        process_group: "ProcessGroup | None" = None,
        across_ranks: bool = True,
        at: str = "step",
    ) -> None:
        super().__init__(locals())
