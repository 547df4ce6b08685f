"""What the stages of a correction have in common."""

from dataclasses import dataclass

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.correction.layers import Layers
from consequent.correction.territory import Territory
from consequent.engines.step import Rewriter
from consequent.options.loss_divisor import LossDivisor
from consequent.options.parameter_groups import Groups
from consequent.reports.reports import Reports


@dataclass(frozen=True)
class Parts:
    """All that a correction is made of.

    Attributes:
        layers: which of the model's are corrected.
        capture: these, watched.
        corrector: what was recorded of backward passes, with ``at="step"``.
        groups: of the optimisers.
        territory: the parameters, and other corrections on them.
        rewriter: who rewrites gradients, and keeps what is known of the last step or pass.
        loss: how it sums up over samples.
        reports: who counts and warns.
    """

    layers: Layers
    capture: Capture
    corrector: StepCorrector
    groups: Groups
    territory: Territory
    rewriter: Rewriter
    loss: LossDivisor
    reports: Reports
