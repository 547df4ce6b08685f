"""``attach``: the one line that users add."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from consequent.correction.consequentialism import Consequentialism
from consequent.maths.bound import DEFAULT as BOUND
from consequent.options.arguments import refusing_unknown
from consequent.options.selection import Patterns
from consequent.options.settings import LossReduction
from consequent.reports.guards import checked_optimizers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@refusing_unknown
def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    damping: float | None = None,  # λ in the paper
    *,
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
) -> Consequentialism:
    """Turn an optimiser into its consequentialist version: SGD into C-SGD, Adam into C-Adam.

    From now on ``optimizer.step()`` first replaces the gradient ``ΔZ Xᵀ`` of every Linear, convolutional and recurrent
    layer and of attention by ``ΔZ (XᵀX + λI)⁻¹ Xᵀ``. :class:`Consequentialism` says more of the arguments.

    Args:
        optimizer: any first-order optimiser of torch's kind, or a list of those that train the model together
            (Muon for matrices and AdamW for the rest): a layer's weight may lie in one and its bias in another.
        model: the model whose parameters it holds.
        damping: λ itself, added to the diagonal of the Gram matrix.
        relative_damping: or λ as a fraction of the inputs' mean eigenvalue at full rank.
        loss_reduction: how the loss sums up over samples.
        include: which layers to correct.
        exclude: which to leave out.
        averaging: β of an average of the inputs' second moments over steps.
        refresh: T: every how many steps that average is refreshed.
        largest_block: B: wider layers are solved for in blocks of so many features; None: each as a whole.
        bound: by what fraction of their size a step may change a layer's outputs; None: by any.
        promise: how much of the loss a step of SGD may promise to take away; None: any.
        check: raise on NaN, inf or a failed factorisation.
        foresight: keep what :meth:`Consequentialism.foresight` needs.
        process_group: the ranks that train this model together.
        across_ranks: False: each rank corrects with its own inputs only.
        at: ``"step"`` or ``"backward"``: when gradients are replaced.

    Example:
        >>> import torch, consequent
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> correction = consequent.attach(optimizer, model, damping=1e-6)
        >>> X, T = torch.eye(2, 3) + 0.5, torch.tensor([[1.0], [2.0]])
        >>> (0.5 * (model(X) - T) ** 2).mean().backward()
        >>> optimizer.step()
        >>> bool((model(X) - T).abs().max() < 1e-3)  # one step with lr=1 lands on the targets
        True
        >>> correction.detach()  # and it is plain SGD again
    """
    options = locals()
    checked_optimizers(options.pop("optimizer"))
    correction = Consequentialism(**options)
    try:
        correction.attach(optimizer)
    except BaseException:
        correction.detach()
        raise
    return correction
