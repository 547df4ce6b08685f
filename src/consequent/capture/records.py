"""The gradient in ``.grad`` of one weight: from which uses it came, and whether it is still what they put there.

Everything recorded is dropped as soon as ``.grad`` is found to have been emptied since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from consequent.capture.beside import Beside
from consequent.capture.gradient_mark import GradMark
from consequent.capture.torch_internals import answers_at_once
from consequent.capture.use import Entry, JointUse, Use
from consequent.engines.gpu.streams import event_in_graph
from consequent.layers import Operation
from consequent.ranks.sharded_tensors import is_nonzero, is_sharded, local
from consequent.statistics.averages import Idle
from consequent.statistics.blocks import Cuts
from consequent.statistics.joint import JointInputs
from consequent.statistics.rows import Rows
from consequent.statistics.statistic import Statistic
from consequent.statistics.tables import Bags, Counts


@dataclass(eq=False)
class Record:
    """The gradient of one weight and its biases.

    Attributes:
        weight: W, as the optimiser holds it.
        statistic: of the inputs of all uses that are in ``.grad`` now; None where there are none.
        beside: what else is in there.
        usual_uses: how many there were at the last step.
        passes: the backward passes in ``.grad``, each with an entry whose samples it was for; some repeatedly.
        accumulated: marks on the gradients as the last backward pass left them.
        corrected: marks on the gradients as the last correction left them.
        sizes: of its gradients then, where the weight and its biases lie in different parameter groups.
        held_unseen: whether ``.grad`` held something already that no backward pass was seen to put there.
        was_written_to: whether somebody wrote to ``.grad`` between two backward passes.
        accumulated_on_corrected: whether a backward pass was added to a gradient that had been corrected already.
        was_zeroed_in_part: whether only some of its gradients were emptied between two backward passes.
        was_left_zero: whether the last backward pass left all gradients zero, asked where no rows are kept.
        keeps_inputs: whether inputs are kept to be sent to other ranks, as their moment would be more bytes.
        stands_for: the record of a sharded weight, where this one is of this rank's rows of it.
    """

    weight: Tensor
    statistic: Statistic | None = None
    beside: Beside = field(default_factory=Beside)
    usual_uses: int = 0
    passes: list[tuple[int, Entry]] = field(default_factory=list)
    accumulated: list[tuple[Tensor, GradMark]] = field(default_factory=list)
    corrected: list[tuple[Tensor, GradMark]] = field(default_factory=list)
    sizes: dict[Tensor, Tensor] = field(default_factory=dict)
    held_unseen: bool = False
    was_written_to: bool = False
    accumulated_on_corrected: bool = False
    was_zeroed_in_part: bool = False
    was_left_zero: bool = False
    keeps_inputs: bool = False
    stands_for: "Record | None" = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured for the gradient in ``.grad``."""
        return self.statistic is None

    @property
    def captured(self) -> Statistic:
        """The statistic, of a record that is not empty."""
        assert self.statistic is not None
        return self.statistic

    @property
    def uses(self) -> tuple[Use, ...]:
        """All that are in ``.grad``."""
        return () if self.statistic is None else self.statistic.uses

    @property
    def operation(self) -> Operation:
        """That of a layer which uses the weight (all of them have the same shape)."""
        return self.captured.operation

    @property
    def first_use(self) -> Use:
        """The use that was recorded first."""
        return self.captured.uses[0]

    @property
    def features(self) -> int:
        """D, the columns of X that belong to the weight; 0 where only biases are trained."""
        return self.captured.features

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """Those that are solved for together with the weight."""
        return () if self.statistic is None else self.statistic.biases

    @property
    def rows(self) -> int:
        """Of X, all uses together."""
        return self.captured.rows

    @property
    def columns(self) -> int:
        """Of X: features, and a constant 1 for each bias."""
        return self.captured.columns

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are solved for together."""
        return list(self.beside.others) if self.statistic is None else self.statistic.members

    @property
    def grads(self) -> list[Tensor]:
        """Their gradients, which tell whether the uses are still in them."""
        return [grad for parameter in self.members if (grad := parameter.grad) is not None]

    @property
    def accumulates_elsewhere(self) -> bool:
        """Whether the gradient of a sharded weight waits, not reduced over ranks yet, in the wrapper's own memory.

        Then ``.grad`` was empty after the last backward pass already.
        """
        return bool(self.accumulated) and is_sharded(self.weight) and all(m.is_of_nothing for _, m in self.accumulated)

    def clear(self) -> None:
        """Forget all uses."""
        self.usual_uses = len(self.uses) or self.usual_uses
        self.statistic = None
        if self.beside:
            self.beside = Beside()
        self.was_written_to = self.accumulated_on_corrected = False
        self.was_zeroed_in_part = self.held_unseen = False
        self.accumulated, self.passes, self.sizes = [], [], {}

    def begin_backward_pass(self, grad: Tensor | None) -> None:
        """Before a backward pass adds to ``.grad``: is what was captured earlier still in there?

        Args:
            grad: the gradient that the pass is going to add to.
        """
        if self.statistic is None:
            if self.beside.others:
                if not self.grads or self._is_zeroed():
                    self.clear()
            elif left := self._left_corrected():  # of the bias, too: another optimiser may hold it
                self.accumulated_on_corrected = any(
                    is_nonzero(old) if answers_at_once(old) else mark.holds(old) for old, mark in left
                )
            elif grad is not None:
                self.held_unseen = answers_at_once(grad) and is_nonzero(grad)
                self.was_written_to = self.held_unseen or not answers_at_once(grad)
        elif not self.grads:
            if not self.accumulates_elsewhere:
                self.clear()
        elif self._is_zeroed():
            self.clear()
        else:
            self.was_zeroed_in_part = self.was_zeroed_in_part or self._is_zeroed_in_part()
            if not self.is_untouched():
                self.was_written_to = True

    def _left_corrected(self) -> list[tuple[Tensor, GradMark]]:
        """The gradients that a correction wrote and that are still there, with its marks; zeroed ones as well."""
        return [
            (grad, mark)
            for parameter, mark in self.corrected
            if (grad := parameter.grad) is not None and parameter.requires_grad and mark.is_same_tensor(grad)
        ]

    def is_zeroed_since(self) -> bool:
        """At the step: whether somebody wrote zeros to the gradients. On a GPU that is not looked at."""
        return not self.is_untouched() and answers_at_once(self.weight) and self._is_zeroed()

    def _is_zeroed(self) -> bool:
        """Whether ``zero_grad(set_to_none=False)``, or what amounts to it, came after the last backward pass.

        All gradients are zero then; but so they are after a pass in which all samples were masked, or all inputs dead.
        Writing to a gradient leaves a trace, if not through ``.data``; and some passes are known to have left more than
        zeros.
        """
        grads = [local(grad) for grad in self.grads]
        untouched = self.is_untouched()
        if untouched and not all(answers_at_once(grad) for grad in grads):
            return False  # on a GPU, look only if there is a reason to
        if is_sharded(self.weight) and untouched:
            return False  # this rank's part of a gradient may well be all zeros
        if any(is_nonzero(grad) for grad in grads):
            return False
        if not untouched or self.beside.others:
            return True
        return self._has_rows_of_a_gradient() if isinstance(self.statistic, Rows) else not self.was_left_zero

    def _is_zeroed_in_part(self) -> bool:
        """Whether a gradient is gone that the last backward pass left, while others are still there."""
        for parameter, mark in self.accumulated:
            grad = parameter.grad
            if mark.is_of_nothing or not parameter.requires_grad or mark.holds(grad):
                continue
            if grad is None:
                return True
            size = self.sizes.get(parameter)  # known where parameters lie in several groups
            if size is not None and answers_at_once(grad) and not is_nonzero(grad) and bool(size[0] > 0):
                return True
        return False

    def _has_rows_of_a_gradient(self) -> bool:
        """Whether there were output gradients, and for one of them an input: the gradient was not zero by itself."""
        for use in self.uses:
            if use.output_grad is None or not bool(use.output_grad.any()):
                continue
            if use.bias is not None or use.inputs is None:
                return True
            rows = use.operation.output_rows(use.output_grad).any(-1) & use.operation.input_rows(use.inputs).any(-1)
            if bool(rows.any()):
                return True
        return False

    @property
    def _may_be_looked_at(self) -> bool:
        """Whether nobody waits for it: neither this process for a GPU nor ranks for each other."""
        return answers_at_once(self.weight) and not is_sharded(self.weight)

    def note_pass(self, use: Use, backward_pass: int) -> None:
        """A backward pass goes through the use; one inside of another (reentrant checkpointing) is the outer one's."""
        part = (backward_pass if use.recomputed_in == -1 else use.recomputed_in, use.entry)
        if not self.passes or self.passes[-1] != part:
            self.passes.append(part)

    def add(self, use: Use, inputs: Tensor | None, output_grad: Tensor, *, idle: bool = False) -> None:
        """Add a use, or a further gradient of a use that is there already (``retain_graph``).

        Args:
            use: the use.
            inputs: its inputs; None where only the bias is trained.
            output_grad: its ΔZ in this backward pass.
            idle: whether an average stands for its inputs, so that only its rows count.
        """
        statistic = self.statistic
        if statistic is not None:
            if use in statistic.uses:
                if use.output_grad is not None:
                    use.output_grad = use.output_grad + output_grad.detach()
                    use.output_grad_there = event_in_graph()
                return  # its inputs count once
            if statistic.uses[0].trains_weight != use.trains_weight:
                raise RuntimeError(
                    f"requires_grad of the weight of {use.layer} changed between two backward passes of one step; "
                    "call optimizer.zero_grad() or optimizer.step() before changing it"
                )
            idle = isinstance(statistic, Idle)
        if idle:
            self.statistic = Idle.of(use) if statistic is None else statistic.add(use)
            return
        use.take(inputs, output_grad)
        self.statistic = _of_one(use) if statistic is None else statistic.add(use)

    def reduce(self, *, keep_rows: bool, cuts: Cuts = ()) -> None:
        """Let the second moment of the inputs, or that of their blocks, stand for the rows of all uses."""
        if isinstance(self.statistic, Rows):
            self.statistic = self.statistic.moment(keep_rows=keep_rows, cuts=cuts)

    # ---- marks ------------------------------------------------------------------------------------------------------

    def mark_accumulated(self) -> None:
        """Remember the gradients as the backward pass left them."""
        self.accumulated = [(parameter, GradMark(parameter.grad)) for parameter in self.members]
        if self.beside and self.members:
            self.beside.note(self.grads)
        if not isinstance(self.statistic, Rows) and self._may_be_looked_at:
            self.was_left_zero = not any(_is_nonzero_somewhere(grad) for grad in self.grads)

    def mark_corrected(self, parameters: Iterable[Tensor]) -> None:
        """Remember the gradients as the correction of these parameters left them."""
        self.corrected = [(parameter, GradMark(parameter.grad)) for parameter in parameters]

    def mark_stepped(self) -> None:
        """Remember them as the optimiser's step after it left them: some optimisers write to ``.grad``."""
        self.corrected = [(parameter, mark.renewed(parameter.grad)) for parameter, mark in self.corrected]

    def has_just_corrected(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is untouched since the correction wrote it."""
        return any(p is parameter and mark.holds(p.grad) for p, mark in self.corrected)

    def was_corrected(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is the one the correction left (perhaps clipped since)."""
        return any(p is parameter and mark.is_same_tensor(p.grad) for p, mark in self.corrected)

    def is_untouched(self) -> bool:
        """Whether the gradients are still as the backward pass left them."""
        if self.was_written_to or not self.accumulated:
            return False
        for parameter, mark in self.accumulated:
            grad = parameter.grad
            if grad is not None and not mark.holds(grad):
                return False
        return True


def _is_nonzero_somewhere(grad: Tensor) -> bool:
    """Looks at the beginning first, where it usually is."""
    return (not grad.is_sparse and is_nonzero(grad[:1])) or is_nonzero(grad)


def _of_one(use: Use) -> Statistic:
    """The statistic that a weight's first use begins with."""
    if isinstance(use, JointUse):
        return JointInputs.of(use)
    if not use.operation.is_sparse:
        return Rows.of(use)
    return Counts.of(use) if use.operation.is_diagonal else Bags.of(use)
