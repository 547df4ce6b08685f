"""``attach``: the one line that users add."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD, Optimizer

from consequent.correction import Correction, corrected_layers
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.damping import Damping
from consequent.maths.ridge import LossReduction
from consequent.maths.torch_private import compiled_model_in
from consequent.minibatch.forwards import clean_copies
from consequent.selection import Patterns, select_layers
from consequent.settings import Settings, refuse_gone, refuse_gone_in_groups


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    damping: float | None = None,  # λ in the paper
    *,
    relative_damping: float | None = None,
    loss_reduction: LossReduction = "mean",
    include: Patterns | None = None,
    exclude: Patterns = (),
    averaging: float | str | None = None,
    refresh: int = 10,
    bound: float | None = BOUND,
    **gone: Any,
) -> Correction:
    """Turn an optimiser into its consequentialist version: SGD into C-SGD, Adam into C-Adam.

    From now on the gradient ``ΔZ Xᵀ`` of every Linear and convolutional layer is replaced by
    ``ΔZ (XᵀX + λI)⁻¹ Xᵀ``, for whoever applies it.

    Args:
        optimizer: any optimiser of torch's kind, or a list of those that train the model together. It says which
            damping is the default, and which learning rates the bound goes by.
        model: the model, before or after it is compiled or wrapped by DDP, and after ``fully_shard``, as the optimiser
            is. Layers that are put into it later stay plain.
        damping: λ itself, added to the diagonal of the un-normalised Gram matrix, as in the paper. 0 is the
            pseudo-inverse.
        relative_damping: instead of ``damping``: ρ of ``λ = ρ · trace(XXᵀ) / min(N, D)``, a fraction of the inputs'
            mean eigenvalue, whatever their size and number. Without either it is 0.1 for SGD and 1 for others.
        loss_reduction: how the loss sums up over samples, so that the learning rate keeps the paper's meaning: "mean"
            over the N samples that enter the model (the leading dimension of its first tensor), or "sum". Or what the
            loss divides by: a number, or a function of N, as ``lambda n: n * outputs / 2`` for ``F.mse_loss``.
        include: which layers to correct: module types, names or compiled regular expressions. None: all that can be.
        exclude: which to leave out, likewise.
        averaging: 0: each mini-batch's own inputs, the paper's own. β > 0: averages of the inputs' second moments, in
            which those of one observation weigh β times those of the next. "auto": of the two what costs less for each
            layer. That is own inputs where fewer rows than features come in at the first step, and averages with
            β = 0.95 elsewhere.
            None: the library chooses; at present own inputs everywhere.
        refresh: T: inputs are observed, and averages inverted, at every T-th step. All passes of other steps are plain.
        bound: by what fraction of the size of its inputs one step of SGD may change a layer's outputs, so that too high
            a learning rate ends in a slow run and not in NaN. Other optimisers, and one layer alone, are not bounded;
            None: no bound, as in the paper.
        **gone: arguments of the second edition are refused by name.

    Returns:
        The correction: ``print`` it, ``detach()`` it.

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
    refuse_gone(gone, inspect.signature(attach).parameters)
    chosen = Damping.chosen(damping, relative_damping)
    settings = Settings(chosen, loss_reduction, averaging, refresh, bound)
    optimizers = _optimizers(optimizer)
    if bound not in (None, BOUND) and not any(isinstance(one, SGD) for one in optimizers):
        raise ValueError(
            f"bound={bound!r} would do nothing under {type(optimizers[0]).__name__}, whose steps have a length of "
            "their own: it is for torch.optim.SGD. Leave it out; a lower learning rate shortens any optimiser's steps"
        )
    refuse_gone_in_groups(optimizers)
    model = _unwrapped(model)
    clean_copies(model)
    selection = select_layers(model, include, exclude, corrected_layers(model))
    return Correction(optimizers, model, selection, settings)


def _optimizers(given: Any) -> list[Optimizer]:
    optimizers = list(given) if isinstance(given, Sequence) else [given]
    for place, optimizer in enumerate(optimizers):
        while (inner := _inside(optimizer)) is not None:
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}; "
                "attach(optimizer, model)"
            )
        optimizers[place] = optimizer
    if not optimizers:
        raise ValueError("attach() needs an optimiser, got an empty list")
    return optimizers


def _inside(optimizer: Any) -> Optimizer | None:
    """The optimiser whose steps a trainer's wrapper, or sharpness-aware minimisation, takes."""
    inner = [getattr(optimizer, name, None) for name in ("optimizer", "base_optimizer")]
    return next((one for one in inner if isinstance(one, Optimizer) and one is not optimizer), None)


def _unwrapped(model: Any) -> nn.Module:
    """The model inside of what ``torch.compile`` and DDP put around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}; the layers' inputs are needed, so pass the model "
            "itself and not its parameters"
        )
    if any(isinstance(module, DataParallel) for module in model.modules()):
        raise TypeError("nn.DataParallel calls copies of the layers, which stay plain; use DistributedDataParallel")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TypeError("FullyShardedDataParallel (FSDP1) flattens the layers' weights; use fully_shard (FSDP2)")
    if isinstance(model, DistributedDataParallel):
        return _unwrapped(model.module)
    inner = compiled_model_in(model)
    return model if inner is None else _unwrapped(inner)
