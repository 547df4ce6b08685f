"""Which backward passes have come to parameters that are not corrected: their losses count as well."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from consequent.capture.gradient_mark import GradMark
from consequent.capture.torch_internals import accumulator_of, after_backward, backward_pass_id, will_run
from consequent.ranks.sharded_tensors import is_nonzero, is_sharded, local


class PlainPasses:
    """Watches parameters that are not corrected, by a hook on each.

    Sharded ones are not watched: their gradients come to other tensors first.

    Args:
        comes: called when a pass comes to one of them.
        ended: called with those that it has come to, when it is over.
    """

    def __init__(self, comes: Callable[[int], None], ended: Callable[[list[Tensor]], None]) -> None:
        self._comes = comes
        self._ended = ended
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._passes: dict[Tensor, list[int]] = {}  # that are in a parameter's gradient
        self._marks: dict[Tensor, GradMark] = {}  # on gradients as the last pass left them
        self._running: dict[int, list[Tensor]] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on these, and no others."""
        wanted = {p for p in parameters if p.requires_grad and not is_sharded(p)}
        for parameter in [p for p in self._hooks if p not in wanted]:
            self._hooks.pop(parameter).remove()
            self._passes.pop(parameter, None)
            self._marks.pop(parameter, None)
        for parameter in wanted:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(partial(self._gradient_arrives, parameter))

    def by_pass(self) -> dict[int, list[Tensor]]:
        """The passes that are in gradients now, and in whose."""
        found: dict[int, list[Tensor]] = {}
        for parameter, passes in self._passes.items():
            if parameter.grad is not None:
                for backward_pass in passes:
                    found.setdefault(backward_pass, []).append(parameter)
        return found

    def clear(self) -> None:
        """Forget all passes."""
        self._passes.clear()
        self._marks.clear()
        self._running.clear()

    def _gradient_arrives(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """A gradient is on its way to the parameter's, or to whom asked ``torch.autograd.grad`` for it."""
        if gradient is None or not will_run(accumulator_of(parameter)):
            return
        now = backward_pass_id()
        if parameter in self._passes and self._is_zeroed(parameter):
            del self._passes[parameter]
        passes = self._passes.setdefault(parameter, [])
        if now not in passes:
            passes.append(now)
        if now not in self._running:
            self._running[now] = []
            after_backward(partial(self._pass_ended, now))
        self._running[now].append(parameter)
        self._comes(now)

    def _is_zeroed(self, parameter: Tensor) -> bool:
        """Whether its gradient was thrown away since the last pass; looked at only where somebody wrote to it."""
        grad, mark = parameter.grad, self._marks.get(parameter)
        if grad is None:
            return True
        return mark is not None and not mark.holds(grad) and not is_nonzero(local(grad))

    def _pass_ended(self, backward_pass: int) -> None:
        parameters = self._running.pop(backward_pass, [])
        for parameter in parameters:
            self._marks[parameter] = GradMark(parameter.grad)
        self._ended(parameters)
