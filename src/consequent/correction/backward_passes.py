"""``at="backward"``: what every backward pass is divided by, and who solves for its weights."""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from consequent.capture.at_backward import Gathered
from consequent.capture.use import Entry, Use
from consequent.correction.first_step import FirstStep
from consequent.correction.parts import Parts
from consequent.engines.gpu.after_pass import AfterPass
from consequent.engines.in_backward import corrected_in_backward
from consequent.maths.damping import Damping
from consequent.options.settings import loss_divisor


class BackwardPasses:
    """What a correction does in backward passes.

    Attributes:
        after_pass: on a GPU, who solves for all weights at the end of a pass.
    """

    def __init__(self, parts: Parts, first_step: FirstStep) -> None:
        self._parts = parts
        self._first_step = first_step
        self.after_pass = AfterPass(parts.reports.on_device, self._solved_after_pass)

    def divisor(self, entries: set[Entry]) -> float:
        """What the loss of a pass was divided by.

        Args:
            entries: those that take part in it.
        """
        loss, rewriter = self._parts.loss, self._parts.rewriter
        samples = self._parts.capture.entries.count([entries])
        self._first_step.look([entries])
        divisor = loss.seen([entries]) if loss.is_seen else loss_divisor(loss.reduction, samples)
        divisor = divisor or 1.0  # no target counts: the gradient is zero
        rewriter.samples, rewriter.divisor = samples, divisor
        self._parts.reports.add_step(rewriter.device)
        return divisor

    def solve(
        self, gathered: Gathered, damping: Damping, scale: float, accumulators: Sequence[Node | None]
    ) -> dict[Tensor, Tensor]:
        """New gradients by parameter, as :class:`consequent.capture.at_backward.BackwardCorrector` asks for them."""
        largest_block = self._parts.groups.largest_block_of(gathered.products[0].use.key)
        check = self._parts.reports.check
        if not check and largest_block is None and self.after_pass.takes(gathered, damping, accumulators):
            self.after_pass.add(gathered, damping, scale)
            return {}
        corrected = corrected_in_backward(gathered, damping, scale, check=check, largest_block=largest_block)
        name = self._parts.capture.names.get(gathered.products[0].use.layer, "")
        self._parts.reports.solved(name, corrected.finite, corrected.rescued, corrected.fallen_back)
        self._parts.rewriter.sides[name] = corrected.side
        return corrected.gradients

    def _solved_after_pass(self, use: Use, side: str) -> None:
        self._parts.rewriter.sides[self._parts.capture.names.get(use.layer, "")] = side
