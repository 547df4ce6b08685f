"""Averaged layers with as many features: their averages lie together in memory, and are inverted together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consequent.averages.average import Average, AveragedLayer
from consequent.averages.gradients import Corrected
from consequent.gpu.launch import on_device
from consequent.maths.inverse import Counts, Inverse, Known, inverse_of

AT_ONCE = 2**26  # elements of the moments of a family: 256 MiB, and a few times as much while they are inverted
WIDE = 256  # features, from which on the last inverse is improved where it can be


class Key(NamedTuple):
    """What layers of one family have in common."""

    features: int
    dtype: torch.dtype
    device: torch.device


class Observed(NamedTuple):
    """What was observed of a layer.

    Attributes:
        rows: N.
        divisor: c.
    """

    rows: float
    divisor: float


class Family:
    """Layers with as many features.

    Args:
        key: what they have in common.
        layers: the layers.

    Attributes:
        places: of the layers' groups among those of the family.
        moments: sums of ``x xᵀ`` of the observation under way, ``[groups of all layers, D, D]``,
        sums: of x,
        counts: and what compiled code has counted.
        failed: factorisations.
    """

    def __init__(self, key: Key, layers: Sequence[AveragedLayer]) -> None:
        self.key, self.layers, self.places = key, list(layers), []
        size = 0
        for layer in layers:
            size, start = size + layer.operation.groups, size
            self.places.append(slice(start, size))
        self._size = size
        self.moments = self.sums = self.counts = torch.empty(0)
        self.failed: int | Tensor = 0
        self._moments, self._means = self._zeros()  # the averages
        for layer, place in zip(self.layers, self.places, strict=True):
            known = layer.average
            if known is not None:
                self._moments[place], self._means[place] = known.moment.to(self._moments), known.mean.to(self._means)
                known.moment, known.mean = self._moments[place], self._means[place]
        self._corrected: list[Corrected] | None = None
        self._ones = [layer.bias is not None for layer in layers]
        self._known = Known(torch.empty(0))

    def observe(self) -> None:
        """An observation begins."""
        self.moments, self.sums = self._zeros()
        self.counts = torch.zeros(len(self.layers), 3, dtype=self.key.dtype, device=self.key.device)
        for layer, place, counts in zip(self.layers, self.places, self.counts, strict=True):
            layer.observer.begin(self.moments[place], self.sums[place], counts)

    def stop(self) -> None:
        """The layers have their own forward again."""
        for layer in self.layers:
            layer.observer.take_off()
            layer.observer.forget()

    def take_in(self, observed: Sequence[Observed | None], averaging: float) -> None:
        """``n ← β n + N``, ``S ← S + (XXᵀ/N − S) N/n``.

        Args:
            observed: of each layer; None: nothing, or nothing that is finite.
            averaging: β.
        """
        rows, weights = [1.0] * self._size, [0.0] * self._size
        for layer, place, of_layer in zip(self.layers, self.places, observed, strict=True):
            if of_layer is None:
                self.moments[place], self.sums[place] = 0, 0
                continue
            weight = of_layer.rows + (averaging * layer.average.weight if layer.average is not None else 0.0)
            for group in range(place.start, place.stop):
                rows[group], weights[group] = of_layer.rows, of_layer.rows / weight
            layer.average = Average(self._moments[place], self._means[place], weight, *of_layer)
        count, weight_of = self._numbers([rows, weights])
        self._moments.lerp_(self.moments.div_(count[:, None, None]), weight_of[:, None, None])
        self._means.lerp_(self.sums.div_(count[:, None]), weight_of[:, None])
        self.moments = self.sums = self.counts = torch.empty(0)
        self._corrected = None

    def has_moved(self) -> bool:
        """Whether the layers are of another precision now, or elsewhere."""
        weight = self.layers[0].weight
        return weight.device != self.key.device or torch.promote_types(weight.dtype, torch.float32) != self.key.dtype

    def is_finite(self) -> Tensor:
        """Whether what was observed is, of each layer."""
        of_groups = self.moments.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()
        if self._size == len(self.layers):
            return of_groups
        return torch.stack([of_groups[place].all() for place in self.places])

    def corrected(self) -> list[Corrected]:
        """The layers that have been observed, with their inverses."""
        pairs = zip(self.layers, self._ones, strict=True)
        ones = [layer.corrects_bias(otherwise=was) for layer, was in pairs]
        if self._corrected is None or self._ones != ones:
            inverse = self._inverted(ones)
            self._ones = ones
            self.failed = self.failed + inverse.failed
            self._corrected = [
                Corrected(layer, inverse.of(place), with_bias=one)
                for layer, place, one in zip(self.layers, self.places, ones, strict=True)
                if layer.average is not None
            ]
        return self._corrected

    def _inverted(self, ones: list[bool]) -> Inverse:
        numbers: list[list[float]] = [[], [], []]
        for layer, place, one in zip(self.layers, self.places, ones, strict=True):
            rows, weight = (1.0, 1.0) if layer.average is None else (layer.average.rows, layer.average.weight)
            rank = min(max(round(weight), 1), self.key.features + one)
            for column, number in zip(numbers, (rows, rank, float(one)), strict=True):
                column += [number] * (place.stop - place.start)
        damping, counts = self.layers[0].damping, Counts(*self._numbers(numbers).unbind())
        is_large = damping.is_large(int(max(numbers[1])), self.key.features + 1, self._moments.dtype)
        known = self._known if ones == self._ones and self._is_settled() else None
        inverse = inverse_of(self._moments, self._means, counts, damping, is_large=is_large, known=known)
        self._known.matrix = inverse.matrix
        return inverse

    def _is_settled(self) -> bool:
        """Whether one observation changes the averages little, on a device that is fast at products above all."""
        if self.key.device.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32 or self.key.features < WIDE:
            return False
        averages = [layer.average for layer in self.layers]
        return all(one is not None and one.rows <= 0.3 * one.weight for one in averages)

    def _numbers(self, columns: list[list[float]]) -> Tensor:
        return on_device(columns, self.key.dtype, self.key.device)

    def _zeros(self) -> tuple[Tensor, Tensor]:
        features, dtype, device = self.key
        moments = torch.zeros(self._size, features, features, dtype=dtype, device=device)
        return moments, torch.zeros(self._size, features, dtype=dtype, device=device)


def families_of(layers: Sequence[AveragedLayer]) -> list[Family]:
    """The layers, sorted into families."""
    alike: dict[Key, list[list[AveragedLayer]]] = {}
    for layer in layers:
        key = key_of(layer)
        groups = alike.setdefault(key, [[]])
        if sum(one.operation.groups for one in (*groups[-1], layer)) * key.features**2 > AT_ONCE and groups[-1]:
            groups.append([])
        groups[-1].append(layer)
    return [Family(key, group) for key, groups in alike.items() for group in groups]


def key_of(layer: AveragedLayer) -> Key:
    """What the layer has in common with its family."""
    weight = layer.weight
    return Key(layer.operation.features, torch.promote_types(weight.dtype, torch.float32), weight.device)
