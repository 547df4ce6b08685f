"""What averages do at the steps of one optimiser: when inputs are observed, and the multiplication of ``.grad``.

The map is linear in ``.grad``. So scaling, clipping, accumulated micro-batches and averaging over ranks, whatever of it
has been done before, are exact by themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consequent.averages.average import Average, AveragedLayer
from consequent.averages.family import Family, Observed, families_of
from consequent.averages.gradients import Multiplications
from consequent.averages.observer import add_waiting
from consequent.averages.ranks import add_up
from consequent.gpu.launch import on_device
from consequent.maths.ridge import LossReduction, loss_divisor
from consequent.minibatch.model_forward import ModelForward


class Averages:
    """The averaged layers that one optimiser trains.

    Args:
        layers: the layers.
        model_forward: of the model.
        averaging: β.
        refresh: T.
        loss_reduction: how the loss sums up over samples.
        is_auto: whether layers with fewer rows than features are to have own inputs.

    Attributes:
        layers: that are averaged.
        undecided: those of them that may have own inputs instead.
        steps: so far.
    """

    def __init__(
        self,
        layers: Sequence[AveragedLayer],
        model_forward: ModelForward,
        averaging: float,
        refresh: int,
        loss_reduction: LossReduction,
        *,
        is_auto: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.undecided = list(layers) if is_auto else []
        self.steps = 0
        self._model_forward, self._averaging, self._refresh = model_forward, averaging, refresh
        self._loss_reduction = loss_reduction
        self._families: list[Family] = []
        self._failed: int | Tensor = 0  # of families that are no more
        self._counts = torch.empty(0)  # what the losses of the passes observed so far divide by: of compiled passes,
        self._counted = 0.0  # and of others
        self._is_observing = False
        self._observe_at_once = False
        self._narrow: list[AveragedLayer] = []
        self._multiplications = Multiplications()
        self.observe()

    @property
    def failed(self) -> int | Tensor:
        """How many factorisations failed."""
        return sum((family.failed for family in self._families), self._failed)

    def observe(self, *, at_once: bool = False) -> None:
        """Observe inputs from now on, if the next step is one of those for it, or if it has to be."""
        if self._is_observing or not self.layers or (self.steps % self._refresh and not at_once):
            return
        self._is_observing = True
        self._sort_into_families()
        self._counts, self._counted = torch.zeros((), device=self._families[0].key.device), 0.0
        self._model_forward.counters.append(self._count)
        self._model_forward.builds_graphs = False
        for family in self._families:
            family.observe()
        self._model_forward.hold()

    def _sort_into_families(self) -> None:
        """Unless they are: a model may have been moved."""
        if self._families and not any(family.has_moved() for family in self._families):
            return
        self._failed, self._families = self.failed, families_of(self.layers)

    def stop_observing(self) -> None:
        """Leave the passes alone again."""
        if not self._is_observing:
            return
        self._is_observing = False
        self._model_forward.release()
        self._model_forward.counters.remove(self._count)
        add_waiting([layer.observer for layer in self.layers])
        for family in self._families:
            family.stop()

    def _count(self, samples: int) -> None:
        divisor = loss_divisor(self._loss_reduction, samples)
        if torch.compiler.is_compiling():
            self._counts.add_(divisor)
        else:
            self._counted += divisor

    @torch.no_grad()
    def before_step(self, bound: float | None, rate_of: Callable[[Sequence[Tensor]], Any]) -> None:
        """Take in what was observed, and multiply the gradients.

        Args:
            bound: β of the bound; None: there is none.
            rate_of: how far a step moves parameters along their gradients, for the bound.
        """
        if not self.layers:
            return
        if self._is_observing:
            for layer in self.layers:
                layer.check_weight()
            self._take_in()
        self._sort_into_families()
        corrected = [one for family in self._families for one in family.corrected()]
        self._multiplications.multiply(corrected, bound, rate_of)
        self.steps += 1
        self._observe_at_once = any(layer.is_unseen for layer in self.layers)

    def take_narrow(self) -> list[AveragedLayer]:
        """Let go of the layers that have fewer rows than features, which own inputs cost less; then go on."""
        narrow, self._narrow = self._narrow, []
        decided = [layer for layer in self.undecided if layer.average is not None]
        narrow += [one for one in decided if one.average is not None and one.average.rows < one.operation.features]
        self.undecided = [layer for layer in self.undecided if layer not in decided and layer not in narrow]
        self._let_go(narrow)
        self.observe(at_once=self._observe_at_once)
        return narrow

    def _let_go(self, layers: Sequence[AveragedLayer]) -> None:
        if layers:
            self.layers = [layer for layer in self.layers if layer not in layers]
            self._failed, self._families = self.failed, families_of(self.layers)

    def _take_in(self) -> None:
        """Give the layers what was observed on all ranks. The host reads a few numbers, once for all layers."""
        self.stop_observing()
        families, device = self._families, self._counts.device
        layers = [layer for family in families for layer in family.layers]
        counts = torch.cat([family.counts.to(device) for family in families])
        counts = counts + on_device([layer.observer.counted for layer in layers], counts.dtype, device)
        *moments, counts, common = add_up(
            [
                *(tensor for family in families for tensor in (family.moments, family.sums)),
                counts,
                self._counts + self._counted,
            ]
        )
        for place, family in enumerate(families):
            family.moments, family.sums = moments[2 * place : 2 * place + 2]
        is_finite = torch.cat([family.is_finite().to(device) for family in families])
        *numbers, divisor = torch.cat([is_finite.float(), counts.flatten(), common[None]]).tolist()
        finite, numbers = numbers[: len(layers)], numbers[len(layers) :]
        observed = []
        for finite_one, rows, inside, outside in zip(finite, numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            own = 1.0 if self._loss_reduction == "sum" else (divisor if inside else 0.0) + outside
            observed.append(Observed(rows, own) if rows > 0 and finite_one else None)
        for family in families:
            count = len(family.layers)
            family.take_in(observed[:count], self._averaging)
            observed = observed[count:]

    def state_dict(self) -> dict[str, Any]:
        """What a later run goes on from."""
        averages = {layer.name: layer.average for layer in self.layers if layer.average is not None}
        copies = {
            name: replace(one, moment=one.moment.clone(), mean=one.mean.clone()) for name, one in averages.items()
        }
        return {
            "steps": self.steps,
            "is_observing": self._is_observing,
            "layers": {name: vars(one) for name, one in copies.items()},
        }

    def read(self, state: Any) -> "State":
        """What a saved state says; raises if it is none of these layers'."""
        try:
            averages = {name: Average(**kept) for name, kept in state["layers"].items()}
            read = State(int(state["steps"]), bool(state["is_observing"]), averages)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no state of averages, or one of another version: {error!r}") from error
        known = {layer.name: layer for layer in self.layers}
        unknown = [name for name in averages if name not in known]
        if unknown:
            raise ValueError(f"the state has averages of layer {unknown[0]!r}, which has none here")
        for name, average in averages.items():
            known[name].check(average)
        return read

    def go_on_from(self, state: "State") -> None:
        """Go on from a state."""
        self.stop_observing()
        self.steps = state.steps
        for layer in self.layers:
            known = state.averages.get(layer.name)
            layer.average = None if known is None else replace(known)
        self._narrow = [one for one in self.undecided if one.average is None] if state.averages else []
        self.undecided = [one for one in self.undecided if one.average is None and one not in self._narrow]
        self._failed, self._families = self.failed, families_of(self.layers)
        self._observe_at_once = state.is_observing


class State(NamedTuple):
    """What a later run goes on from."""

    steps: int
    is_observing: bool
    averages: dict[str, Average]
