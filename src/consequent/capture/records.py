"""What was captured for one weight: the uses whose gradients are in ``.grad`` now, and nothing else.

Everything recorded is dropped as soon as ``.grad`` is found to have been emptied since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from consequent.capture.gradient_mark import GradMark
from consequent.capture.torch_internals import answers_at_once
from consequent.capture.use import Entry, Use
from consequent.engines.gpu.streams import event_in_graph
from consequent.engines.inverse_factor import InverseFactor
from consequent.layers import Operation
from consequent.layers.operation import at_least_float32
from consequent.maths.damping import Damping
from consequent.maths.precision import in_full_precision
from consequent.maths.probes import PROBES, random_numbers
from consequent.ranks.sharded_tensors import is_nonzero, is_sharded, local
from consequent.statistics.moment import moment_of


@dataclass(eq=False)
class Record:
    """All uses of one weight that are in its ``.grad`` now.

    Uses are kept as rows (inputs and output gradients) while there are fewer rows than features, and are reduced to the
    second moment of the inputs as soon as there are more: the side to solve on is the smaller one, and the memory is
    bounded by it.

    Attributes:
        weight: W, as the optimiser holds it.
        features: D, the columns of X that belong to the weight; 0 where only the bias is trained.
        biases: those that are solved for together with the weight, a column of X each.
        uses: those that are kept as rows.
        reduced: those for which the moment, the counts or a factor stand.
        moment: ``[groups, D + biases, D + biases]``, ``XXᵀ`` in the paper.
        counts: ``[D]``, the diagonal of the moment, where the rows are one-hot.
        factor: of the moment plus this λ, if it was factorised already.
        cholesky: ``[groups, D + biases, D + biases]``, L of the moment plus λ, where another rank factorised it and the
            host may look.
        usual_uses: how many there were at the last step.
        passes: the backward passes in ``.grad``, and the entries whose samples they were for.
        accumulated: marks on the gradients as the last backward pass left them.
        corrected: marks on the gradients as the last correction left them.
        was_written_to: whether somebody wrote to ``.grad`` between two backward passes.
        accumulated_on_corrected: whether a backward pass was added to a gradient that had been corrected already.
        has_output_grads: whether some ΔZ was not all zeros, as far as that was looked at.
        others: what came to the parameters' gradients otherwise than from uses: penalties, uses outside of the layer.
        others_beside: the :func:`signature` of the gradients when that was found.
        transposed: a bound of ``‖Σ ΔZ ΔZᵀ‖``, where the weight acted in ``Wᵀ ΔZ``, too (a penalty on gradients).
        from_transposed: the part of the weight's gradient that comes from there, in its shape.
        total_rows: with other ranks' rows, once they are in the moment or in the uses.
        keeps_inputs: whether inputs are kept to be sent to other ranks, as their moment would be more bytes.
        stands_for: the record of a sharded weight, where this one is of this rank's rows of it.
    """

    weight: Tensor
    features: int = 0
    biases: list[Tensor] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    reduced: list[Use] = field(default_factory=list)
    moment: Tensor | None = None
    counts: Tensor | None = None
    factor: tuple[Damping, InverseFactor] | None = None
    cholesky: Tensor | None = None
    usual_uses: int = 0
    passes: dict[int, set[Entry]] = field(default_factory=dict)
    accumulated: list[tuple[Tensor, GradMark]] = field(default_factory=list)
    corrected: list[tuple[Tensor, GradMark]] = field(default_factory=list)
    was_written_to: bool = False
    accumulated_on_corrected: bool = False
    has_output_grads: bool = False
    others: dict[Tensor, Tensor] = field(default_factory=dict)
    others_beside: Tensor | None = None
    transposed: Tensor | None = None
    from_transposed: Tensor | None = None
    total_rows: int | None = None
    keeps_inputs: bool = False
    stands_for: "Record | None" = None

    @property
    def operation(self) -> Operation:
        """That of a layer which uses the weight (all of them have the same shape)."""
        return self.first_use.operation

    @property
    def first_use(self) -> Use:
        """The use that was recorded first."""
        return (self.reduced or self.uses)[0]

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are solved for together."""
        if self.is_empty:
            return list(self.others)
        return [*([self.weight] if self.first_use.trains_weight else []), *self.biases]

    @property
    def grads(self) -> list[Tensor]:
        """Their gradients, which tell whether the uses are still in them."""
        return [parameter.grad for parameter in self.members if parameter.grad is not None]

    @property
    def accumulates_elsewhere(self) -> bool:
        """Whether the gradient of a sharded weight waits, not reduced over ranks yet, in the wrapper's own memory.

        Then ``.grad`` was empty after the last backward pass already.
        """
        return bool(self.accumulated) and is_sharded(self.weight) and all(m.is_of_nothing for _, m in self.accumulated)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured for the gradient in ``.grad``."""
        return not self.uses and not self.reduced

    @property
    def is_reduced(self) -> bool:
        """Whether the second moment, or its factor alone where another rank made it, stands for the rows."""
        return any(kept is not None for kept in (self.moment, self.counts, self.factor, self.cholesky))

    @property
    def rows(self) -> int:
        """Rows of all uses together."""
        if self.total_rows is not None:
            return self.total_rows
        return sum(use.rows for use in (*self.uses, *self.reduced))

    @property
    def columns(self) -> int:
        """Columns of the input matrix: features and a constant 1 for each bias."""
        return self.features + len(self.biases)

    def clear(self) -> None:
        """Forget all uses."""
        self.usual_uses = len(self.uses) + len(self.reduced) or self.usual_uses
        self.biases, self.uses, self.reduced, self.moment, self.factor = [], [], [], None, None
        self.counts = self.cholesky = self.total_rows = self.transposed = self.from_transposed = None
        self.was_written_to = self.accumulated_on_corrected = self.has_output_grads = False
        self.accumulated, self.passes, self.others, self.others_beside = [], {}, {}, None

    def begin_backward_pass(self, grad: Tensor | None) -> None:
        """Before a backward pass adds to ``.grad``: is what was captured earlier still in there?

        Args:
            grad: the gradient that the pass is going to add to.
        """
        if self.is_empty and self.others:
            if not self.grads or self._is_zeroed():
                self.clear()
        elif self.is_empty:
            marks = [] if grad is None else [mark for _, mark in self.corrected if mark.is_same_tensor(grad)]
            if grad is not None and marks:
                looks = answers_at_once(grad)
                self.accumulated_on_corrected = is_nonzero(grad) if looks else marks[0].holds(grad)
            elif grad is not None:
                self.was_written_to = not answers_at_once(grad) or is_nonzero(grad)
        elif not self.grads:
            if not self.accumulates_elsewhere:
                self.clear()
        elif self._is_zeroed():
            self.clear()
        elif not self.is_untouched():
            self.was_written_to = True

    def is_zeroed_since(self) -> bool:
        """At the step: whether somebody wrote zeros to the gradients. On a GPU that is not looked at."""
        return answers_at_once(self.weight) and not self.is_untouched() and self._is_zeroed()

    def _is_zeroed(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)``, or what amounts to it, came after the last backward pass.

        All gradients are zero then; but so they are after a pass in which all samples were masked, or all inputs dead.
        Writing to a gradient leaves a trace, if not through ``.data``; and where there were output gradients and
        inputs, the gradient of neither weight nor bias is zero by itself.
        """
        grads = [local(grad) for grad in self.grads]
        untouched = self.is_untouched()
        if untouched and not all(answers_at_once(grad) for grad in grads):
            return False  # on a GPU, look only if there is a reason to
        if is_sharded(self.weight) and untouched:
            return False  # this rank's part of a gradient may well be all zeros
        if any(is_nonzero(grad) for grad in grads):
            return False
        if not untouched or self.others:
            return True
        self._look_for_output_grads()
        return self.has_output_grads and self._has_inputs()

    def _look_for_output_grads(self) -> None:
        """Whether some ΔZ is not all zeros; not asked on a GPU."""
        for use in self.uses:
            if not self.has_output_grads and use.output_grad is not None and answers_at_once(use.output_grad):
                self.has_output_grads = bool(use.output_grad.any())

    def _has_inputs(self) -> bool:
        """Whether a use with output gradients has inputs that are not all zeros: then there was a gradient."""
        if self.biases:
            return True
        return any(
            bool(
                (
                    use.operation.input_rows(use.inputs).any(-1) & use.operation.output_rows(use.output_grad).any(-1)
                ).any()
            )
            for use in self.uses
            if use.inputs is not None and use.output_grad is not None
        ) or (self.moment is not None and not self.uses and bool(self.moment.any()))

    def note_pass(self, use: Use, backward_pass: int) -> None:
        """A backward pass goes through the use; one inside of another (reentrant checkpointing) is the outer one's."""
        outer = backward_pass if use.recomputed_in == -1 else use.recomputed_in
        self.passes.setdefault(outer, set()).add(use.entry)

    def add(self, use: Use, inputs: Tensor | None, output_grad: Tensor) -> None:
        """Add a use, or a further gradient of a use that is there already (``retain_graph``).

        Args:
            use: the use.
            inputs: its inputs; None where only the bias is trained.
            output_grad: its ΔZ in this backward pass.
        """
        if use in self.uses or use in self.reduced:
            if use.output_grad is not None:
                use.output_grad = use.output_grad + output_grad.detach()
                use.output_grad_there = event_in_graph()
            return  # its inputs count once
        if not self.is_empty and self.first_use.trains_weight != use.trains_weight:
            raise RuntimeError(
                f"requires_grad of the weight of {use.layer} changed between two backward passes of one step; "
                "call optimizer.zero_grad() or optimizer.step() before changing it"
            )
        self.features = use.features
        if use.bias is not None and not any(use.bias is bias for bias in self.biases):
            self.biases.append(use.bias)
        use.take(inputs, output_grad)
        if use.inputs_there is not None:  # otherwise there was no CUDA graph, and nobody asks
            use.output_grad_there = event_in_graph()
            if not use.inputs_stayed:
                use.inputs_there = use.output_grad_there
        self.uses.append(use)

    @in_full_precision
    def reduce(self, *, keep_rows: bool) -> None:
        """Let the second moment of the inputs stand for the rows of all uses."""
        self.moment = moment_of(self.uses, self.features, self.biases, self.moment)
        self._look_for_output_grads()
        if not keep_rows:
            for use in self.uses:
                use.inputs = use.output_grad = None
        self.reduced += self.uses
        self.uses, self.factor = [], None

    def count(self) -> None:
        """Let the counts of the indices stand for the one-hot rows of all uses."""
        self._look_for_output_grads()
        for use in self.uses:
            counts: Tensor = use.operation.counts(use.inputs)  # type: ignore[attr-defined]
            self.counts = counts if self.counts is None else self.counts + counts
            use.inputs = use.output_grad = None
        self.reduced += self.uses
        self.uses = []

    def factor_for(self, damping: Damping) -> InverseFactor | None:
        """That of the moment plus λ, if it was factorised already, and with this λ."""
        if self.factor is None or self.factor[0] != damping:
            return None
        return self.factor[1]

    def reduce_to(self, moment: Tensor, factor: tuple[Damping, InverseFactor] | None) -> None:
        """Let this second moment, computed elsewhere, stand for the rows of all uses.

        Args:
            moment: ``[groups, D + biases, D + biases]``.
            factor: of it, and λ, if it was factorised.
        """
        for use in self.uses:
            use.inputs = use.output_grad = None
        self.reduced, self.uses = [*self.reduced, *self.uses], []
        self.moment, self.factor = moment, factor

    # ---- what else is in the gradient -------------------------------------------------------------------------------

    def add_other(self, parameter: Tensor, gradient: Tensor) -> None:
        """This part of the parameter's gradient comes from elsewhere: a penalty, a use outside of the layer."""
        known = self.others.get(parameter)
        self.others[parameter] = gradient if known is None else known + gradient

    def add_transposed(self, operation: Operation, output_grad: Tensor, weight_grad: Tensor) -> None:
        """The weight acted in ``Wᵀ ΔZ``, too, which an earlier pass had computed and this one goes through."""
        gradient = weight_grad.detach()
        self.from_transposed = gradient if self.from_transposed is None else self.from_transposed + gradient
        size = operation.transposed_norm(output_grad.detach())
        self.transposed = size if self.transposed is None else self.transposed + size

    def scaled_by(self) -> tuple[Tensor, Tensor] | None:
        """By what the gradients were multiplied since the backward pass, and how far from a multiple they are.

        None where nothing was noted of them, or not all of them are there. The second number is a fraction, in units
        of eps: rounding, unless somebody wrote to them.
        """
        before, grads = self.others_beside, self.grads
        if before is None or len(before) != PROBES * len(grads):
            return None
        now = signature(grads)
        tiny = torch.finfo(now.dtype).tiny
        factor = (now * before).sum() / before.square().sum().clamp(min=tiny)
        error = (now - factor * before).norm() / now.norm().clamp(min=tiny)
        return factor, error / torch.finfo(now.dtype).eps

    # ---- marks ------------------------------------------------------------------------------------------------------

    def mark_accumulated(self) -> None:
        """Remember the gradients as the backward pass left them."""
        self.accumulated = [(parameter, GradMark.of(parameter.grad)) for parameter in self.members]
        if self.others or self.transposed is not None:
            self.others_beside = signature(self.grads)

    def mark_corrected(self, parameters: Iterable[Tensor]) -> None:
        """Remember the gradients as the correction of these parameters left them."""
        self.corrected = [(parameter, GradMark.of(parameter.grad)) for parameter in parameters]

    def mark_stepped(self) -> None:
        """Remember them as the optimiser's step after it left them: some optimisers write to ``.grad``."""
        for parameter, mark in self.corrected:
            mark.renew(parameter.grad)

    def has_just_corrected(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is untouched since the correction wrote it."""
        return any(p is parameter and mark.holds(p.grad) for p, mark in self.corrected)

    def was_corrected(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is the one the correction left (perhaps clipped since)."""
        return any(p is parameter and mark.is_same_tensor(p.grad) for p, mark in self.corrected)

    def is_untouched(self) -> bool:
        """Whether the gradients are still as the backward pass left them."""
        marks = self.accumulated
        return not self.was_written_to and bool(marks) and all(m.holds(p.grad) for p, m in marks if p.grad is not None)


def signature(grads: list[Tensor]) -> Tensor:
    """A few numbers, linear in the gradients, by which a multiple of them is known again: ``[3 · gradients]``."""
    return torch.cat([_signature_of(local(grad)) for grad in grads])


def _signature_of(grad: Tensor) -> Tensor:
    matrix = at_least_float32(grad).reshape(len(grad), prod(grad.shape[1:]))
    rows, columns = (
        random_numbers(size, matrix.dtype, matrix.device, place) for place, size in enumerate(matrix.shape)
    )
    return ((rows @ matrix) * columns).sum(-1)
