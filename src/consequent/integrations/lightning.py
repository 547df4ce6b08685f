"""Lightning: ``Trainer(callbacks=[ConsequentialismCallback()])``."""

from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from consequent.correction import Consequentialism, attach
from consequent.maths.damping import Damping
from consequent.options.parameter_groups import parameters_of
from consequent.options.settings import Options

__all__ = ["ConsequentialismCallback"]


class ConsequentialismCallback(Callback):
    """Makes the optimisers of a LightningModule consequentialist while ``Trainer.fit`` runs.

    Each optimiser gets a correction of its own for the layers whose parameters it holds; those that share layers (Muon
    for the weights, AdamW for the biases) get one together. (To have another damping for
    each, or to leave one plain, call :func:`consequent.attach` in ``configure_optimizers`` instead, or return a
    ready-made :class:`consequent.CSGD`: Lightning needs no callback for these.)

    Checkpoints hold the settings and counters, and ``fit(ckpt_path=…)`` goes on with them.

    Args:
        damping: λ, if it is not to be relative.
        options: all further arguments of :class:`consequent.Consequentialism`, ``relative_damping`` among them.

    Attributes:
        corrections: a :class:`consequent.Consequentialism` for each optimiser, or several that share layers; after
            training they are detached,
            and their counters can still be read.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> callback = ConsequentialismCallback(exclude="head")
        >>> trainer = Trainer(callbacks=[callback], accumulate_grad_batches=4, logger=False)
    """

    def __init__(self, damping: float | None = None, **options: Unpack[Options]) -> None:
        Damping.chosen(damping, options.get("relative_damping"))  # raises now, not when the training begins
        self.damping = damping
        self.options = options
        self.corrections: list[Consequentialism] = []
        self._loaded: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimisers exist now, the first batch is still to come."""
        self._detach()  # after a training that raised
        together = _sharing_layers(trainer.optimizers, pl_module)
        self.corrections = [attach(optimizers, pl_module, self.damping, **self.options) for optimizers in together]
        loaded, self._loaded = self._loaded, []
        if loaded and len(loaded) != len(self.corrections):
            raise ValueError(
                f"the checkpoint was written with {len(loaded)} optimisers, and now there are {len(self.corrections)} "
                "(those that share layers count as one)"
            )
        for correction, state in zip(self.corrections, loaded, strict=False):
            correction.load_state_dict(state)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training is over."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"corrections": [correction.state_dict() for correction in self.corrections]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Comes before the optimisers exist."""
        self._loaded = state_dict["corrections"]

    def _detach(self) -> None:
        for correction in self.corrections:
            if correction.optimizer is not None:  # the optimiser of a training that raised may be gone
                correction.detach()


def _sharing_layers(optimizers: list[Optimizer], model: nn.Module) -> list[list[Optimizer]]:
    """The optimisers, those together that hold different parts of one layer."""
    layers = [set(module.parameters(recurse=False)) for module in model.modules()]

    def share(one: Optimizer, other: Optimizer) -> bool:
        both = [(layer.intersection(parameters_of(one)), layer.intersection(parameters_of(other))) for layer in layers]
        return any(first - second and second - first for first, second in both)

    together: list[list[Optimizer]] = []
    for optimizer in optimizers:
        joined = [those for those in together if any(share(optimizer, other) for other in those)]
        together = [those for those in together if those not in joined]
        together.append([*(other for those in joined for other in those), optimizer])
    return together
