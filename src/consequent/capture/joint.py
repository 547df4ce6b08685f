"""Modules with several products inside that are watched: a node of autograd's graph behind all parameters of a unit.

It hands the parameters on as they are. The backward pass comes to it with their plain gradients from this one call, and
then it tells the listeners of these and of what the parameters have met (:mod:`consequent.layers.joint`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from consequent.capture.product import Apply
from consequent.capture.samples import outputs_in
from consequent.capture.torch_internals import apply_of, transforms_are_active, will_run
from consequent.capture.uncompiled import leave_uncompiled
from consequent.capture.use import Entry, JointUse
from consequent.layers import Joint, joint_of
from consequent.layers.joint import Unit

if TYPE_CHECKING:
    from consequent.capture.capture import Capture

TWICE = "its gradient was differentiated in turn (create_graph=True), which is not corrected"


class JointWatch:
    """Who watches a module, and what its calls become."""

    __slots__ = ("captures", "kind", "layer")

    def __init__(self, layer: nn.Module, captures: "tuple[Capture, ...]") -> None:
        kind = joint_of(layer)
        assert kind is not None
        self.layer = layer
        self.captures = captures
        self.kind: type[Joint] = kind

    def called(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Apply) -> Any:
        """What the module computes, with nodes of ours behind its parameters if somebody wants to know of them.

        Args:
            plain: the ``forward`` of its class.
            args: of the call.
            kwargs: likewise.
        """
        layer = self.layer
        if transforms_are_active():
            return plain(layer, *args, **kwargs)
        if not torch.is_grad_enabled():
            for capture in self.captures:
                capture.entries.called_without_graph()
            return plain(layer, *args, **kwargs)
        with _Looking(self) as looking:
            outputs = plain(layer, *args, **kwargs)
        if not looking.saw_product:
            for capture in self.captures:
                capture.misbehaving[layer] = "its forward does not use its weights as they are"
        first = outputs_in(outputs)
        for entry in looking.entries:
            if entry.module is layer and first is not None:
                entry.output_shape = tuple(first.shape)
        return outputs


class _Looking(TorchFunctionMode):
    """Inside of a module's ``forward``: what torch computes with its parameters becomes ours."""

    def __init__(self, watch: JointWatch) -> None:
        super().__init__()
        self._watch = watch
        self.saw_product = False
        self.entries: set[Entry] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = self._watch.kind.call(self._watch.layer, func, args, kwargs, self._enter)
        if outputs is None:
            return func(*args, **kwargs)
        self.saw_product = True
        return outputs

    def _enter(self, inputs: Sequence[Tensor], units: Sequence[Unit], samples: int, leads: bool) -> "Entering":
        entering = Entering(self._watch, inputs, units, samples, leads)
        self.entries |= {use.entry for _, use in entering.uses}
        return entering


class Entering:
    """Units whose parameters are about to be used.

    Args:
        watch: of the module.
        inputs: of the module, or of a part of it.
        units: whose parameters meet these.
        samples: how many the inputs have.
        leads: whether they are in the leading dimension.

    Attributes:
        inputs: what is to be used in place of the inputs: one that has a gradient goes through the node, which so sees
            whether that is differentiated in turn.
        parameters: likewise, of each unit.
    """

    def __init__(
        self, watch: JointWatch, inputs: Sequence[Tensor], units: Sequence[Unit], samples: int, leads: bool
    ) -> None:
        self.inputs = tuple(inputs)
        self.parameters = [unit.parameters for unit in units]
        self._calls = [_Call(unit) for unit in units]
        for call, unit in zip(self._calls, units, strict=True):
            for capture in watch.captures:
                use = capture.joint_use_of(watch.layer, unit, inputs[0], samples, leads=leads)
                if use is None:
                    continue
                call.uses.append((capture, use))
                if capture.listener.replaces_gradients:
                    stand_ins = capture.listener.before_joint(use, use.parameters)
                    call.take([a if b is None else b for a, b in zip(call.given, stand_ins, strict=True)])
        if self.uses:
            self._apply()

    def _apply(self) -> None:
        """Put the node behind all that has a gradient."""
        slots: list[tuple[int, int]] = [(-1, place) for place, x in enumerate(self.inputs) if x.requires_grad]
        for number, call in enumerate(self._calls):
            slots += [(number, place) for place, p in enumerate(call.given) if p is not None and p.requires_grad]
        tensors = [self.inputs[place] if of < 0 else self._calls[of].given[place] for of, place in slots]
        aliases = _apply_node(_Calls(self._calls, slots), *tensors)
        aliases = aliases if isinstance(aliases, tuple) else (aliases,)
        inputs, given = list(self.inputs), [list(call.given) for call in self._calls]
        for (of, place), alias in zip(slots, aliases, strict=True):
            (inputs if of < 0 else given[of])[place] = alias
        self.inputs, self.parameters = tuple(inputs), [tuple(its) for its in given]
        for capture, use in self.uses:
            if capture.listener.replaces_gradients:
                capture.listener.after_product(use, aliases[0])

    @property
    def uses(self) -> "list[tuple[Capture, JointUse]]":
        """Those of all units, and who is told of them."""
        return [pair for call in self._calls for pair in call.uses]

    @torch.no_grad()
    def met(self, unit: int, rows: Callable[[], Sequence[Tensor]]) -> None:
        """What the unit's parameters have met, ``[rows, features]`` of each of its inputs."""
        call = self._calls[unit]
        if call.uses:
            call.met = tuple(rows())
            for _, use in call.uses:
                use.rows, use.dtype = len(call.met[0]), call.met[0].dtype


class _Call:
    """One unit's part in a call.

    Attributes:
        given: its parameters, or what stands for them.
        uses: who is told, and of which use.
        met: what the parameters have met.
    """

    __slots__ = ("given", "met", "uses")

    def __init__(self, unit: Unit) -> None:
        self.given: list[Tensor | None] = list(unit.parameters)
        self.uses: list[tuple[Capture, JointUse]] = []
        self.met: tuple[Tensor, ...] = ()

    def take(self, given: list[Tensor | None]) -> None:
        """Something else stands for the parameters now."""
        self.given = given

    def reached(self, gradients: list[Tensor | None], nodes: list[Any]) -> list[Tensor | None]:
        """The backward pass is there.

        Args:
            gradients: plain ones of the unit's parameters.
            nodes: to which they go in the graph.

        Returns:
            what is handed on to these.
        """
        handed = gradients
        runs = [gradient is not None and will_run(node) for gradient, node in zip(gradients, nodes, strict=True)]
        for capture, use in self.uses:
            if use.layer in capture.misbehaving:
                continue
            mine = [at for at, p in enumerate(use.parameters) if p is not None and runs[at]]
            if not mine:
                continue
            use.met = self.met
            use.grads = tuple(g.detach() if g is not None and at in mine else None for at, g in enumerate(gradients))
            first = gradients[mine[0]]
            assert first is not None
            capture.listener.product_reached(use, None, first, nodes[mine[0]])
            if capture.listener.replaces_gradients:
                handed = [None if at in mine else gradient for at, gradient in enumerate(handed)]
                continue
            for at in mine:
                gradient, parameter = gradients[at], use.parameters[at]
                assert gradient is not None
                assert parameter is not None
                capture.listener.gradient_returned(use, parameter, gradient, nodes[at])
        return handed

    def leave_plain(self) -> None:
        """What cannot be corrected is told of, and stays as it is."""
        for capture, use in self.uses:
            capture.misbehaving[use.layer] = TWICE
            capture.listener.joint_left_plain(use)


class _Calls:
    """All units of a call, and which of the node's tensors is what."""

    __slots__ = ("calls", "slots")

    def __init__(self, calls: list[_Call], slots: list[tuple[int, int]]) -> None:
        self.calls = calls
        self.slots = slots  # the unit, -1 for an input, and the place among its parameters

    def reached(self, grads: Sequence[Tensor | None], nodes: Sequence[Any]) -> list[Tensor | None]:
        """The backward pass is there, with gradients of all of the node's tensors."""
        handed = list(grads)
        for number, call in enumerate(self.calls):
            if torch.is_grad_enabled():
                call.leave_plain()
                continue
            gradients: list[Tensor | None] = [None] * len(call.given)
            next_nodes: list[Any] = [None] * len(call.given)
            mine = [(at, place) for at, (of, place) in enumerate(self.slots) if of == number]
            for at, place in mine:
                gradients[place], next_nodes[place] = grads[at], nodes[at]
            new = call.reached(gradients, next_nodes)
            for at, place in mine:
                handed[at] = new[place]
        return handed


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: _Calls, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.calls = calls
        aliases = tuple([tensor.detach() for tensor in tensors])
        return aliases if len(aliases) > 1 else aliases[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.calls.reached(grads, [node for node, _ in ctx.next_functions]))


leave_uncompiled(__name__, "backward", of_class="_Node")  # the module may be called from compiled code

_apply_node = apply_of(_Node)
