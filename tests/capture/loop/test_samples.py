"""N: how many samples entered the model, and what the loss was divided by."""

import pytest
import torch
from loop.expected import DAMPING, KINDS, LR, assert_stepped, build, corrected, mean_loss, weights
from torch import nn

import consequent


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "number", "callable", "mse_loss"])
@pytest.mark.parametrize("rows", [1, 3], ids=["linear", "3 tokens"])
def test_lr_1_lands_on_the_virtual_targets(batch, reduction, rows):
    """λ → 0 and independent inputs: one step with lr=1 moves the outputs to Z − ∂(sum of losses)/∂Z."""
    torch.manual_seed(batch)
    model = nn.Linear(40, 4).double()
    x, t = torch.randn(batch, rows, 40).double().squeeze(1), torch.randn(batch, rows, 4).double().squeeze(1)
    divisor = {"mean": batch, "sum": 1, "number": 2.5, "callable": 3 * batch, "mse_loss": t.numel() / 2}[reduction]
    loss_reduction = {
        "number": 2.5,
        "callable": lambda samples: 3 * samples,
        "mse_loss": lambda samples: samples * 4 * rows / 2,
    }.get(reduction, reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    consequent.attach(optimizer, model, damping=1e-9, loss_reduction=loss_reduction)
    z = model(x)
    loss = nn.functional.mse_loss(z, t) if reduction == "mse_loss" else 0.5 * (z - t).square().sum() / divisor
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(model(x), t, rtol=0, atol=1e-7)  # of ½‖z − t‖² the virtual targets are the targets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", 2.5, lambda samples: 3 * samples])
def test_loss_reduction_of_a_net(kind, reduction):
    model, x, t = build(kind)
    n = len(x)
    divisor = reduction(n) if callable(reduction) else {"mean": n, "sum": 1}.get(reduction, reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, loss_reduction=reduction)

    def loss_of(m):
        return 0.5 * (m(x) - t).square().sum() / divisor

    before, grads = weights(model), corrected(model, loss_of, samples=divisor)
    loss_of(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)


class Caller(nn.Module):
    """Takes its inputs in any wrapping, and has parts that can be called."""

    def __init__(self, body, pick=lambda inputs: inputs):
        super().__init__()
        self.encoder, self.decoder = body[:2], body[2:]
        self.pick = pick

    def forward(self, inputs=None, *others, **named):
        return self.decode(self.encode(self.pick(named if inputs is None else inputs)))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, h):
        return self.decoder(h)


def train_as_expected(model, loss_of, samples, steps=2, at="step"):
    """One backward pass for each loss; ``samples`` is what N must be for all of them together."""
    losses = loss_of if isinstance(loss_of, list) else [loss_of]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)
    for _ in range(steps):
        optimizer.zero_grad()
        before, grads = weights(model), corrected(model, *losses, samples=samples)
        for loss in losses:
            loss(model).backward()
        optimizer.step()
        assert_stepped(model, before, grads)
    assert correction.samples == samples
    correction.detach()


CALLS = {
    "positional": (lambda i: i, lambda m, x: m(x)),
    "keyword": (lambda i: i, lambda m, x: m(inputs=x)),
    "other keyword": (lambda i: i["pixels"], lambda m, x: m(scale=2.0, pixels=x)),
    "dict": (lambda i: i["x"], lambda m, x: m({"name": "batch", "x": x})),
    "nested list": (lambda i: i[0][1][0], lambda m, x: m([(None, [x])])),
    "scalar tensor first": (lambda i: i[1], lambda m, x: m((torch.tensor(0.5), x))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_wrapped_inputs(kind, call):
    body, x, t = build(kind)
    pick, how = CALLS[call]
    train_as_expected(Caller(body, pick), lambda m: mean_loss(how(m, x), t), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_over_parts_counts_samples_once(kind):
    """encode and decode called directly: N, not 2N."""
    body, x, t = build(kind)
    train_as_expected(Caller(body), lambda m: mean_loss(m.decode(m.encode(x)), t), len(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_parts_called_twice(kind, backwards):
    """Two batches through encode and decode: 2N where each has its own backward pass, N in one loss."""
    body, x, t = build(kind)
    y, u = build(kind, seed=4)[1:]
    losses = [lambda m: 0.5 * mean_loss(m.decode(m.encode(x)), t), lambda m: 0.5 * mean_loss(m.decode(m.encode(y)), u)]
    if backwards == 1:
        train_as_expected(Caller(body), lambda m: sum(loss_of(m) for loss_of in losses), len(x))
    else:
        train_as_expected(Caller(body), losses, 2 * len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_called_one_by_one(kind):
    body, x, t = build(kind)

    def loss_of(m):
        h = x
        for module in m:
            h = module(h)
        return mean_loss(h, t)

    train_as_expected(body, loss_of, len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_called_twice_in_one_loss_counts_once(kind):
    body, x, t = build(kind)
    train_as_expected(body, lambda m: mean_loss(m(x), t) + mean_loss(m(2 * x), t), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_called_twice_in_one_loss_counts_the_larger_batch(kind):
    body, x, t = build(kind)
    y, u = build(kind, batch=len(x) + 3, seed=4)[1:]
    train_as_expected(body, lambda m: mean_loss(m(x), t) + mean_loss(m(y), u), len(y))
    train_as_expected(body, lambda m: mean_loss(m(y), u) + mean_loss(m(x), t), len(y))


@pytest.mark.parametrize("kind", KINDS)
def test_two_backward_passes_add_up(kind):
    body, x, t = build(kind)
    train_as_expected(body, [lambda m: mean_loss(m(x), t), lambda m: mean_loss(m(2 * x), t)], 2 * len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_and_a_part_of_it(kind):
    """A call of the whole model and one of its encoder on the same samples: N."""
    body, x, t = build(kind)
    train_as_expected(Caller(body), lambda m: mean_loss(m(x), t) + m.encode(x).square().sum() / len(x), len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_model(kind):
    """Attached to the inner model, called through an outer one."""
    body, x, t = build(kind)
    outer = nn.Sequential(nn.Identity(), body)
    train_as_expected(body, lambda m: mean_loss((outer if m is body else m)(x), t), len(x))


@pytest.mark.parametrize(("width", "tokens"), [(40, 3), (4, 9)], ids=["wide", "tall"])
def test_sequences_count_samples_not_tokens(width, tokens):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)).double()
    x, t = torch.randn(4, tokens, width).double(), torch.randn(4, tokens, 3).double()
    train_as_expected(model, lambda m: mean_loss(m(x), t), 4)


@pytest.mark.parametrize(("width", "tokens"), [(40, 3), (4, 9)], ids=["wide", "tall"])
@pytest.mark.parametrize("call", ["positional", "keyword", "dict", "nested list"])
def test_sequences_flattened_inside_the_model(width, tokens, call):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Embedding(10, width), nn.Linear(width, 3)

        def forward(self, ids):
            ids = ids["ids"] if call == "dict" else ids[0][0] if call == "nested list" else ids
            return self.layer(self.embed(ids).flatten(0, 1)).unflatten(0, ids.shape)

    ids, t = torch.randint(10, (4, tokens)), torch.randn(4, tokens, 3).double()
    how = {
        "positional": lambda m: m(ids),
        "keyword": lambda m: m(ids=ids),
        "dict": lambda m: m({"ids": ids}),
        "nested list": lambda m: m([(ids,)]),
    }[call]
    train_as_expected(Model().double(), lambda m: mean_loss(how(m), t), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_inputs(kind):
    body, x, t = build(kind)
    train_as_expected(body, lambda m: 0.5 * (m(x[0]) - t[0]).square().sum(), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_inputs_one_after_the_other(kind):
    """Five single samples: N = 5 if each has its own backward pass, and 1 if they are one loss."""
    body, x, t = build(kind)
    losses = [lambda m, i=i: 0.5 * (m(x[i]) - t[i]).square().sum() / 5 for i in range(5)]
    train_as_expected(body, losses, 5)
    train_as_expected(body, lambda m: sum(loss_of(m) for loss_of in losses), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_one(kind):
    body, x, t = build(kind, batch=1)
    train_as_expected(body, lambda m: mean_loss(m(x), t), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_one_is_nlms(kind):
    """One linear layer, one sample: the gradient divided by ‖x‖² + 1 (bias) + λ."""
    _, x, _ = build(kind, batch=1)
    x = x.flatten(1)
    model = nn.Linear(x.shape[1], 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)
    model(x).sum().backward()
    optimizer.step()
    divisor = float(x.square().sum()) + 1 + DAMPING
    grads = {"weight": x.expand(2, -1) / divisor, "bias": torch.ones(2, dtype=torch.float64) / divisor}
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", 5, lambda samples: 3 * samples])
def test_empty_batch_changes_nothing(kind, reduction):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, loss_reduction=reduction)
    before = weights(model)
    model(x[:0]).sum().backward()
    optimizer.step()
    assert_stepped(model, before, {})
    optimizer.zero_grad()
    divisor = reduction(len(x)) if callable(reduction) else {"mean": len(x), "sum": 1}.get(reduction, reduction)

    def loss_of(m):
        return 0.5 * (m(x) - t).square().sum() / divisor

    grads = corrected(model, loss_of, samples=divisor)
    loss_of(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)


AT = pytest.mark.parametrize("at", ["step", "backward"])
SIZES = pytest.mark.parametrize(("width", "samples"), [(40, 3), (4, 9)], ids=["wide", "tall"])


def data(samples, width):
    return torch.randn(samples, width).double(), torch.randn(samples, width).double()


@AT
@SIZES
@pytest.mark.parametrize("by", ["itself", "a child"])
def test_a_module_that_calls_itself(width, samples, by, at):
    """It enters once, however deep it goes."""
    torch.manual_seed(0)

    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x, depth=3):
            if depth == 0:
                return self.other(x)
            return self(self.layer(x).tanh(), depth - 1) + x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Recursive()

        def forward(self, x):
            return self.inner(x)

    model = Recursive() if by == "itself" else Outer()
    x, t = data(samples, width)
    train_as_expected(model.double(), lambda m: mean_loss(m(x), t), samples, at=at)


@AT
@SIZES
@pytest.mark.parametrize("at_start", ["samples", "zeros", "expanded parameter"])
def test_a_method_that_calls_a_part_five_times(width, samples, at_start, at):
    """Not through ``forward``: each call of the part is an entry, and all of them are of the same samples."""
    torch.manual_seed(0)

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.start = nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Parameter(torch.zeros(width))

        def unroll(self, x):
            h = {"samples": x, "zeros": torch.zeros_like(x), "expanded parameter": self.start.expand_as(x)}[at_start]
            for _ in range(5):
                h = self.cell(h) + x
            return h

    x, t = data(samples, width)
    train_as_expected(Unrolled().double(), lambda m: mean_loss(m.unroll(x), t), samples, at=at)


@AT
@SIZES
@pytest.mark.parametrize("more", [0, 2])
def test_a_discriminators_two_batches(width, samples, more, at):
    """D(real) and D(fake) in one loss, each a mean: n, and where they differ the larger one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()
    real, fake = data(samples, width)[0], data(samples + more, width)[0]

    def loss_of(m):
        return nn.functional.softplus(-m(real)).mean() + nn.functional.softplus(m(fake)).mean()

    train_as_expected(model, loss_of, samples + more, at=at)


@AT
@pytest.mark.parametrize("samples", [5, 12])
@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_a_learned_vector_as_long_as_the_batch(samples, kind, at):
    """A layer is fed with a single vector, of as many numbers as entered the model: no unbatched sample for that."""
    torch.manual_seed(0)

    class Styled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.latent = nn.Embedding(5, 4), nn.Parameter(torch.randn(samples))
            self.style, self.readout = nn.Linear(samples, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.embedding(x) if kind == "labels" else x[:, None] * self.embedding.weight[0]
            return self.readout(torch.tanh(h + self.style(self.latent)))

    x = torch.randint(5, (samples,)) if kind == "labels" else torch.randn(samples).double()
    t = torch.randn(samples, 2).double()
    train_as_expected(Styled().double(), lambda m: mean_loss(m(x), t), samples, at=at)


@AT
@SIZES
def test_a_siamese_network(width, samples, at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)).double()
    x, y = data(samples, width)
    train_as_expected(model, lambda m: mean_loss(m(x), m(y)), samples, at=at)
