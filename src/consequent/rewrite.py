"""Rewriting the gradients of one step: all of them, or none."""

from collections.abc import Iterable

import torch
from torch import Tensor

from consequent.autograd import answers_at_once
from consequent.capture import Capture
from consequent.foresight import Foresight, Watch
from consequent.groups import Groups
from consequent.guards import refuse_corrected_before, uncaptured_layers
from consequent.record import Record
from consequent.reports import Reports, shown
from consequent.settings import LossReduction, loss_divisor
from consequent.update import Update, consequentialist_update


class Rewriter:
    """Puts consequentialist gradients in the place of the plain ones."""

    def __init__(self, capture: Capture, groups: Groups, reports: Reports, *, foresight: bool) -> None:
        self._capture = capture
        self._groups = groups
        self._reports = reports
        self._keeps_foresight = foresight
        self._watch: Watch | None = None
        self.samples: int | None = None  # N of the last step
        self.sides: dict[str, str] = {}  # on which each layer was solved last
        self.uncaptured: dict[str, str] = {}  # layers that got a gradient which no hook saw

    def rewrite(self, loss_reduction: LossReduction, others: Iterable[Capture]) -> bool:
        """Rewrite the gradients of all corrected layers.

        Args:
            loss_reduction: how the loss sums up over samples.
            others: captures of other corrections, which may have rewritten the same gradients.

        Returns:
            False if the step must not be taken; then nothing was rewritten.
        """
        records = self._capture.filled_records()
        try:
            refuse_corrected_before(records, self._capture, others)
            self._list_uncaptured(records)
            self.samples = self._capture.samples()
            divisor = loss_divisor(loss_reduction, self.samples)
            updates = [self._update_of(record) for record in records]
            records, updates = self._leave_out_foreign(records, updates)
            finite = self._all_finite(records, updates)
            self._reports.add("steps")
            if finite is False:
                return False
            for record, update in zip(records, updates, strict=True):
                name = self._capture.names[record.layer]
                self._reports.updated(name, update)
                self.sides[name] = update.side
            if self._keeps_foresight:
                self._watch = Watch(records, self._capture.names, self._groups.learning_rate_of, divisor)
            written = [update.write(divisor, finite) for update in updates]
            self._reports.step_taken()
            if self._watch is not None:
                self._watch.note_corrected()
            for record, parameters in zip(records, written, strict=True):
                record.mark_corrected(parameters)
            return True
        finally:
            self._capture.clear()

    def _update_of(self, record: Record) -> Update:
        damping = self._groups.damping_of(record.first_use.key)
        return consequentialist_update(record, damping, may_wait=self._may_wait(record.weight))

    def _leave_out_foreign(self, records: list[Record], updates: list[Update]) -> tuple[list[Record], list[Update]]:
        """Layers with a forward of their own that, by their gradient, is no matrix product after all stay plain."""
        for record, update in zip(records, updates, strict=True):
            if update.foreign:
                self._capture.misbehaving[record.layer] = "its gradient is not the one its inputs explain"
        self.warn_of_misbehaving()
        kept = [(r, u) for r, u in zip(records, updates, strict=True) if not u.foreign]
        return [r for r, _ in kept], [u for _, u in kept]

    def _all_finite(self, records: list[Record], updates: list[Update]) -> bool | Tensor:
        """Whether the step may be taken; on a GPU that is not waited for, a tensor (and plain gradients are zeroed)."""
        corrected = {p for record in records for p in record.members}
        plain = [(p, p.grad) for p in self._groups.parameters() if p.grad is not None and p not in corrected]
        flags = [(shown(self._capture.names[r.layer]), u.finite) for r, u in zip(records, updates, strict=True)]
        flags += [("a layer that is not corrected", _is_finite(grad)) for _, grad in plain]
        found_inf = getattr(self._groups.optimizer, "found_inf", None)  # a GradScaler's, with a fused optimiser
        bad = [name for name, flag in flags if self._may_wait(flag) and not flag]
        if bad:
            if found_inf is None or not bool(found_inf):  # otherwise the scaler knows, and skips the step itself
                self._reports.non_finite(list(dict.fromkeys(bad)))
            return False
        waiting = [flag for _, flag in flags if not self._may_wait(flag)]
        if not waiting:
            return True
        finite = torch.stack([flag.to(waiting[0].device) for flag in waiting]).all()
        for _, grad in plain:
            if not grad.is_sparse:
                grad.masked_fill_(~finite.to(grad.device), 0)
        if found_inf is None:
            self._reports.add("skipped", (~finite).long())
        return finite

    def _list_uncaptured(self, records: list[Record]) -> None:
        for name in uncaptured_layers(records, self._capture, self._groups.owns):
            self.uncaptured[name] = (
                "its weight got a gradient without the layer being called (or it was compiled before attaching)"
            )
            self._reports.left_plain(name, self.uncaptured[name])
        for record in records:
            self.uncaptured.pop(self._capture.names[record.layer], None)
        self.warn_of_misbehaving()

    def warn_of_misbehaving(self) -> None:
        """Tell of layers that keep their plain gradient although they were to be corrected."""
        for layer, reason in self._capture.misbehaving.items():
            if layer in self._capture.names:
                self._reports.left_plain(self._capture.names[layer], reason)

    def foresight_of_the_step(self) -> Foresight | None:
        """After the optimiser's step: what it did to the outputs, if that was watched."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.compare()

    def _may_wait(self, tensor: Tensor) -> bool:
        return self._reports.check or answers_at_once(tensor)


def _is_finite(grad: Tensor) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return values.sum(dtype=torch.promote_types(grad.dtype, torch.float32)).isfinite()
