"""What averages are, by explicit matrices; and that nothing of ours is in the passes between two observations."""

import pytest
import reference
import torch
from expected import Watched, check_same_grads, grads_of
from loops.networks import attached, batch, loss_of, network
from torch import nn

import consequent


class Reference:
    """The definition with explicit matrices: S, n, and c (N S + λI)⁻¹ of every layer."""

    def __init__(self, beta, rho=0.1):
        self.beta, self.rho, self.known = beta, rho, {}

    def look(self, model, passes):
        """Take in the inputs of forward passes of one step; each pass is a batch (x, y)."""
        seen = {}
        for x, y in passes:
            watched = Watched(model)
            loss_of(watched.model, x, y).backward()
            for name, calls in watched.calls.items():
                layer = watched.model.get_submodule(name)
                for inputs, _ in calls:
                    for group, X in enumerate(reference.design_matrices(layer, inputs)):
                        seen.setdefault((name, group), []).append(torch.as_tensor(X))
        self.samples = sum(len(x) for x, _ in passes)
        for key, parts in seen.items():
            X = torch.cat(parts)
            past, weight = self.known.get(key, (0.0, 0.0, 0))[:2]
            weight = self.beta * weight + len(X)
            self.known[key] = past + (X.T @ X / len(X) - past) * len(X) / weight, weight, len(X)

    def multiplied(self, model, grads):
        """The gradients of a step, by parameter name, times the inverses."""
        found = dict(grads)
        for (name, group), (moment, weight, rows) in self.known.items():
            layer = model.get_submodule(name)
            bias = grads.get(f"{name}.bias")
            weight_grad = None if grads[f"{name}.weight"] is None else grads[f"{name}.weight"].numpy()
            G = torch.as_tensor(
                reference.gradient_matrices(layer, weight_grad, None if bias is None else bias.numpy())[group]
            )
            size = len(moment)
            level = self.rho * moment.trace() * rows / min(round(weight), size)
            inverse = torch.linalg.inv(moment * rows + level * torch.eye(size, dtype=torch.float64))
            U = self.samples * G @ inverse
            outputs = slice(group * len(U), (group + 1) * len(U))
            found[f"{name}.weight"] = found[f"{name}.weight"].clone()
            columns = U if bias is None else U[:, :-1]
            found[f"{name}.weight"][outputs] = columns.reshape(len(U), *layer.weight.shape[1:])
            if bias is not None:
                found[f"{name}.bias"] = found[f"{name}.bias"].clone()
                found[f"{name}.bias"][outputs] = U[:, -1]
        return found


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.Tanh(), nn.Conv2d(6, 4, 3, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(64, 10),
    ).double()  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("beta", "period"), [(0.95, 1), (0.9, 3), (0.5, 2)])
def test_the_definition(beta, period, momentum):
    model, definition = convnet(), Reference(beta)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    consequent.attach(optimizer, model, averaging=beta, refresh=period, bound=None)
    for step in range(6):
        x, y = batch(samples=8 + step, seed=step)
        optimizer.zero_grad()
        if step % period == 0:
            definition.look(model, [(x, y)])
        loss_of(model, x, y).backward()
        expected = definition.multiplied(model, grads_of(model))
        optimizer.step()
        check_same_grads(grads_of(model), expected, rtol=1e-7)


def test_passes_between_two_looks_are_plain():
    """No other forward, no class, no hook and no node of ours."""
    model, optimizer = attached(network(), averaging=0.95, refresh=3)
    plain = network()
    classes = [type(module) for module in model.modules()]
    for step in range(7):
        replaced = [module for module in model.modules() if "forward" in module.__dict__]
        assert len(replaced) == (5 if step % 3 == 0 else 0)  # four layers and the model
        optimizer.zero_grad()
        x, y = batch(seed=step)
        loss = loss_of(model, x, y)
        if step % 3:
            assert nodes_of(loss) == nodes_of(loss_of(plain, x, y))
        loss.backward()
        optimizer.step()
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def nodes_of(loss):
    found, waiting = [], [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.append(node.name())
            waiting += [inner for inner, _ in node.next_functions]
    return sorted(found)
