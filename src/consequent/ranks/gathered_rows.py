"""All ranks' rows of a weight, gathered: its inputs, and on the sample side its output gradients."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from consequent.capture.capture import Capture
from consequent.capture.records import Record
from consequent.capture.torch_internals import version_of
from consequent.capture.use import Entry, Use
from consequent.layers import Operation
from consequent.ranks.announcements import Shape, by_shape, elements
from consequent.ranks.plans import Plan, longest
from consequent.ranks.process_group import Ranks
from consequent.ranks.traffic import in_buckets
from consequent.statistics.moment import Moment, moment_of


class Gathering:
    """Gathers them.

    Args:
        capture: this rank's layers.
        ranks: all ranks.
    """

    def __init__(self, capture: Capture, ranks: Ranks) -> None:
        self._capture = capture
        self._ranks = ranks

    def start(self, plans: list[Plan]) -> list[Callable[[], None]]:
        """Start to gather all ranks' inputs, and on the sample side their output gradients, several weights at once."""
        buckets = in_buckets(
            plans,
            lambda plan: longest(plan.blocks, self._ranks.size, *plan.gathers),
            lambda plan: (plan.dtype, plan.weight.device),
        )
        return [self._start_gather(bucket) for bucket in buckets]

    def _start_gather(self, plans: list[Plan]) -> Callable[[], None]:
        lengths = [
            sum(
                elements(b, kind)
                for plan in plans
                for its in plan.blocks.values()
                for b in its[rank]
                for kind in plan.gathers
            )
            for rank in range(self._ranks.size)
        ]
        mine = torch.zeros(max(lengths), dtype=plans[0].dtype, device=plans[0].weight.device)
        parts = [part for plan in plans for part in self._own_parts(plan)]
        if parts:
            torch.cat(parts, out=mine[: lengths[self._ranks.rank]])
        everyones = mine.new_empty(self._ranks.size * len(mine))
        work = self._ranks.start_gather(everyones, mine)

        def finish() -> None:
            work.wait()
            places = [0] * self._ranks.size
            for plan in plans:
                self._take_gathered(plan, everyones.view(self._ranks.size, -1), places)

        return finish

    def _own_parts(self, plan: Plan) -> list[Tensor]:
        """What this rank sends, as the other ranks expect it by its shapes."""
        parts = []
        for name in plan.names:
            layer = self._capture.layers[name]
            uses = [use for use in plan.record.uses if use.layer is layer and use.output_grad is not None]
            for shape, same in by_shape(uses).items():
                parts += [_flat(same, shape, kind, plan.dtype) for kind in plan.gathers if getattr(shape, kind)]
        return parts

    def _take_gathered(self, plan: Plan, everyones: Tensor, places: list[int]) -> None:
        """Let all ranks' rows be the record's.

        Args:
            plan: of the record.
            everyones: ``[ranks, numbers]``.
            places: where each rank's numbers for this record begin; moved on to where they end.
        """
        uses: list[Use] = []
        record, first = plan.record, plan.record.first_use
        for name in plan.names:
            layer = self._capture.layers[name]
            found: dict[Shape, dict[str, list[Tensor]]] = {}
            for rank, blocks in enumerate(plan.blocks[name]):
                for block in blocks:
                    parts = found.setdefault(block.shape, {kind: [] for kind in plan.gathers})
                    for kind in plan.gathers:
                        size, shape = elements(block, kind), getattr(block.shape, kind)
                        numbers = everyones[rank, places[rank] : places[rank] + size]
                        places[rank] += size
                        if shape:
                            parts[kind].append(numbers.view(block.samples, *shape))
            bias = self._capture.parameters_of(layer)[1]
            bias = bias if any(bias is one for one in record.biases) else None
            for shape, parts in found.items():
                tensors = {kind: _joined(parts[kind]) for kind in plan.gathers}
                uses.append(self._gathered_use(layer, shape.operation, record, bias, tensors))
        if plan.choice == "rows":
            record.statistic = replace(record.captured, uses=tuple(uses))
            return
        matrix = moment_of(uses, record.features, record.biases)
        record.statistic = Moment((first,), record.features, record.biases, plan.rows, matrix)

    def _gathered_use(
        self,
        layer: nn.Module,
        operation: Operation,
        record: Record,
        bias: Tensor | None,
        tensors: dict[str, Tensor | None],
    ) -> Use:
        inputs, output_grad = tensors["inputs"], tensors.get("outputs")
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor is not None)
        rows = 0 if output_grad is None else operation.rows(output_grad)
        use = Use(layer, operation, record.weight, bias, record.features > 0, Entry(layer, 0, 0), rows, dtype)
        use.inputs, use.inputs_version = inputs, -1 if inputs is None else version_of(inputs)
        if output_grad is not None:
            # The wrapper averages gradients over ranks, and so divides them by their number. Any other factor is found
            # by comparing with the gradient, which costs more. So is this one in half precision, where it would round.
            use.output_grad = output_grad.mul_(1 / self._ranks.size) if dtype.itemsize >= 4 else output_grad
        return use


def _flat(uses: list[Use], shape: Shape, kind: str, dtype: torch.dtype) -> Tensor:
    tensors = [use.inputs if kind == "inputs" else use.output_grad for use in uses]
    like = getattr(shape, kind)
    return torch.cat([tensor.reshape(-1, *like).to(dtype) for tensor in tensors if tensor is not None]).flatten()


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None
