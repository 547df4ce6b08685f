"""What is looked at once, at the first step, and may be warned of."""

from torch import optim

from consequent.capture.torch_internals import scaler_is_stepping
from consequent.capture.use import Entry
from consequent.correction.parts import Parts
from consequent.correction.territory import names_of
from consequent.reports.doubts import doubt_about_loss

# A factor of all gradients changes hardly anything of their steps.
SCALE_FREE = (
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop, optim.Muon),
)


class FirstStep:
    """Doubts about the loss, and about layers of which a part lies in no optimiser."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._is_over = False

    def look(self, passes: list[set[Entry]]) -> None:
        """Tell of a loss that can hardly be the mean it is taken for, where that matters; at the first step only.

        Args:
            passes: the backward passes, each with the entries that took part in it.
        """
        if self._is_over:
            return
        self._is_over = True
        capture, reports = self._parts.capture, self._parts.reports
        if self._parts.groups.optimizers:
            self._warn_of_halves()
        capture.entries.loss_watch = None
        taken_over = self._parts.loss.taken_over
        optimizers = self._parts.groups.optimizers
        matters = not optimizers or not all(isinstance(optimizer, SCALE_FREE) for optimizer in optimizers)
        if taken_over is not None and matters:
            doubt = doubt_about_loss(passes, capture.model, taken_over, is_scaled=scaler_is_stepping())
            reports.samples_in_doubt(doubt)

    def _warn_of_halves(self) -> None:
        """Tell of a layer whose weight, or bias, is trained and in none of the optimisers."""
        groups = self._parts.groups
        for layer, parameters in self._parts.territory.by_layer().items():
            trained = [p for p in parameters if p.requires_grad]
            held = [p for p in trained if groups.owns(p)]
            if 0 < len(held) < len(trained):
                names = {id(p): name for name, p in layer.named_parameters()}
                missing = [p for p in trained if not groups.owns(p)]
                parts = [[names.get(id(p), "weight or bias") for p in some] for some in (held, missing)]
                self._parts.reports.half_held(self._parts.capture.names[layer], names_of(groups.optimizers), *parts)
                return
