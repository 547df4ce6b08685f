"""All private names of torch that the library uses; each is looked for when this file is imported."""

import torch
from torch import nn

# Whether ``torch.func`` transforms are under way (vmap, grad, …); not to be asked by compiled code.
transforms_are_active = torch._C._are_functorch_transforms_active

_graph_task_id = torch._C._current_graph_task_id


def in_backward_pass() -> bool:
    """Whether a backward pass is under way, as when checkpointing computes a layer again; not in compiled code."""
    return not torch.compiler.is_compiling() and _graph_task_id() != -1


def compiled_model_in(module: nn.Module) -> nn.Module | None:
    """The model that ``torch.compile`` has put into this one; None if it has not."""
    return dict(module.named_children()).get("_orig_mod")
