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

from consequent.capture.torch_internals import apply_of, backward_pass_id, will_run
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import Entry, JointUse, Use
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

    __slots__ = ("_corrector", "_products", "_transposed", "_versions", "_was_run", "held", "leaves")

    def __init__(
        self, corrector: "weakref.ref[BackwardCorrector]", leaves: tuple[Tensor, ...], held: tuple[Tensor, ...]
    ) -> None:
        self._corrector = corrector
        self.leaves = leaves
        self.held = held  # as the optimiser holds them
        self._was_run = False
        self._versions = [leaf._version for leaf in leaves]
        self._products: dict[int, list[Reached]] = {}
        self._transposed: dict[int, Tensor] = {}

    @property
    def corrector(self) -> "BackwardCorrector | None":
        """Whose it is, as long as that exists."""
        return self._corrector()

    def is_for(self, leaves: tuple[Tensor, ...]) -> bool:
        """Whether it is one for these parameters still; not if a pass ran through it, or they were written to."""
        if self._was_run or len(leaves) != len(self.leaves):
            return False
        for known, leaf, version in zip(self.leaves, leaves, self._versions, strict=True):
            if known is not leaf or leaf._version != version:
                return False
        return True

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
        arrived: dict[Tensor, Tensor] = {}
        for leaf, grad in zip(self.held, grads, strict=True):
            if grad is not None:
                arrived[leaf] = grad
        return Gathered(self._products.pop(now, []), self._transposed.pop(now, None), arrived)


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gate = gate
        aliases = tuple([leaf.detach() for leaf in leaves])
        return aliases if len(aliases) > 1 else aliases[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gate: Gate = ctx.gate
        gathered = gate.gather(grads)
        corrector = gate.corrector
        new = {} if corrector is None else corrector.solve(gate, gathered, [node for node, _ in ctx.next_functions])
        return (None, *[new.get(parameter) for parameter in gate.held]) if new else (None,) * (1 + len(gate.held))


class _UncompiledGateFunction(_GateFunction):
    """The same for layers that are called from compiled code, where the backward pass may be compiled, too."""

    backward = staticmethod(_GateFunction.backward)


leave_uncompiled(__name__, "backward", of_class="_UncompiledGateFunction")

_apply_gate, _apply_uncompiled_gate = apply_of(_GateFunction), apply_of(_UncompiledGateFunction)


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
        self._gates: dict[int, tuple[Gate, tuple[Tensor, ...]]] = {}  # by the weight's id, with the stand-ins
        self._biases: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by its id: the weight, those of the layers with it
        self._self = weakref.ref(self)
        self._open: list[Entry] = []  # whose backward pass may come
        self._divisors: dict[int, float] = {}  # of the last passes
        self._reached: dict[int, set[Entry]] = {}  # by the last passes

    # ---- what products say ------------------------------------------------------------------------------------------

    def before_product(
        self, use: Use, weight: Tensor, bias: Tensor | None, *, is_compiled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Stand-ins for the parameters that are corrected, behind which is their gate."""
        known = self._gate_of(use, *self._parameters(use, weight, bias), is_compiled=is_compiled)
        stand_ins = known[1]
        if use.trains_weight:
            weight = stand_ins[0]
        if use.bias is not None:
            for parameter, stand_in in zip(known[0].held, stand_ins, strict=True):
                if parameter is use.bias:
                    bias = stand_in
        return weight, bias

    def before_joint(self, use: JointUse, parameters: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Stand-ins for a unit's parameters, behind which is their gate."""
        leaves = tuple(parameter for parameter in parameters if parameter is not None)
        stand_ins = iter(self._gate_of(use, leaves, leaves, is_compiled=True)[1])
        return tuple(None if parameter is None else next(stand_ins) for parameter in parameters)

    def joint_left_plain(self, use: Use) -> None:
        """Nothing is kept of it."""

    def _gate_of(
        self, use: Use, held: tuple[Tensor, ...], leaves: tuple[Tensor, ...], *, is_compiled: bool
    ) -> tuple[Gate, tuple[Tensor, ...]]:
        """The gate, and the stand-ins before it, of parameters: as the optimiser holds them, and as the layer does."""
        known = self._gates.get(id(use.weight))
        if known is None or not known[0].is_for(leaves):
            gate = Gate(self._self, leaves, held)
            outputs = (_apply_uncompiled_gate if is_compiled else _apply_gate)(gate, *leaves)
            known = self._gates[id(use.weight)] = gate, outputs if isinstance(outputs, tuple) else (outputs,)
        return known

    def _parameters(
        self, use: Use, weight: Tensor, bias: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The weight, if it is trained, and its biases: as the optimiser holds them, and as the layer has them.

        Other layers with this weight may have biases of their own.
        """
        known = self._biases.get(id(use.weight))
        others = () if known is None or known[0] is not use.weight else known[1]
        if use.trains_weight and (not others or (len(others) == 1 and others[0] is use.bias)):  # as usual
            if use.bias is None or bias is None:
                return (use.weight, *others), (weight, *others)
            return (use.weight, use.bias), (weight, bias)
        leaves = {use.weight: weight} if use.trains_weight else {}
        for other in others:
            leaves[other] = bias if other is use.bias and bias is not None else other
        if use.bias is not None and bias is not None:
            leaves[use.bias] = bias
        return tuple(leaves), tuple(leaves.values())

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
        if gathered.products:
            weight = id(gathered.products[0].use.weight)
            known = self._gates.get(weight)
            if known is not None and known[0] is gate:
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
        self._biases = {id(weight): (weight, its) for weight, its in biases.items()}
        self._gates = {key: gate for key, gate in self._gates.items() if key in self._biases}

    def remove(self) -> None:
        """Forget everything."""
        self._gates, self._open = {}, []


def _last(passes: dict[int, Any]) -> None:
    """Keep the last passes only; one may run inside of another."""
    while len(passes) > MOST_PASSES:
        passes.pop(next(iter(passes)))


def _takes_part(entry: Entry) -> bool:
    return any(will_run(node()) for node in entry.nodes)
