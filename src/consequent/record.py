"""What was captured for one weight: the uses whose gradients are in ``.grad`` now, and nothing else.

Everything recorded is dropped as soon as ``.grad`` is found to have been emptied since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from consequent import layers
from consequent.autograd import Kept, answers_at_once, graph_is_retained
from consequent.dtensor import is_sharded, local
from consequent.grad_mark import GradMark
from consequent.inverse_factor import InverseFactor
from consequent.layers import Layer
from consequent.moments import second_moment
from consequent.precision import in_full_precision
from consequent.settings import Damping
from consequent.streams import event_in_graph


@dataclass(eq=False, slots=True)
class Entry:
    """Samples entering the model: one outermost call of it or of a part of it."""

    module: nn.Module
    samples: int
    elements: int  # of the tensor that entered
    builds_graph: bool = field(default_factory=torch.is_grad_enabled)


@dataclass(eq=False, slots=True)
class Use:
    """One call of a layer."""

    layer: Layer
    weight: Tensor
    bias: Tensor | None  # None also where it is not trained
    trains_weight: bool
    entry: Entry
    rows: int
    features: int  # that meet the weight, per group
    dtype: torch.dtype  # of the outputs: what the products were computed in
    kept_inputs: Kept | None  # None where the weight is not trained, and once nothing more needs them
    inputs: Tensor | None = None
    inputs_version: int = -1  # when the backward pass was there
    inputs_stayed: bool = False  # since the forward pass, neither recomputed nor brought back
    output_grad: Tensor | None = None
    inputs_there: torch.cuda.Event | None = None  # in a CUDA graph: when the inputs are,
    output_grad_there: torch.cuda.Event | None = None  # and the output gradient

    @property
    def key(self) -> Tensor:
        """The parameter whose ``.grad`` shows whether the use is in the gradient: the weight, if it is trained."""
        if self.trains_weight:
            return self.weight
        assert self.bias is not None
        return self.bias

    def recalled_inputs(self) -> Tensor:
        """The inputs as the layer saw them. Raises if somebody wrote to them since."""
        assert self.kept_inputs is not None
        if self.kept_inputs.is_overwritten:
            raise RuntimeError(
                f"the inputs of {self.layer} have been modified by an inplace operation since it was called, and the "
                "correction needs them as they were; change a clone of them instead"
            )
        return self.kept_inputs.get()

    def refuse_overwritten_inputs(self) -> None:
        """Raise if somebody wrote to the inputs since the backward pass: the correction still needs them."""
        if self.inputs is not None and self.inputs._version != self.inputs_version:
            raise RuntimeError(
                f"the inputs of {self.layer} were overwritten between backward() and step(), which corrects with them; "
                "fill the buffer with the next batch after optimizer.step()"
            )


@dataclass(eq=False)
class Record:
    """All uses of one weight that are in its ``.grad`` now.

    Uses are kept as rows (inputs and output gradients) while there are fewer rows than features, and to be reduced to
    the second moment of the inputs as soon as there are more: the side to solve on is the smaller one, and the memory
    is bounded by it.
    """

    weight: Tensor
    features: int = 0  # columns that belong to the weight; none where only the bias is trained
    biases: list[Tensor] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    reduced: list[Use] = field(default_factory=list)
    moment: Tensor | None = None  # [groups, D + biases, D + biases]
    factor: tuple[Damping, InverseFactor] | None = None  # of the moment, if it was factorised with this λ already
    cholesky: Tensor | None = None  # L, where another rank factorised the moment plus λ for one that may be waited for
    usual_uses: int = 0  # how many uses the last step had
    backward_pass: int = -1
    accumulated: list[tuple[Tensor, GradMark]] = field(default_factory=list)  # after the last backward pass
    corrected: list[tuple[Tensor, GradMark]] = field(default_factory=list)  # after the last correction
    edited: bool = False  # somebody wrote to .grad between two backward passes
    accumulated_on_corrected: bool = False
    verified: bool = False  # the gradient was once compared with ΔZᵀX
    plain_gradient: Tensor | None = None  # ΔZᵀX for that comparison, where the rows are not kept
    squared_output_grads: Tensor | None = None  # ‖ΔZ‖², likewise
    total_rows: int | None = None  # with other ranks' rows, once they are in the moment or in the uses
    keeps_inputs: bool = False  # they are sent to other ranks, which costs less than to send their moment
    stands_for: "Record | None" = None  # of a sharded weight, where this one is of this rank's part of it

    @property
    def layer(self) -> Layer:
        """A layer that uses the weight (all of them have the same shape)."""
        return self.first_use.layer

    @property
    def first_use(self) -> Use:
        """The use that was recorded first."""
        return (self.reduced or self.uses)[0]

    @property
    def members(self) -> list[Tensor]:
        """The parameters that are solved for together."""
        return [*([self.weight] if self.first_use.trains_weight else []), *self.biases]

    @property
    def grad(self) -> Tensor | None:
        """The gradient that tells whether the uses are still in it: the weight's, or else a bias's."""
        grad = self.weight.grad if self.first_use.trains_weight else None
        return grad if grad is not None else next((bias.grad for bias in self.biases if bias.grad is not None), None)

    @property
    def accumulates_elsewhere(self) -> bool:
        """Whether the gradient of a sharded weight waits, not reduced over ranks yet, in the wrapper's own memory.

        Then ``.grad`` was empty after the last backward pass already.
        """
        return bool(self.accumulated) and is_sharded(self.weight) and all(m.tensor is None for _, m in self.accumulated)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured for the gradient in ``.grad``."""
        return not self.uses and not self.reduced

    @property
    def is_reduced(self) -> bool:
        """Whether the second moment, or its factor alone where another rank made it, stands for the rows."""
        return self.moment is not None or self.factor is not None or self.cholesky is not None

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

    @property
    def entries(self) -> set[Entry]:
        """Through which entries of samples into the model the uses came about."""
        return {use.entry for use in (*self.uses, *self.reduced)}

    def clear(self) -> None:
        """Forget all uses."""
        self.usual_uses = len(self.uses) + len(self.reduced) or self.usual_uses
        self.biases, self.uses, self.reduced, self.moment, self.factor = [], [], [], None, None
        self.cholesky = None
        self.plain_gradient = self.squared_output_grads = self.total_rows = None
        self.edited = self.accumulated_on_corrected = False
        self.accumulated, self.backward_pass = [], -1

    def begin_backward_pass(self, grad: Tensor | None) -> None:
        """Before a backward pass adds to ``.grad``: is what was captured earlier still in there?

        Args:
            grad: the gradient that the pass is going to add to.
        """
        if not self.is_empty:
            grad = self.grad  # the same one, unless requires_grad changed in between
        if grad is None:
            if not self.accumulates_elsewhere:
                self.clear()
        elif self.is_empty:
            marks = [mark for _, mark in self.corrected if mark.is_same_tensor(grad)]
            if marks:
                looks = answers_at_once(grad)
                self.accumulated_on_corrected = bool(local(grad).any()) if looks else marks[0].holds(grad)
            else:
                self.edited = True
        elif (answers_at_once(grad) and not is_sharded(grad)) or not self.is_untouched():
            # On a GPU, look only if there is a reason to. This rank's part of a gradient may well be all zeros.
            if not bool(local(grad).any()):
                self.clear()
            elif not self.is_untouched():
                self.edited = True

    def add(self, use: Use, output_grad: Tensor) -> None:
        """Add a use, or a further gradient of a use that is there already (``retain_graph``).

        Args:
            use: the use.
            output_grad: its ΔZ in this backward pass.
        """
        if use in self.uses or use in self.reduced:
            if use.output_grad is not None:
                use.output_grad = use.output_grad + output_grad
                use.output_grad_there = event_in_graph()
            if use in self.reduced and not self.verified and use.kept_inputs is not None:
                self.add_plain_gradient(use, use.recalled_inputs(), output_grad)
            return  # its inputs count once
        if not self.is_empty and self.first_use.trains_weight != use.trains_weight:
            raise RuntimeError(
                f"requires_grad of the weight of {use.layer} changed between two backward passes of one step; "
                "call optimizer.zero_grad() or optimizer.step() before changing it"
            )
        self.features = use.features if use.trains_weight else 0
        if use.bias is not None and not any(use.bias is bias for bias in self.biases):
            self.biases.append(use.bias)
        if use.kept_inputs is not None:
            use.inputs = use.recalled_inputs()
            use.inputs_version = use.inputs._version
            use.inputs_stayed = use.kept_inputs.stays
            if not graph_is_retained():
                use.kept_inputs = None
        use.output_grad = output_grad
        if use.inputs_there is not None:  # otherwise there was no CUDA graph, and nobody asks
            use.output_grad_there = event_in_graph()
            if not use.inputs_stayed:
                use.inputs_there = use.output_grad_there
        self.uses.append(use)

    @in_full_precision
    def reduce(self, *, keep_rows: bool) -> None:
        """Let the second moment of the inputs stand for the rows of all uses."""
        size = self.columns
        if self.moment is not None and self.moment.shape[-1] < size:  # a bias met for the first time
            grow = size - self.moment.shape[-1]
            self.moment = nn.functional.pad(self.moment, (0, grow, 0, grow))
        for use in self.uses:
            if use.inputs is not None and use.output_grad is not None and not self.verified:
                self.add_plain_gradient(use, use.inputs, use.output_grad)
            self.add_moment_of(use)
            if not keep_rows:
                use.inputs = use.output_grad = None
        self.reduced += self.uses
        self.uses = []
        self.factor = None

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

    def add_moment_of(self, use: Use) -> None:
        """Add the second moment of the use's inputs to that of the others."""
        columns, size = self.columns_of(use), self.columns
        dtype, device = torch.promote_types(use.dtype, torch.float32), self.weight.device
        if use.inputs is None:  # only the bias is trained
            part = torch.full((layers.groups(use.layer), 1, 1), float(use.rows), dtype=dtype, device=device)
        else:
            part = second_moment(use.layer, use.inputs, ones=use.bias is not None)
        if len(columns) == size and self.moment is None:
            self.moment = part
            return
        if self.moment is None:
            self.moment = torch.zeros((len(part), size, size), dtype=dtype, device=device)
        if len(columns) == size:
            self.moment += part
        else:
            index = torch.tensor(columns, device=device)
            self.moment[:, index[:, None], index] += part

    @in_full_precision
    def add_plain_gradient(self, use: Use, inputs: Tensor, output_grad: Tensor) -> None:
        """Keep what is needed to compare the gradient in ``.grad`` with ΔZᵀX."""
        plain = layers.weight_gradient(use.layer, inputs, output_grad)
        squared = output_grad.to(plain.dtype).square().sum()
        self.plain_gradient = plain if self.plain_gradient is None else self.plain_gradient + plain
        self.squared_output_grads = squared + (0 if self.squared_output_grads is None else self.squared_output_grads)

    def columns_of(self, use: Use) -> list[int]:
        """The columns of the input matrix that the use fills: the features, and the 1 of its own bias."""
        columns = list(range(self.features))
        if use.bias is not None:
            columns += [self.features + place for place, bias in enumerate(self.biases) if bias is use.bias]
        return columns

    def mark_accumulated(self) -> None:
        """Remember the gradients as the backward pass left them."""
        self.accumulated = [(parameter, GradMark.of(parameter.grad)) for parameter in self.members]

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
        return not self.edited and bool(marks) and all(m.holds(p.grad) for p, m in marks if p.grad is not None)
