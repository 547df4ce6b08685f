"""Several ranks that train one model: from when on this process corrects with all of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from consequent.correction.parts import Parts
from consequent.layers import joint_of, kind_of
from consequent.options.settings import refuse_shared_blocks
from consequent.ranks.exchange import Exchange
from consequent.ranks.process_group import Ranks, group_of_model, group_of_running_wrapper, several_are_running
from consequent.ranks.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Together:
    """With whom this process trains.

    Args:
        parts: of the correction.
        model: as the user gave it, perhaps wrapped.
        across_ranks: whether other ranks' inputs count.
        foresight: whether a step is looked at.
        settings: what all ranks must have chosen alike.
    """

    def __init__(
        self,
        parts: Parts,
        model: nn.Module,
        *,
        across_ranks: bool,
        foresight: bool,
        settings: Callable[[], dict[str, str]],
    ) -> None:
        self._parts = parts
        self._model = model
        self._across_ranks = across_ranks
        self._foresight = foresight
        self._settings = settings

    def look_for_others(self) -> None:
        """Samples are about to enter the model: a wrapper may say by now who trains it together."""
        if self._parts.rewriter.exchange is not None or not several_are_running():
            return
        weight, _ = self._parts.capture.parameters_of(next(iter(self._parts.capture.layers.values())))
        group = group_of_model(self._model, self._parts.territory.parameters()) or group_of_running_wrapper(weight)
        if group is not None:
            self.join(group)

    def join(self, group: "ProcessGroup", *, by_hand: bool = False) -> None:
        """Train together with the ranks of this group from now on.

        Args:
            group: all of them.
            by_hand: whether no wrapper averages the gradients, but the user does.
        """
        ranks = Ranks(group)
        if ranks.size == 1:
            return
        if not self._across_ranks:
            raise RuntimeError(
                f"across_ranks=False, but the model's gradients are averaged over {ranks.size} ranks: corrected with "
                "each rank's own inputs, the ranks' weights would drift apart. Leave across_ranks out; or train the "
                "bare model, and average the gradients between correction.step() and optimizer.step()."
            )
        refuse_shared_blocks(self._parts.groups.largest_block)
        capture, layers = self._parts.capture, self._parts.layers
        sparse = [name for name, layer in capture.layers.items() if _is_sparse(layer)]
        if sparse:
            raise RuntimeError(
                f"layer {sparse[0]!r} is a table of embeddings, whose counts are not exchanged between ranks: leave it "
                'out of include=, or attach with at="backward"'
            )
        if self._foresight:
            raise RuntimeError(
                f"foresight=True looks at the samples of one process, and {ranks.size} ranks train together: "
                "leave it out, or look at a model on one rank"
            )
        before = dict(capture.layers)
        layers.leave_out_joints()
        layers.select_again(capture)
        for name, layer in before.items():
            if name not in capture.layers and joint_of(layer) is not None:
                self._parts.reports.left_plain(name, layers.selection.plain[name])
        self._parts.corrector.share_out()
        rewriter = self._parts.rewriter
        rewriter.exchange = Exchange(
            capture,
            self._parts.corrector,
            ranks,
            self._parts.groups.damping_of,
            rewriter.averages,
            self._settings,
            by_hand=by_hand,
        )

    def warn_of_ranks_left_out(self) -> None:
        """There are other ranks, and nothing says that they train the same model."""
        if self._across_ranks and self._parts.rewriter.exchange is None and several_are_running():
            self._parts.reports.ranks_left_out(dist.get_world_size())

    @property
    def traffic(self) -> Traffic:
        """What crosses ranks."""
        exchange = self._parts.rewriter.exchange
        if exchange is None:
            raise RuntimeError(
                "this process corrects alone: the model was not called inside of a DistributedDataParallel yet, is not "
                "sharded by fully_shard, and no process_group was given"
            )
        return exchange.ranks.traffic


def _is_sparse(layer: nn.Module) -> bool:
    kind = kind_of(layer)
    return kind is not None and kind.is_sparse
