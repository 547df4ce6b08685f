"""All private names of torch that the library uses; each is looked for when it is imported."""

import torch

_transforms_are_active = torch._C._are_functorch_transforms_active


def transforms_are_active() -> bool:
    """Whether ``torch.func`` transforms are under way (vmap, grad, …), outside of compiled code."""
    return not torch.compiler.is_compiling() and _transforms_are_active()
