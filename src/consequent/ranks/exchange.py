"""Between backward pass and correction: every rank's records become those of one process with all ranks' samples.

After :meth:`Exchange.complete` a record holds either the sum of all ranks' second moments, or the factor that one rank
made of it, or all ranks' rows, and the mathematics goes on as in one process. Each rank then comes to the same result,
as each optimiser does after ``DistributedDataParallel`` has averaged the gradients.

The hosts first tell each other how many rows they have for each layer; what is sent after that, and on which side each
layer is solved, follows from these numbers alone, so that all ranks do the same.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from consequent.capture.at_step import StepCorrector
from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.maths.damping import Damping
from consequent.ranks.announcements import MISBEHAVES
from consequent.ranks.factor_exchange import FactorExchange, Job
from consequent.ranks.gathered_rows import Gathering
from consequent.ranks.opening import Opening
from consequent.ranks.plans import Planner, share_out_factorisations
from consequent.ranks.process_group import Ranks
from consequent.ranks.sums import prepare_moment, start_sums
from consequent.statistics.averages import Averages, Idle


class Exchange:
    """What the ranks of one correction tell each other at every step.

    Args:
        capture: this rank's layers.
        corrector: its records.
        ranks: all ranks.
        damping_of: λ for a parameter.
        averages: of moments, over steps.
        settings: what all ranks must agree on besides the layers, as text by name.
        by_hand: whether no wrapper averages the gradients, but the user does.
    """

    def __init__(
        self,
        capture: Capture,
        corrector: StepCorrector,
        ranks: Ranks,
        damping_of: Callable[[Tensor], Damping],
        averages: Averages,
        settings: Callable[[], dict[str, str]],
        *,
        by_hand: bool,
    ) -> None:
        self.ranks = ranks
        self.by_hand = by_hand
        self._capture = capture
        self._corrector = corrector
        self._averages = averages
        self._opening = Opening(capture, corrector, ranks, damping_of, settings)
        self._planner = Planner(capture, corrector, ranks, self._opening, damping_of)
        self._gathering = Gathering(capture, ranks)

    def open(self, failure: Exception | None) -> bool:
        """Tell the other ranks what was captured here, and hear from them.

        Args:
            failure: why this rank cannot take part, if it cannot.

        Returns:
            whether any rank has captured anything.
        """
        return self._opening.open(failure)

    @property
    def samples(self) -> int:
        """Samples that entered the model on all ranks together."""
        return self._opening.samples

    def complete(self, may_wait: Callable[[Tensor], bool]) -> list[Record]:
        """Make this rank's records those of all ranks.

        Args:
            may_wait: whether the host may wait for a tensor's device to look at a result.

        Returns:
            a record for each weight of which any rank has inputs.
        """
        self._share_misbehaving()
        plans = self._planner.plans()
        if not self._averages.are_used:  # for these, every rank needs the moment itself
            share_out_factorisations(plans, self.ranks)
        for plan in plans:
            if plan.choice == "moment":
                prepare_moment(plan)
        jobs = [Job(plan.record, plan.owner, plan.damping, plan.rows) for plan in plans if plan.owner is not None]
        factors = FactorExchange(self.ranks, jobs, may_wait)
        moments = start_sums([plan for plan in plans if plan.is_summed], self.ranks)
        gathered = self._gathering.start([plan for plan in plans if plan.gathers])
        factors.factorise()
        for finish in (*moments, *gathered, factors.finish):
            finish()
        for plan in plans:
            known = replace(plan.record.captured, rows=plan.rows)
            if plan.choice == "nothing":  # also on a rank that had no rows
                known = Idle(known.uses, known.features, known.biases, plan.rows)
            plan.record.statistic = known
        return [plan.record for plan in plans]

    def mean(self, number: Tensor) -> Tensor:
        """The mean of all ranks' numbers, as wrappers average gradients; no host waits for its device."""
        total = number.to(torch.float64, copy=True)
        self.ranks.add_up(total)
        return total / self.ranks.size

    def _share_misbehaving(self) -> None:
        """A layer that is no matrix product on one rank stays plain on all."""
        for place, layer in enumerate(self._capture.layers.values()):
            if any(header.layers[place].form == MISBEHAVES for header in self._opening.headers):
                self._capture.misbehaving.setdefault(layer, "on another rank, its forward is not what its class says")
                record = self._corrector.records.get(self._capture.parameters_of(layer)[0])
                if record is not None:
                    record.clear()
