"""Penalties on gradients (``create_graph=True``): what they add to a gradient no input of a layer explains.

There is no closed formula to compare with. The update must be finite, and must not be blown up by 1/λ.
"""

import copy
import random
import warnings

import torch
from reference import damping_options
from torch import nn

import consequent

LR = 0.01


def check_gradient_penalty(seed, mode, strength=3.0):
    """Raise an AssertionError if the update is not finite or far too long.

    Args:
        seed: any number.
        mode: "step" or "backward".
        strength: of the penalty.
    """
    rng = random.Random(f"{seed} {mode} penalty")
    torch.manual_seed(rng.randrange(2**31))
    samples, width = rng.choice(
        [(4, 20), (3, 16), (40, 4), (32, 3)]
    )  # far from square: the inputs' rank is plain to see
    damping = rng.choice([1e-4, 1e-3, 1e-2])
    damping = ("relative", damping) if rng.random() < 0.5 else damping
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)).double()
    plain = copy.deepcopy(model)
    x, t = torch.randn(samples, width).double(), torch.randn(samples, 2).double()

    def backward(network):
        leaf = x.clone().requires_grad_()
        loss = 0.5 * (network(leaf) - t).square().sum() / samples
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (loss + strength * slope.square().sum()).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        consequent.attach(optimizer, model, **damping_options(damping), **({"at": mode} if mode == "backward" else {}))
        backward(model)
        optimizer.step()
    backward(plain)
    for place, inputs in ((0, x), (2, plain[:2](x).detach())):
        update, gradient = (torch.cat([m.weight.grad, m.bias.grad[:, None]], 1) for m in (model[place], plain[place]))
        row = float(inputs.square().sum(1).mean()) + 1
        most = 10 * samples * float(gradient.norm()) / max(row, 1e-3)
        story = f"seed {seed}, at={mode!r}, {samples} samples, width {width}, {damping_options(damping)}, layer {place}"
        assert update.isfinite().all(), f"{story}: not finite"
        assert update.norm() <= most, f"{story}: the update has norm {float(update.norm()):.3g} > {most:.3g}"
