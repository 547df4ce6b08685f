"""One call of a layer, and the samples that entered the model for it."""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from consequent.capture.torch_internals import version_of
from consequent.engines.gpu.streams import event_in_graph
from consequent.layers import Operation
from consequent.layers.joint import Part


@dataclass(eq=False, slots=True)
class Entry:
    """Samples entering the model: one outermost call of it or of a part of it.

    Attributes:
        module: what was called.
        samples: the leading dimension of the first tensor that entered, unless a layer knows better.
        elements: of that tensor.
        address: of its memory.
        thread: that called.
        is_counted_by_layer: whether one does: its samples are elsewhere, or it is a single one.
        builds_graph: whether the call builds autograd's graph.
        nodes: weak references to a few of the graph's nodes that came about in it.
        input_shape: of the first tensor that entered; None where a layer was called by itself or it has none.
        positions: of how many of the outputs' positions the loss is a mean, where their gradient is that of one.
        has_mean_over_elements: whether the outputs went into a loss that is a mean over all of their elements.
        is_behind_products: whether the outputs came to the loss by another network, or other products, alone.
        has_sum: whether the loss is a sum over samples, by its graph.
        has_scaled_sum: whether it is a multiple of one, by a number that is not known.
        counted: of how many samples, or positions, it is a mean, where that is known to be fewer than there are.
        output_shape: of the first tensor that came out, once it has.
        loss_divisors: what the calls of a criterion since then divided by, where one is watched.
    """

    module: nn.Module
    samples: int
    elements: int
    address: int = -1
    thread: int = field(default_factory=threading.get_ident)
    is_counted_by_layer: bool = False
    builds_graph: bool = field(default_factory=torch.is_grad_enabled)
    nodes: "list[weakref.ref[Any]]" = field(default_factory=list)
    input_shape: tuple[int, ...] | None = None
    positions: int | None = None
    has_mean_over_elements: bool = False
    is_behind_products: bool = False
    has_sum: bool = False
    has_scaled_sum: bool = False
    counted: int | None = None
    output_shape: tuple[int, ...] | None = None
    loss_divisors: list[SupportsFloat] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Use:
    """One call of a layer, for one correction.

    Attributes:
        layer: the module.
        operation: what it did: its geometry at the call.
        weight: as the optimiser holds it.
        bias: likewise; None also where it is not trained.
        trains_weight: otherwise only the bias is trained.
        entry: through which the samples came.
        rows: of the inputs, N × positions in the paper's words.
        dtype: of the outputs: what the product was computed in.
        samples: the layer's inputs had, by their leading dimension.
        output_shape: of the layer's outputs, if these are not canonical.
        inputs: canonical ones, once the backward pass was there; None where the weight is not trained.
        output_grad: ΔZ, likewise.
        plain_grads: of the weight and the bias, where they were computed with the gradient of the inputs although they
            are going to be replaced: on the feature side, of convolutions, for which that is cheaper.
        address: of the inputs in the forward pass.
        recomputed_in: the backward pass in which the call was made, if it was (reentrant checkpointing).
        inputs_version: how often the inputs had been written to when the backward pass was there.
        inputs_there: in a CUDA graph, when the inputs are computed.
        output_grad_there: likewise, of ΔZ.
    """

    layer: nn.Module
    operation: Operation
    weight: Tensor
    bias: Tensor | None
    trains_weight: bool
    entry: Entry
    rows: int
    dtype: torch.dtype
    samples: int = 0
    output_shape: tuple[int, ...] | None = None
    address: int = -1
    recomputed_in: int = -1
    inputs: Tensor | None = None
    inputs_version: int = -1
    output_grad: Tensor | None = None
    plain_grads: tuple[Tensor, Tensor | None] | None = None
    inputs_there: torch.cuda.Event | None = None
    output_grad_there: torch.cuda.Event | None = None

    @property
    def key(self) -> Tensor:
        """The parameter whose ``.grad`` shows whether the use is in the gradient: the weight, if it is trained."""
        if self.trains_weight:
            return self.weight
        assert self.bias is not None
        return self.bias

    @property
    def features(self) -> int:
        """Columns of the inputs that meet the weight, per group; none where only the bias is trained."""
        return self.operation.features if self.trains_weight else 0

    @property
    def gains_from_plain_grads(self) -> bool:
        """Whether the plain gradients are cheaper with that of the inputs, and are needed to be replaced."""
        if self.operation.is_dense or self.operation.is_sparse or not self.trains_weight:
            return False
        return self.rows >= self.operation.features + (self.bias is not None)

    @property
    def inputs_stayed(self) -> bool:
        """Whether the inputs lie where the forward pass had them: neither recomputed nor brought back."""
        return self.inputs is not None and not self.inputs.is_sparse and self.inputs.data_ptr() == self.address

    def take(self, inputs: Tensor | None, output_grad: Tensor) -> None:
        """The backward pass is at the call.

        Args:
            inputs: canonical ones; None where only the bias is trained.
            output_grad: ΔZ.
        """
        if inputs is not None:
            self.inputs, self.inputs_version = inputs.detach(), version_of(inputs)
        self.output_grad = output_grad.detach()
        if self.inputs_there is not None:  # otherwise there was no CUDA graph, and nobody asks
            self.output_grad_there = event_in_graph()
            if not self.inputs_stayed:
                self.inputs_there = self.output_grad_there

    def let_go(self) -> None:
        """Inputs and output gradients are not needed any more."""
        self.inputs = self.output_grad = self.plain_grads = None

    def refuse_overwritten_inputs(self) -> None:
        """Raise if somebody wrote to the inputs since the backward pass: the correction still needs them."""
        if self.inputs is not None and version_of(self.inputs) != self.inputs_version:
            raise RuntimeError(
                f"the inputs of {self.layer} were overwritten between backward() and step(), which corrects with them; "
                "fill the buffer with the next batch after optimizer.step(), and give each micro-batch one of its own"
            )


@dataclass(eq=False, slots=True)
class JointUse(Use):
    """One call of a unit of several parameters (:mod:`consequent.layers.joint`).

    Its weight is the unit's first parameter, by which the unit is known. There is no ΔZ.

    Attributes:
        parameters: the unit's; None where they are not corrected.
        parts: the products with them.
        met: rows of each of the unit's inputs, ``[rows, features]``, once the backward pass was there.
        grads: plain ones of the parameters, from one backward pass.
    """

    parameters: tuple[Tensor | None, ...] = ()
    parts: tuple[Part, ...] = ()
    met: tuple[Tensor, ...] = ()
    grads: tuple[Tensor | None, ...] = ()

    @property
    def key(self) -> Tensor:
        """The first parameter that is trained."""
        return next(parameter for parameter in self.parameters if parameter is not None)

    def take(self, inputs: Tensor | None, output_grad: Tensor) -> None:
        """What was met is known already."""

    def let_go(self) -> None:
        """What was met is not needed any more."""
        self.met = self.grads = ()
