"""A model whose optimiser was thrown away is a plain one, and its next backward pass says so."""

import sys
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from consequent.ranks.sharded_tensors import is_sharded
from consequent.reports.reports import Reports


def warn_at_next_backward_pass(
    parameters: Iterable[Tensor], reports: Reports, is_corrected: Callable[[Tensor], bool]
) -> Callable[[], None]:
    """Let the next gradient of one of these parameters tell that nobody corrects it, unless somebody does by then.

    Args:
        parameters: of the layers that were corrected.
        reports: who warns.
        is_corrected: whether another correction has taken a parameter over.

    Returns:
        what to call if nothing is to be told any more.
    """
    handles: dict[int, RemovableHandle] = {}

    def stop() -> None:
        for handle in handles.values():
            handle.remove()
        handles.clear()

    if sys.is_finalizing():  # the program ends: no backward pass will come, and torch cannot take hooks any more
        return stop

    def arrives(parameter: "weakref.ref[Tensor]") -> Callable[[Tensor], None]:
        def gradient_arrives(_: Tensor) -> None:
            known = parameter()
            if known is not None and is_corrected(known):
                handles.pop(id(known)).remove()
                return
            stop()
            reports.optimizer_gone()

        return gradient_arrives

    for parameter in parameters:
        if parameter.requires_grad and not is_sharded(parameter):
            handles[id(parameter)] = parameter.register_hook(arrives(weakref.ref(parameter)))
    return stop
