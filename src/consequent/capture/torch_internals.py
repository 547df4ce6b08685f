"""The private names of torch that the library needs, all in one place, so that a new release needs one file checked.

PyTorch asks itself these questions through the same names (``torch.utils.checkpoint``, ``torch.autograd.graph``, FSDP).
That all of them exist is tested when this module is imported.
"""

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from operator import attrgetter
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_NEEDED = (
    "_current_graph_task_id",
    "_current_autograd_node",
    "_will_engine_execute_node",
    "_functorch.peek_interpreter_stack",
    "_functorch.unwrap_if_dead",
    "_is_any_autocast_enabled",
    "_is_fwd_grad_enabled",
    "_FunctionBase.apply",
)


def _missing() -> list[str]:
    found = []
    for path in _NEEDED:
        owner: Any = torch._C
        for name in path.split("."):
            owner = getattr(owner, name, None)
        if owner is None:
            found.append(f"torch._C.{path}")
    return found


if _absent := _missing():
    raise ImportError(
        f"consequent needs {', '.join(_absent)}, which torch {torch.__version__} does not have; "
        "it is tested with torch 2.11 and 2.13"
    )


# A number for the running backward pass; -1 outside of one.
backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id


def elements_made_by(node: Node) -> int | None:
    """How many numbers the first tensor has that a node of the graph stands for; None where torch does not say."""
    made = getattr(node, "_input_metadata", None)
    return math.prod(made[0].shape) if made else None


def running_node() -> Node | None:
    """The node of the graph that the running backward pass is at."""
    node: Node | None = torch._C._current_autograd_node()
    return node


PYTHON_NODE = torch.autograd.function.BackwardCFunction  # of functions written in Python


def nodes_being_made() -> Iterator[Any]:
    """Those nodes of Python functions whose forward pass is under way, the innermost one first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        node = frame.f_locals.get("ctx") if frame.f_code.co_name == "forward" else None
        if isinstance(node, PYTHON_NODE):
            yield node
        frame = frame.f_back


def will_run(node: Node | None) -> bool:
    """Whether the running backward pass goes through this node of its graph."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad asks for this very leaf: its gradient is returned, not accumulated
        return False


def is_returned(node: Node | None) -> bool:
    """Whether the running pass is a ``torch.autograd.grad`` that returns the gradient of this very leaf."""
    if node is None:
        return False
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


def accumulator_of(leaf: Tensor) -> Node:
    """The node that adds to the parameter's ``.grad``."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def leaf_of(node: Node | None) -> Tensor | None:
    """The parameter whose ``.grad`` the node adds to, if it is such a node."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def is_made_of(tensor: Tensor, leaf: Tensor) -> bool:
    """Whether the tensor was computed from the parameter, as far as autograd knows."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if leaf_of(node) is leaf:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def comes_in_time(leaf: Tensor, accumulator: Node | None) -> bool:
    """Whether it is early enough to add to the parameter's ``.grad`` when the running pass is over.

    Not where a hook of the parameter wants the gradient when it comes, nor in ``torch.autograd.grad``, nor where the
    accumulator is another tensor's.

    Args:
        leaf: the parameter.
        accumulator: the node of the graph to which its gradient goes.
    """
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return False
    if hasattr(leaf, "_in_backward_optimizers"):  # of torch.distributed.optim
        return False
    return leaf_of(accumulator) is leaf and will_run(accumulator)


def has_hooks(accumulator: Node | None) -> bool:
    """Whether somebody has registered hooks on the node. All of one kind are in one dictionary, ours among them."""
    if accumulator is None:
        return False
    handles = [accumulator.register_hook(_nothing), accumulator.register_prehook(_nothing)]
    found = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the running backward pass has written all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


_looking_at_frames = threading.RLock()


def innermost_frames() -> dict[int, FrameType]:
    """Every thread's, by its number.

    No garbage is collected meanwhile: up to Python 3.11.8 what is destroyed by that may wait for ever for a lock that
    is held here (CPython's issue 106883; a correction that was thrown away is such a thing).
    """
    with _looking_at_frames:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def threads_in_backward() -> set[int]:
    """The threads that are inside of a call of ``backward()`` or ``torch.autograd.grad()``."""
    return {thread for thread, frame in innermost_frames().items() if _is_in_backward(frame)}


def callers_of_backward() -> set[int]:
    """The threads that may have called the running backward pass: this one, unless it is that of a GPU."""
    return {threading.get_ident()} if _is_in_backward(sys._getframe()) else threads_in_backward()


def _is_in_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    return frame is not None


def scaler_is_stepping() -> bool:
    """Whether a ``GradScaler`` that is enabled calls the optimiser's step: losses are multiples then."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SCALER_STEP:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


_SCALER_STEP = torch.amp.GradScaler.step.__code__


def answers_at_once(place: Tensor | torch.device) -> bool:
    """Whether looking at numbers there makes nobody wait: true on the CPU, not on a GPU in full flight."""
    return place.type == "cpu" if isinstance(place, torch.device) else place.is_cpu


def graph_is_being_captured() -> bool:
    """Whether what is launched now is not run but recorded in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def transforms_are_active() -> bool:
    """Whether ``torch.func`` (vmap, grad, …) or forward-mode differentiation rewrites the operations now."""
    return _innermost_transform() is not None or _forward_mode._current_level >= 0


_innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_forward_mode = torch.autograd.forward_ad


# The tensor itself; what is in it, where ``torch.func`` had wrapped it and is done.
unwrapped_if_left: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` in a fraction of its time.

    For where :func:`transforms_are_active` has said no, with tensors that are :func:`unwrapped_if_left`: torch's own
    looks for both in Python first.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# Whether ``autocast`` is enabled for any kind of device.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What ``autocast`` would cast to on this device now; None where it is off."""
    if not autocast_is_on() or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def stream_now(device_index: int) -> tuple[int, int, int]:
    """What identifies the current stream of a GPU, for :func:`switch_stream`."""
    now: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device_index)
    return now


def switch_stream(stream: tuple[int, int, int]) -> None:
    """Make a stream that :func:`stream_now` has told of the current one."""
    stream_id, device_index, device_type = stream
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def running_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward pass is running: a note that torch keeps for ``torch.compile``."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def backend_of(group: Any, device: torch.device) -> Any:
    """By which a process group sends what is on the device."""
    return group._get_backend(device)


def serves_hosts(group: Any) -> bool:
    """Whether a process group sends what is in the hosts' memory."""
    return torch.device("cpu") in group._device_types


def patience_of(group: Any) -> timedelta:
    """How long a process group of GPUs waits for a rank."""
    patience: timedelta = backend_of(group, torch.device("cuda")).options._timeout
    return patience


def divide_factor_of(model: nn.Module) -> float | None:
    """What ``fully_shard`` was told to divide sums of gradients by, instead of by the number of ranks."""
    sharded: list[Any] = [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]
    for state in [module._get_fsdp_state() for module in sharded]:
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for factor in [getattr(group, "gradient_divide_factor", None) for group in groups]:
            if factor is not None:
                return float(factor)
    return None


def with_globals(function: Any, **others: Any) -> Callable[..., Any]:
    """A function of torch that is written in Python, with others in the place of some that it calls."""
    known = {**function.__globals__, **others}
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


# How many times a tensor was written to, as far as torch can tell.
version_of: Callable[[Tensor], int] = attrgetter("_version")
