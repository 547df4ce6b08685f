"""In-place activations, activation checkpointing, save_on_cpu, and inputs that do not lie as usual in memory."""

import pytest
import torch
from loop.expected import DAMPING, KINDS, LR, assert_stepped, build, corrected, loss_on, mean_loss, weights
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as checkpointing

import consequent

MODES = pytest.mark.parametrize("reentrant", [True, False])

plainly = []  # not empty: checkpoint nothing, since torch.autograd.grad cannot run through the reentrant mode


def checkpoint(function, x, use_reentrant):
    return function(x) if plainly else checkpointing.checkpoint(function, x, use_reentrant=use_reentrant)


def expectation(model, loss_of, samples):
    plainly.append(True)
    grads = corrected(model, loss_of, samples=samples)
    plainly.clear()
    return grads


def train_as_expected(model, loss_of, samples, steps=2, context=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(steps):
        optimizer.zero_grad()
        before, grads = weights(model), expectation(model, loss_of, samples)
        with context() if context else torch.enable_grad():
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        assert_stepped(model, before, grads)
    assert correction.counters.edited == 0
    assert not correction.plain
    return correction


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_relu(kind):
    model, x, t = build(kind, inplace=True)
    train_as_expected(model, loss_on(x, t), len(x), steps=3)


@pytest.mark.parametrize("kind", KINDS)
def test_input_overwritten_after_the_layer_is_an_error_not_a_wrong_number(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)
    loss = loss_on(x, t)(model)
    x.mul_(2)
    with pytest.raises(
        RuntimeError,
        match=r"the inputs or the weight of (Linear|Conv2d)\(.*\) have been modified by an inplace operation",
    ):
        loss.backward()
    optimizer.zero_grad()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)


class Probe(nn.Module):
    """Watches whether what flows through it is still alive."""

    watched = None  # of the last call (not an attribute of the module: it cannot be copied)

    def forward(self, x):
        x = x * 1.0
        Probe.watched = StorageWeakRef(x.untyped_storage())
        return x


class Checkpointed(nn.Module):
    """The whole net in segments, all or some of them checkpointed."""

    def __init__(self, kind, segments, reentrant):
        super().__init__()
        self.body = build(kind)[0]
        self.segments = segments
        self.reentrant = reentrant
        self.probe = Probe()

    def forward(self, x):
        for start, stop, recompute in self.segments:
            part = self.body[start:stop]
            if not recompute:
                x = part(x)
                continue

            def run(x, part=part):
                for place, module in enumerate(part):
                    x = module(x)
                    if place == 1:
                        x = self.probe(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


SEGMENTS = {
    "all": [(0, 5, True)],
    "two": [(0, 2, True), (2, 5, True)],
    "first": [(0, 3, True), (3, 5, False)],
    "last": [(0, 1, False), (1, 5, True)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@MODES
def test_activation_checkpointing(kind, segments, reentrant):
    _, x, t = build(kind)
    x.requires_grad_()  # without it the reentrant mode computes no gradients at all
    model = Checkpointed(kind, segments, reentrant)
    model.double()
    train_as_expected(model, lambda m: mean_loss(m(x), t), len(x))


@pytest.mark.parametrize("kind", KINDS)
@MODES
def test_checkpointed_modules_called_as_modules(kind, reentrant):
    """The usual way: ``checkpoint(self.block, x)``; with everything inside, N is still N."""
    body, x, t = build(kind)
    x.requires_grad_()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = body[:2], body[2:]

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return checkpoint(self.second, x, use_reentrant=reentrant)

    train_as_expected(Model(), lambda m: mean_loss(m(x), t), len(x))


@pytest.mark.parametrize("kind", ["wide", "tall"])
@MODES
def test_checkpointed_layers_on_tokens_count_samples(kind, reentrant):
    """N is what entered the model, also where a checkpointed layer is called on [samples · tokens, features]."""
    body = build(kind)[0]
    features = body[0].in_features
    torch.manual_seed(3)
    x = torch.randn(2, 2 if kind == "wide" else 10, features).double().requires_grad_()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, x):
            h = x.flatten(0, 1)
            for module in self.body:
                h = checkpoint(module, h, use_reentrant=reentrant)
            return h.unflatten(0, x.shape[:2])

    train_as_expected(Model(), lambda m: m(x).square().sum() / len(x), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_keeps_its_memory_promise(kind):
    """Inputs of layers inside the region die with the forward pass, correction or not; outside of one they live."""
    _, x, t = build(kind)
    alive = {}
    for recompute in [True, False]:
        model = Checkpointed(kind, [(0, None, recompute)], reentrant=False).double()
        if not recompute:
            model.body.insert(2, model.probe)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        consequent.attach(optimizer, model, damping=DAMPING)
        before, grads = weights(model), expectation(model, loss_on(x, t), len(x))
        loss = loss_on(x, t)(model)
        alive[recompute] = not Probe.watched.expired()
        loss.backward()
        optimizer.step()
        assert_stepped(model, before, grads)
    assert alive == {True: False, False: True}


@pytest.mark.parametrize("kind", KINDS)
def test_captures_are_dropped_with_the_graph_and_with_the_step(kind):
    """A forward pass given up keeps nothing alive; neither do a backward pass on the feature side and a step."""
    model, x, t = build(kind)
    probe = Probe()
    model.insert(2, probe)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    model(x)
    assert Probe.watched.expired()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    assert Probe.watched.expired() == (kind != "wide")  # reduced to a second moment as early as possible
    optimizer.step()
    assert Probe.watched.expired()
    assert_stepped(model, before, grads)


class InsideAndOutside(nn.Module):
    """One layer, used in and out of a checkpointed region in the given order."""

    def __init__(self, width, order, reentrant):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.order = order
        self.reentrant = reentrant

    def forward(self, x):
        for place in self.order:
            if place == "i":
                x = checkpoint(lambda h: self.layer(h).tanh(), x, use_reentrant=self.reentrant)
            else:
                x = self.layer(x).tanh()
        return x


@pytest.mark.parametrize("order", ["io", "oi", "oio", "ioi", "iioo", "oiio", "ii"])
@pytest.mark.parametrize("width", [30, 4], ids=["wide", "tall"])
@MODES
def test_a_layer_used_inside_and_outside_of_a_checkpoint(order, width, reentrant):
    torch.manual_seed(2)
    model = InsideAndOutside(width, order, reentrant).double()
    x, t = torch.randn(6, width).double().requires_grad_(), torch.randn(6, width).double()
    train_as_expected(model, lambda m: mean_loss(m(x), t), len(x), steps=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("at", ["step", "backward"])
@MODES
def test_checkpointing_with_retain_graph(kind, segments, reentrant, at):
    """Recomputed in each of the two backward passes: inputs count once and N once, output gradients twice."""
    _, x, t = build(kind)
    x.requires_grad_()
    model = Checkpointed(kind, segments, reentrant).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)
    for _ in range(2):
        optimizer.zero_grad()
        before, grads = weights(model), expectation(model, lambda m: mean_loss(m(x), t), len(x))
        loss = mean_loss(model(x), t)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        assert_stepped(model, before, {name: 2 * grad for name, grad in grads.items()})
    assert correction.samples == len(x)


@pytest.mark.parametrize("kind", KINDS)
def test_save_on_cpu(kind):
    model, x, t = build(kind)
    train_as_expected(model, loss_on(x, t), len(x), context=torch.autograd.graph.save_on_cpu)


@pytest.mark.parametrize("kind", KINDS)
def test_save_on_cpu_holds_no_second_copy(kind):
    """Packed tensors are all that stays: the activation itself dies with the forward pass."""
    model, x, t = build(kind)
    probe = Probe()
    model.insert(2, probe)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = loss_on(x, t)(model)
    assert Probe.watched.expired()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    loss.backward()
    optimizer.step()
    assert_stepped(model, before, grads)


LAYOUTS = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "strided": lambda x: x.repeat_interleave(2, 0)[::2],
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "flipped batch": lambda x: x.flip(0),
    "expanded": lambda x: x[:1].expand(len(x), *x.shape[1:]),
    "expanded features": lambda x: x[..., :1].expand_as(x),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.T.contiguous().T,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [True, False])
def test_inputs_that_are_not_contiguous(kind, layout, grad):
    model, x, t = build(kind)
    x = LAYOUTS[layout](x).requires_grad_(grad)
    train_as_expected(model, lambda m: mean_loss(m(x), t), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_inputs_channels_last(kind):
    model, x, t = build(kind)
    if kind == "conv":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()
    train_as_expected(model, loss_on(x, t), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_output_gradients(kind):
    """The gradient of a plain sum is an expanded 1."""
    model, x, _ = build(kind)
    train_as_expected(model, lambda m: m(x).sum() / len(x), len(x))
