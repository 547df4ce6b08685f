"""A model that is watched: its layers, the parameters that are corrected, and the samples that enter it."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consequent.capture.entry_hooks import EntryHook, drop_inert_hooks
from consequent.capture.layer_parameters import LayerParameters
from consequent.capture.product import Listener
from consequent.capture.samples import Entries
from consequent.capture.torch_internals import backward_pass_id, running_node
from consequent.capture.uncompiled import mark_uncompiled_functions
from consequent.capture.use import JointUse, Use
from consequent.capture.watched import unwatch, watch
from consequent.engines.gpu.compiled_ahead import compile_ahead
from consequent.engines.gpu.streams import event_in_graph
from consequent.layers import Operation, joint_of
from consequent.layers.joint import Unit
from consequent.layers.linear import Linear
from consequent.ranks.sharded_tensors import is_sharded


class Corrector(Listener, Protocol):
    """What a capture hands its uses to: the two ways of correcting, at the step and in the backward pass."""

    def before_entry(self) -> None:
        """Samples are about to enter the model, outside of any backward pass."""

    def correct_only(self, biases: dict[Tensor, list[Tensor]]) -> None:
        """Only these weights are corrected from now on.

        Args:
            biases: of the layers with each weight, those that are corrected.
        """

    def remove(self) -> None:
        """The model is not watched any more."""


class Capture:
    """Watches a model's layers.

    Args:
        model: the whole model.
        named_layers: those of its layers that are corrected.
        wants: whether a parameter is to be corrected.
        listener: who is told of backward passes.
        before_entry: called when samples are about to enter the model.
    """

    def __init__(
        self,
        model: nn.Module,
        named_layers: Mapping[str, nn.Module],
        *,
        wants: Callable[[Tensor], bool],
        listener: Corrector,
        before_entry: Callable[[], None],
    ) -> None:
        mark_uncompiled_functions()
        self.model = model
        self.wants = wants
        self.listener = listener
        self.misbehaving: dict[nn.Module, str] = {}  # layers that are no matrix products of their own any more
        self.is_installed = True
        self.layers: dict[str, nn.Module] = {}
        self.names: dict[nn.Module, str] = {}
        self.parameters_seen = object()  # another one when layers or optimiser may hold other parameters
        self.entries = Entries(model, self._before_entry)
        self._told_before_entry = before_entry
        self._sharded: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}  # what the optimiser holds of sharded layers
        self._parameters: dict[nn.Module, LayerParameters] = {}
        self._containers: set[nn.Module] = set()
        self._recomputed: weakref.WeakKeyDictionary[Any, _Recomputed] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self.extend(named_layers)

    def extend(self, named_layers: Mapping[str, nn.Module]) -> None:
        """Watch the layers that are not watched yet, and forget those that are gone."""
        self.notice_parameters(named_layers)
        wanted = set(named_layers.values())
        for layer in wanted - set(self.layers.values()):
            watch(layer, self)
        for layer in set(self.layers.values()) - wanted:
            unwatch(layer, self)
        self.layers = dict(named_layers)
        self.names = {layer: name for name, layer in named_layers.items()}
        self.misbehaving = {layer: reason for layer, reason in self.misbehaving.items() if layer in self.names}
        self.listener.correct_only(self._biases_by_weight())
        for container in _containers(self.model, wanted) - self._containers:
            drop_inert_hooks(container)
            enter, leave = EntryHook(self.entries.enter), EntryHook(self.entries.leave)
            self._handles.append(container.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(container.register_forward_hook(leave, with_kwargs=True, always_call=True))
            self._containers.add(container)

    def notice_parameters(self, named_layers: Mapping[str, nn.Module]) -> None:
        """Layers or optimiser may hold other ones than before.

        Sharded ones are remembered: during a forward pass others stand in their place.
        """
        self.parameters_seen = object()
        self._parameters.clear()
        for layer in named_layers.values():
            if joint_of(layer) is None and is_sharded(layer.weight):
                self._sharded[layer] = layer.weight, getattr(layer, "bias", None)  # type: ignore[assignment]

    def parameters_of(self, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The layer's weight and bias as the optimiser holds them; of a module with several, the first weight."""
        sharded = self._sharded.get(layer) if self._sharded else None
        if sharded is not None:
            return sharded
        own: Any = layer._parameters
        if "weight" in own and "bias" in own:  # far faster than the layer's attributes
            return own["weight"], own["bias"]
        joint = joint_of(layer)
        if joint is not None:
            weight = joint.parameters(layer)[0][0]
            assert weight is not None
            return weight, None
        return layer.weight, getattr(layer, "bias", None)  # type: ignore[return-value]

    def units_of(self, layer: nn.Module) -> list[list[Tensor]]:
        """The parameters that are solved for together, the one they are known by first, as the optimiser has them."""
        joint = joint_of(layer)
        if joint is not None:
            return [[p for p in unit if p is not None] for unit in joint.parameters(layer)]
        return [[p for p in self.parameters_of(layer) if p is not None]]

    def _biases_by_weight(self) -> dict[Tensor, list[Tensor]]:
        found: dict[Tensor, dict[Tensor, None]] = {}
        for weight, *others in [unit for layer in self.layers.values() for unit in self.units_of(layer)]:
            biases = found.setdefault(weight, {})
            for other in others:
                if other.requires_grad and self.wants(other):
                    biases[other] = None
        return {weight: list(biases) for weight, biases in found.items()}

    def remove(self) -> None:
        """Give the layers their own classes back, take the hooks off the model and forget everything."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers.values():
            unwatch(layer, self)
        self._handles = []
        self.listener.remove()
        self.is_installed = False

    # ---- calls ------------------------------------------------------------------------------------------------------

    def use_of(
        self,
        layer: nn.Module,
        operation: Operation,
        inputs: Tensor,
        samples: int,
        output_shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        has_bias: bool,
    ) -> Use | None:
        """The call of a layer, if something in it is to be corrected.

        Args:
            layer: the layer.
            operation: what it is about to do.
            inputs: as the layer was given them.
            samples: how many these have.
            output_shape: of its outputs, if they are not canonical.
            dtype: in which the product is computed.
            has_bias: whether the layer's bias is added to it there.
        """
        if layer in self.misbehaving or layer not in self.names:
            return None
        parameters = self._parameters.get(layer)
        if parameters is None or not parameters.is_current(layer, self):
            parameters = LayerParameters.of(layer, self)
            if parameters.may_be_kept:
                self._parameters[layer] = parameters
                if parameters.weight is not None:
                    compile_ahead(operation, inputs, dtype, has_bias=has_bias and parameters.bias is not None)
        if parameters.weight is None and (parameters.bias is None or not has_bias):
            return None
        backward_pass, recomputed = backward_pass_id(), None
        if backward_pass != -1:
            recomputed = self._recomputed_by_running_node()
            known = None if recomputed is None else recomputed.next_of(layer, parameters.held_weight)
            if known is not None:
                return known
        use = Use(
            layer,
            operation,
            parameters.held_weight,
            parameters.held_bias if has_bias else None,
            parameters.weight is not None,
            self.entries.entry_for(layer, inputs, samples, output_shape is None or samples > 1),
            0,
            dtype,
            samples,
            output_shape,
            -1,
            backward_pass,
        )
        if inputs.is_cuda:
            use.inputs_there = event_in_graph()
        if recomputed is not None:
            recomputed.add(use)
        return use

    def joint_use_of(
        self, layer: nn.Module, unit: Unit, inputs: Tensor, samples: int, *, leads: bool
    ) -> JointUse | None:
        """The call of one of a module's units, if something in it is to be corrected.

        Args:
            layer: the module.
            unit: of it.
            inputs: as they are about to be used.
            samples: how many these have.
            leads: whether in their leading dimension.
        """
        if layer in self.misbehaving or layer not in self.names:
            return None
        parameters = tuple(p if p is not None and p.requires_grad and self.wants(p) else None for p in unit.parameters)
        weight = unit.parameters[0]
        assert weight is not None
        if all(parameter is None for parameter in parameters):
            return None
        backward_pass, recomputed = backward_pass_id(), None
        if backward_pass != -1:
            recomputed = self._recomputed_by_running_node()
            known = None if recomputed is None else recomputed.next_of(layer, weight)
            if known is not None:
                assert isinstance(known, JointUse)
                return known
        features = sum(unit.features)
        use = JointUse(
            layer,
            Linear(1, features, weight.shape[0], (weight.shape[0], features)),
            weight,
            None,
            parameters[0] is not None,
            self.entries.entry_for(layer, inputs, samples, leads),
            0,
            weight.dtype,
            samples,
            recomputed_in=backward_pass,
            parameters=parameters,
            parts=unit.parts,
        )
        if recomputed is not None:
            recomputed.add(use)
        return use

    def _recomputed_by_running_node(self) -> "_Recomputed | None":
        """What the running node recomputes, if it is one of reentrant checkpointing."""
        node = running_node()
        if node is None:
            return None
        try:
            return self._recomputed.setdefault(node, _Recomputed())
        except TypeError:  # a node that torch does not let us refer to weakly: not that of checkpointing
            return None

    def _before_entry(self) -> None:
        if backward_pass_id() == -1:
            self.listener.before_entry()
        self._told_before_entry()


class _Recomputed:
    """The uses that a node of reentrant checkpointing recomputes, in their order, at every pass through it.

    The second time (``retain_graph``) they are the same uses as the first time.
    """

    def __init__(self) -> None:
        self._uses: dict[nn.Module, list[Use]] = {}
        self._next: dict[nn.Module, int] = {}
        self._pass = -1

    def next_of(self, layer: nn.Module, weight: Tensor) -> Use | None:
        """The use that the next call of the layer is, if it was recomputed before."""
        if self._pass != backward_pass_id():
            self._pass, self._next = backward_pass_id(), {}
        place, uses = self._next.get(layer, 0), self._uses.get(layer, [])
        if place == len(uses) or uses[place].weight is not weight:
            return None
        self._next[layer] = place + 1
        uses[place].recomputed_in = self._pass
        return uses[place]

    def add(self, use: Use) -> None:
        """A use that is recomputed for the first time."""
        place = self._next.get(use.layer, 0)
        self._uses.setdefault(use.layer, [])[place:] = [use]
        self._next[use.layer] = place + 1


def _containers(model: nn.Module, inner: set[nn.Module]) -> set[nn.Module]:
    return {m for m in model.modules() if m not in inner and any(child in inner for child in m.modules())}
