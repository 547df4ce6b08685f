"""nn.MultiheadAttention against sums over heads, with the ΔZ of every projection seen."""

import copy

import pytest
import reference
import torch
from attention_reference import Naive
from torch import nn

import consequent
from models.expected import check_same, check_same_grads, expected_backward, half_squares, twin_of

AT = ["step", "backward"]
E, HEADS = 4, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


OPTIONS = {
    "usual": {},
    "no-bias": {"bias": False},
    "bias-kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True, "add_bias_kv": True},
    "other-keys": {"kdim": 3, "vdim": 5},
    "other-values-no-bias": {"vdim": 2, "bias": False},
}
DAMPINGS = {"absolute": 0.03, "relative": ("relative", 0.2)}


def streams(module, kind, samples, length):
    """Query, key and value, ``[samples, length, features]``."""
    x = normal(samples, length, E)
    if kind == "self" and module.in_proj_weight is not None:
        return x, x, x
    memory = normal(samples, length + 2, module.kdim, seed=1)
    if kind == "memory" and module.kdim == module.vdim:
        return x, memory, memory
    return x, memory, normal(samples, length + 2, module.vdim, seed=2)


def made(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, HEADS, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases are 0 at first
    return module, copy.deepcopy(module)


def attached(module, at, damping, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"loss_reduction": "sum", **reference.damping_options(damping), **options}
    correction = consequent.attach(optimizer, module, at=at, **options)
    vars(module)["kept"] = optimizer
    return correction


def called(module, given, **options):
    """With samples first, however the module has it."""
    is_first = module.batch_first
    by_id = {id(x): (x if is_first else x.transpose(0, 1)) for x in given}  # one tensor stays one
    outputs = module(*(by_id[id(x)] for x in given), **options)[0]
    return outputs if is_first else outputs.transpose(0, 1)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("damping", DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 5)], ids=["few-rows", "some-rows", "many-rows"])
@pytest.mark.parametrize("kind", ["self", "memory", "all-different"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_projections(options, kind, shape, damping, at):
    module, twin = made(**options, batch_first=shape == (2, 2))
    correction = attached(module, at, damping)
    given = streams(module, kind, *shape)
    outputs = called(module, given, need_weights=at == "step")
    half_squares(outputs).backward()
    correction.step()
    naive = Naive(twin)
    expected = naive(*given)
    torch.testing.assert_close(outputs, expected)
    half_squares(expected).backward()
    naive.correct(damping)
    check_same_grads(module, twin)
    assert correction.plain == {}


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks(need_weights, at):
    module, twin = made(add_bias_kv=True, batch_first=True)
    correction = attached(module, at, 0.03)
    x = normal(3, 5, E)
    mask = torch.ones(5, 5).triu(1).bool()
    padding = torch.zeros(3, 5).bool()
    padding[1, 3:] = True
    options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
    half_squares(called(module, (x, x, x), **options)).backward()
    correction.step()
    naive = Naive(twin)
    half_squares(naive(x, x, x, mask, padding)).backward()
    naive.correct(0.03)
    check_same_grads(module, twin)


@pytest.mark.parametrize("at", AT)
def test_one_sample_without_a_batch(at):
    module, twin = made()
    correction = attached(module, at, 0.03, loss_reduction="mean")
    x = normal(5, E)
    half_squares(module(x, x, x)[0][None]).backward()
    correction.step()
    naive = Naive(twin)
    half_squares(naive(x[None], x[None], x[None])).backward()
    naive.correct(0.03)
    check_same_grads(module, twin)
    assert correction.samples == 1


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("second", ["self", "memory", "all-different"])
@pytest.mark.parametrize("length", [1, 5])
def test_called_in_two_ways(length, second, at):
    module, twin = made(batch_first=True)
    correction = attached(module, at, 0.03)
    naive = Naive(twin)
    first, then = streams(module, "self", 2, length), streams(module, second, 1, length)
    (half_squares(called(module, first)) + half_squares(called(module, then))).backward()
    correction.step()
    (half_squares(naive(*first)) + half_squares(naive(*then))).backward()
    naive.correct(0.03)
    check_same_grads(module, twin)


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize(
    "names", [("in_proj_weight",), ("in_proj_bias",), ("out_proj.weight",), ("in_proj_weight", "in_proj_bias")], ids=str
)
def test_frozen_parameters_take_no_part(names, at):
    module, twin = made(batch_first=True)
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    correction = attached(module, at, 0.03)
    x = normal(3, 5, E)
    half_squares(called(module, (x, x, x))).backward()
    correction.step()
    naive = Naive(twin)
    half_squares(naive(x, x, x)).backward()
    plain = {name: p.grad.clone() for name, p in twin.named_parameters()}
    naive.correct(0.03)
    for name, parameter in module.named_parameters():
        owner = "in_proj" if name.startswith("in_proj") else "out_proj"
        mine = [other for other in names if other.startswith(owner)]
        if name in names:
            assert parameter.grad is None
        elif not mine:
            torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)
        elif name.endswith("bias"):
            torch.testing.assert_close(parameter.grad, plain[name] / (15 + 0.03))
        else:
            X = x.flatten(0, 1)
            new = torch.linalg.solve(X.T @ X + 0.03 * torch.eye(E, dtype=X.dtype), plain[name].T).T
            torch.testing.assert_close(parameter.grad, new)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("at", AT)
def test_transformer_encoder_layer(at, length, training):
    """As the very same layer made of Linear projections, which are corrected by themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(E, HEADS, dim_feedforward=12, dropout=0.0, batch_first=True), nn.Linear(E, 2)
    ).double()
    twin = twin_of(model)
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    correction = consequent.attach(optimizer, model, at=at)
    reference_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    layers = [twin[0].linear1, twin[0].linear2, twin[1]]
    for seed in range(2):
        x = normal(3, length, E, seed=seed)
        optimizer.zero_grad()
        half_squares(model(x)).backward()
        optimizer.step()
        naive = Naive(twin[0].self_attn)
        reference_optimizer.zero_grad()

        def forward(m, x=x, naive=naive):
            block = m[0]
            x = block.norm1(x + naive(x, x, x))
            return m[1](block.norm2(x + block.linear2(torch.relu(block.linear1(x)))))

        expected_backward(twin, lambda m, forward=forward: half_squares(forward(m)), 3, layers=layers)
        naive.correct(reference.DEFAULT_DAMPING, 3)
        check_same_grads(model, twin)
        reference_optimizer.step()
    check_same(model, twin)
    assert list(correction.corrected) == ["0.self_attn", "0.linear1", "0.linear2", "1"]
    assert set(correction.plain) == {"0.norm1", "0.norm2"}
    with torch.no_grad():  # perhaps by torch's fast path
        torch.testing.assert_close(model.eval()(x), twin.eval()(x))


def test_dropout_draws_the_same_numbers():
    module, twin = made(dropout=0.5)
    attached(module, "step", 0.03)
    x = normal(5, 2, E)
    torch.manual_seed(1)
    mine = module(x, x, x)[0]
    torch.manual_seed(1)
    assert torch.equal(mine, twin(x, x, x)[0])


@pytest.mark.parametrize("at", AT)
def test_a_gradient_that_is_differentiated_in_turn_leaves_it_plain(at):
    module, twin = made()
    correction = attached(module, at, 0.03)
    for m in (module, twin):
        x = normal(5, 2, E).requires_grad_()
        loss = half_squares(m(x, x, x)[0])
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
    check_same_grads(module, twin)
    assert "create_graph" in correction.plain[""]


def test_a_part_that_is_excluded():
    model = nn.Sequential(nn.Linear(3, E), nn.TransformerEncoderLayer(E, HEADS, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, exclude="1.self_attn.out_proj")
    assert correction.plain["1.self_attn"] == "'1.self_attn.out_proj', a part of it, is excluded"
    assert correction.plain["1.self_attn.out_proj"] == "excluded"


def test_linear_layers_alone():
    model = nn.Sequential(nn.Linear(3, E), nn.TransformerEncoderLayer(E, HEADS, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, include=nn.Linear)
    assert correction.plain["1.self_attn"] == "not included"
    assert correction.plain["1.self_attn.out_proj"] == (
        "nn.MultiheadAttention uses its weight without calling it, and is not corrected itself"
    )


def test_few_rows_whose_buffer_is_filled_anew_before_the_step():
    module, twin = made()
    correction = attached(module, "step", 0.03)
    x = normal(1, 2, E)
    half_squares(module(x, x, x)[0]).backward()
    x.fill_(7)
    correction.step()
    naive = Naive(twin)
    x = normal(1, 2, E).transpose(0, 1)
    half_squares(naive(x, x, x).transpose(0, 1)).backward()
    naive.correct(0.03)
    check_same_grads(module, twin)


def test_a_stranger_among_the_weights_is_listed():
    class Doubled(nn.MultiheadAttention):
        def forward(self, x):
            return nn.functional.multi_head_attention_forward(
                *(x, x, x, E, HEADS, 2 * self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0),
                *(self.out_proj.weight, self.out_proj.bias),
            )[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(E, E), Doubled(E, HEADS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    model(torch.randn(5, 2, E)).square().sum().backward()
    with pytest.warns(consequent.ConsequentWarning, match="does not use its weights as they are"):
        optimizer.step()
    assert list(correction.corrected) == ["0"]


def test_compiled_models_break_their_graph_at_the_layer():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(E, HEADS, 8, dropout=0.0, batch_first=True), nn.Linear(E, 2))
    model = model.double()
    twin = twin_of(model)
    x = normal(3, 5, E)
    grads = []
    for m, call in ((model, torch.compile(model, backend="eager")), (twin, twin)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        correction = consequent.attach(optimizer, m)
        half_squares(call(x)).backward()
        optimizer.step()
        assert "0.self_attn" in correction.corrected
        grads.append([p.grad for p in m.parameters()])
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()
