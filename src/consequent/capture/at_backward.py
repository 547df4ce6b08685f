"""``at="backward"``: a weight's gradient is replaced where autograd computes it, in every backward pass by itself.

Each weight gets a node of its own in the graph, behind all products with it. The products hand in their inputs and
output gradients instead of a gradient; the node, which the engine runs when all of them have done so, solves with these
and hands the consequentialist gradient on to ``.grad``. The plain one is never computed.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from consequent.capture.torch_internals import apply_of, backward_pass_id, version_of, will_run
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import Entry, Use
from consequent.maths.damping import Damping

# Forward passes whose backward pass has not come yet; more are forgotten.
MOST_ENTRIES = 256
MOST_PASSES = 16  # inside of each other (reentrant checkpointing)


class Reached(NamedTuple):
    """A product that the running pass went through."""

    use: Use
    inputs: Tensor | None
    output_grad: Tensor


class Gathered(NamedTuple):
    """All that a pass says of one weight.

    Attributes:
        products: those with the weight.
        transposed: a bound of its action in ``Wᵀ ΔZ``, if it had one.
        arrived: gradients of the weight and its biases that came otherwise than from products.
    """

    products: list[Reached]
    transposed: Tensor | None
    arrived: dict[Tensor, Tensor]


class Gate:
    """A weight and its biases in the graphs of all forward passes since a backward pass last ran through it.

    The graph refers to it. So it refers neither to the graph nor to its corrector, which does: such circles, half of
    them in C++, Python's garbage collector would not find.
    """

    def __init__(self, corrector: "BackwardCorrector", leaves: tuple[Tensor, ...], held: tuple[Tensor, ...]) -> None:
        self._corrector = weakref.ref(corrector)
        self.leaves = leaves
        self.held = held  # as the optimiser holds them
        self._was_run = False
        self._versions = list(map(version_of, leaves))
        self._products: dict[int, list[Reached]] = {}
        self._transposed: dict[int, Tensor] = {}

    @property
    def corrector(self) -> "BackwardCorrector | None":
        """Whose it is, as long as that exists."""
        return self._corrector()

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """For each parameter what products are to be computed with: the same numbers, behind a node of the graph."""
        outputs = _apply_gate(self, *self.leaves)
        return dict(zip(self.held, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))

    @property
    def is_over(self) -> bool:
        """Whether a backward pass ran through it, or the parameters were written to: forward passes need another."""
        return self._was_run or list(map(version_of, self.leaves)) != self._versions

    def reach(self, product: Reached) -> None:
        """A product hands in what it knows."""
        now = backward_pass_id()
        if len(self._products) > MOST_PASSES:
            self._products.clear()  # of passes that raised
        self._products.setdefault(now, []).append(product)

    def reach_transposed(self, bound: Tensor) -> None:
        """The weight acts in ``Wᵀ ΔZ``, too."""
        now = backward_pass_id()
        known = self._transposed.get(now)
        self._transposed = {now: bound if known is None else known + bound}

    def gather(self, grads: tuple[Tensor | None, ...]) -> Gathered:
        """The node is run: all products of the pass have handed in theirs."""
        self._was_run = True
        now = backward_pass_id()
        arrived = {leaf: grad for leaf, grad in zip(self.held, grads, strict=True) if grad is not None}
        return Gathered(self._products.pop(now, []), self._transposed.pop(now, None), arrived)


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gate = gate
        aliases = tuple(leaf.detach() for leaf in leaves)
        return aliases if len(aliases) > 1 else aliases[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gate: Gate = ctx.gate
        gathered = gate.gather(grads)
        corrector = gate.corrector
        new = {} if corrector is None else corrector.solve(gate, gathered, [node for node, _ in ctx.next_functions])
        return (None, *(new.get(parameter) for parameter in gate.held))


leave_uncompiled(__name__, "backward", of_class="_GateFunction")

_apply_gate = apply_of(_GateFunction)


Solve = Callable[[Gathered, Damping, float, Sequence[Node | None]], dict[Tensor, Tensor]]


class BackwardCorrector:
    """Replaces the gradients of weights in every backward pass.

    Args:
        damping_of: λ for a parameter.
        divisor_for: what the loss of a pass is divided by, from the entries that take part in it.
        solve: from what was gathered, λ, that divisor and the nodes to which the gradients go, to the new gradients;
            none for those that come later.
    """

    replaces_gradients = True

    def __init__(
        self, damping_of: Callable[[Tensor], Damping], divisor_for: Callable[[set[Entry]], float], solve: Solve
    ) -> None:
        self._damping_of = damping_of
        self._divisor_for = divisor_for
        self._solve = solve
        self._gates: dict[Tensor, tuple[Gate, dict[Tensor, Tensor]]] = {}  # by weight, with the stand-ins
        self._biases: dict[Tensor, list[Tensor]] = {}  # of the layers with each weight
        self._open: list[Entry] = []  # whose backward pass may come
        self._divisors: dict[int, float] = {}  # of the last passes
        self._reached: dict[int, set[Entry]] = {}  # by the last passes

    # ---- what products say ------------------------------------------------------------------------------------------

    def before_product(self, use: Use, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Stand-ins for the parameters that are corrected, behind which is their gate."""
        leaves = {use.weight: weight} if use.trains_weight else {}
        for held in self._biases.get(use.weight, ()):  # other layers with this weight may have biases of their own
            leaves[held] = bias if held is use.bias and bias is not None else held
        if use.bias is not None and bias is not None:
            leaves[use.bias] = bias
        known = self._gates.get(use.weight)
        if known is None or known[0].is_over or not _are_same(known[0].leaves, tuple(leaves.values())):
            gate = Gate(self, tuple(leaves.values()), tuple(leaves))
            known = self._gates[use.weight] = gate, gate.stand_ins()
        stand_ins = known[1]
        if use.trains_weight:
            weight = stand_ins[use.weight]
        if use.bias is not None:
            bias = stand_ins[use.bias]
        return weight, bias

    def after_product(self, use: Use, outputs: Tensor) -> None:
        """Remember by which node it can be told whether a pass goes through this forward pass."""
        entry = use.entry
        if not entry.nodes:
            self._open = [*self._open[-MOST_ENTRIES:], entry]
        entry.nodes.append(weakref.ref(outputs.grad_fn))

    def product_reached(self, use: Use, inputs: Tensor | None, output_grad: Tensor, node: Node) -> None:
        """ΔZ is known."""
        gate: Gate | None = getattr(node, "gate", None)
        if gate is not None and gate.corrector is self:
            gate.reach(Reached(use, inputs, output_grad))
            self._note(use.entry)

    def transpose_reached(self, use: Use, output_grad: Tensor, weight_grad: Tensor, node: Node) -> None:
        """The weight acts in ``Wᵀ ΔZ``, too."""
        gate: Gate | None = getattr(node, "gate", None)
        if gate is not None and gate.corrector is self:
            gate.reach_transposed(use.operation.transposed_norm(output_grad.detach()))

    def gradient_returned(self, use: Use, parameter: Tensor, gradient: Tensor, node: Node | None) -> None:
        """Does not happen: products return none."""

    def _note(self, entry: Entry) -> None:
        """The running pass goes through a product of this entry; of the node it starts at, torch would not say so."""
        _last(self._reached)
        self._reached.setdefault(backward_pass_id(), set()).add(entry)

    # ---- solving ----------------------------------------------------------------------------------------------------

    def solve(self, gate: Gate, gathered: Gathered, accumulators: Sequence[Node | None]) -> dict[Tensor, Tensor]:
        """New gradients, by parameter. The gate is over, and its graph need not be kept."""
        for weight in [weight for weight, (known, _) in self._gates.items() if known is gate]:
            del self._gates[weight]
        if not gathered.products:
            return gathered.arrived
        key = gathered.products[0].use.key
        return self._solve(gathered, self._damping_of(key), self._divisor(), accumulators)

    def _divisor(self) -> float:
        """What the running pass's loss was divided by; the same for all layers."""
        now = backward_pass_id()
        if now not in self._divisors:
            taking_part = {entry for entry in self._open if _takes_part(entry)} | self._reached.get(now, set())
            _last(self._divisors)
            self._divisors[now] = self._divisor_for(taking_part)
        return self._divisors[now]

    # ---- between passes ---------------------------------------------------------------------------------------------

    def before_entry(self) -> None:
        """Forget forward passes whose graphs are gone."""
        self._open = [entry for entry in self._open if any(node() is not None for node in entry.nodes)]

    def correct_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on."""
        self._gates = {weight: gate for weight, gate in self._gates.items() if weight in biases}
        self._biases = biases

    def remove(self) -> None:
        """Forget everything."""
        self._gates, self._open = {}, []


def _last(passes: dict[int, Any]) -> None:
    """Keep the last passes only; one may run inside of another."""
    while len(passes) > MOST_PASSES:
        passes.pop(next(iter(passes)))


def _takes_part(entry: Entry) -> bool:
    return any(will_run(node()) for node in entry.nodes)


def _are_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
