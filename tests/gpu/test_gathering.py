"""Own inputs of all layers of a pass gathered, as on a GPU, beside own inputs of each layer by itself."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from expected import check_same_grads, grads_of
from loops.networks import Recurring, batch, half_squares, loss_of, network, one_pass
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import consequent
from consequent.minibatch import own_inputs
from consequent.minibatch.gather import Gathering


@pytest.fixture
def passes(monkeypatch):
    """Everything is gathered; the passes that were, as weak references."""
    made = []

    class Noted(Gathering):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(own_inputs, "gathers", lambda weight: type(weight) in (torch.Tensor, nn.Parameter))
    monkeypatch.setattr(own_inputs, "Gathering", Noted)
    return made


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layers, self.use_reentrant = network(), use_reentrant

    def forward(self, x):
        hidden = checkpoint(self.layers[:4], x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.layers[4:](hidden)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.one(hidden), self.other(hidden)


def frozen(*names):
    model = network()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def rows():
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def micro_batches(model):
    for number in range(3):
        one_pass(model, samples=4 + number, seed=number)


def twice(model):
    loss = loss_of(model, *batch())
    loss.backward(retain_graph=True)
    first = grads_of(model)
    model.zero_grad()
    loss.backward()
    check_same_grads(grads_of(model), first)
    loss_of(model, *batch()).backward()


def inputs_only_then_backward(model):
    x, y = batch()
    loss = loss_of(model, x.requires_grad_(), y)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()


def with_hooks(model):
    seen = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.clone()))
        p.register_hook(lambda grad: 2 * grad if grad.ndim == 1 else None)
    one_pass(model)
    check_same_grads(seen, grads_of(model))


def by_other_parameters(model):
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    x, y = batch()
    F.cross_entropy(functional_call(model, others, (x,)), y).backward()
    assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        p.grad = others[name].grad


RUNS = {
    "one pass": (network, one_pass),
    "micro-batches": (network, micro_batches),
    "a layer called often, and a weight of two layers": (
        lambda: Recurring(2).double(),
        lambda m: half_squares(m, rows()),
    ),
    "frozen weights": (lambda: frozen("0.weight", "5.weight"), one_pass),
    "frozen biases": (lambda: frozen("0.bias", "7.bias"), one_pass),
    "one graph twice": (network, twice),
    "inputs only, then all": (network, inputs_only_then_backward),
    "checkpointing": (lambda: Checkpointed(False), one_pass),
    "checkpointing, reentrant": (lambda: Checkpointed(True), one_pass),
    "hooks": (network, with_hooks),
    "half of the model": (lambda: Heads().double(), lambda m: half_squares(lambda x: m(x)[0], rows())),
    "other parameters": (network, by_other_parameters),
}


def trained(make, run, steps=2):
    """The gradients of a pass, and the parameters after steps of two optimisers, one of which bounds them."""
    torch.manual_seed(0)
    model = copy.deepcopy(make())
    parameters = [p for p in model.parameters() if p.requires_grad]
    half = len(parameters) // 2
    first, last = torch.optim.SGD(parameters[:half], lr=3.0), torch.optim.Adam(parameters[half:], lr=0.01)
    consequent.attach([first, last], model)
    grads = []
    for _ in range(steps):
        model.zero_grad()
        run(model)
        grads.append(grads_of(model))
        first.step()
        last.step()
    return grads[0], dict(model.named_parameters())


@pytest.mark.parametrize("name", RUNS)
def test_gathered_is_not_gathered(name, request):
    grads, parameters = trained(*RUNS[name])
    passes = request.getfixturevalue("passes")
    gathered, after = trained(*RUNS[name])
    assert passes
    check_same_grads(gathered, grads)
    check_same_grads(after, parameters)


def test_layers_are_solved_by_the_gathering(passes, monkeypatch):
    solved, plain = [], Gathering.solved
    monkeypatch.setattr(Gathering, "solved", lambda self: solved.append(len(self.reached)) or plain(self))
    trained(network, one_pass, steps=1)
    assert solved == [4]
    trained(lambda: Recurring(2).double(), lambda model: half_squares(model, rows()), steps=1)
    assert solved == [4, 6]


def test_what_is_differentiated_stays_plain(passes):
    def penalised(model):
        x, y = batch()
        loss = loss_of(model, x.requires_grad_(), y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()

    plain = network()
    penalised(plain)
    with pytest.warns(consequent.ConsequentWarning, match="differentiated"):
        grads, _ = trained(network, penalised, steps=1)
    assert passes
    check_same_grads(grads, grads_of(plain))


@pytest.mark.parametrize("with_backward", [True, False])
def test_a_model_and_a_pass_that_are_thrown_away_are_freed(with_backward, passes):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    loss = loss_of(model, *batch())
    if with_backward:
        loss.backward()
    kept = weakref.ref(model[5].weight)
    gc.disable()
    try:
        del loss
        assert passes[0]() is None
    finally:
        gc.enable()
    del model, optimizer
    gc.collect()
    assert kept() is None
