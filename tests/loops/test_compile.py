"""``torch.compile(model, fullgraph=True)`` gives the same numbers, and compiles no more often than it must."""

import copy

import pytest
import torch
from expected import check_same_grads, grads_of
from loops.networks import Recurring, attached, batch, half_squares, loss_of, network, one_pass
from torch import nn
from torch._dynamo.utils import counters

import consequent

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_own_inputs(backend, optimizer):
    eager, eager_optimizer = attached(network(torch.float32), 0.01, optimizer)
    model, its_optimizer = attached(network(torch.float32), 0.01, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (eager_optimizer, its_optimizer)]
    for step in range(4):
        for one, stepping in ((eager, eager_optimizer), (compiled, its_optimizer)):
            stepping.zero_grad()
            one_pass(one, seed=step)
            stepping.step()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)
        for scheduler in schedulers:
            scheduler.step()  # does not make it compile anew
    assert graphs() == 1


def test_batches_of_other_sizes_are_compiled_once_more_in_all():
    eager, _ = attached(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)))
    model = copy.deepcopy(eager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for samples in (8, 8, 9, 5, 13, 20):
        x = torch.randn(samples, 30)
        for one in (eager, compiled):
            one.zero_grad()
            one(x).square().mean().backward()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)
    assert graphs() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_called_several_times_is_right_from_the_second_step_on(backend):
    torch.manual_seed(0)
    plain, x = Recurring(3), torch.randn(7, 4)
    eager, _ = attached(plain)
    model, _ = attached(plain)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    half_squares(eager, x)
    for step in range(3):
        model.zero_grad()
        half_squares(compiled, x)
        if step > 0:
            check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)
    assert graphs() == 2


@pytest.mark.parametrize("order", ["compiled, then attached", "used, then attached"])
def test_a_model_that_was_compiled_before(order):
    model, eager = network(torch.float32), network(torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if order == "used, then attached":
        one_pass(compiled)
        model.zero_grad()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, eager)]
    correction = consequent.attach(optimizers[0], compiled)
    assert list(correction.corrected) == ["0", "2", "5", "7"]
    consequent.attach(optimizers[1], eager)
    for one in (compiled, eager):
        one_pass(one)
    check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)
    correction.detach()
    model.zero_grad()
    one_pass(compiled)
    plain = network(torch.float32)
    one_pass(plain)
    check_same_grads(grads_of(model), grads_of(plain), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_look_by_a_graph_of_their_own(backend):
    options = {"averaging": 0.95, "refresh": 3}
    eager, eager_optimizer = attached(network(torch.float32), 0.01, **options)
    model, optimizer = attached(network(torch.float32), 0.01, **options)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    seen = []
    for step in range(10):
        for one, stepping in ((eager, eager_optimizer), (compiled, optimizer)):
            stepping.zero_grad()
            one_pass(one, seed=step)
            stepping.step()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-3)
        seen.append(graphs())
    assert seen == [1] + [2] * 9


def test_micro_batches_and_evaluation_in_a_compiled_model_with_averages():
    options = {"averaging": 0.95, "refresh": 2}
    eager, eager_optimizer = attached(network(torch.float32), 0.01, **options)
    model, optimizer = attached(network(torch.float32), 0.01, **options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, y = batch(dtype=torch.float32)
    for step in range(8):
        for one, stepping in ((eager, eager_optimizer), (compiled, optimizer)):
            stepping.zero_grad()
            for part in range(3):
                rows = slice(4 * part, 4 * part + 4)
                (loss_of(one, x[rows], y[rows]) / 3).backward()
            with torch.no_grad():
                one(x)
            stepping.step()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-3)
        if step == 3:
            known = graphs()
    assert graphs() == known


def test_parts_that_are_compiled():
    eager, _ = attached(network(torch.float32))
    model, _ = attached(network(torch.float32))
    model[5].compile(fullgraph=True, backend="aot_eager")
    for one in (eager, model):
        one_pass(one)
    check_same_grads(grads_of(model), grads_of(eager), rtol=1e-5)


def test_a_transposed_convolution_and_other_paddings():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
        nn.Conv2d(3, 2, 2, padding="same", dilation=3),
    )
    eager, _ = attached(plain)
    model, _ = attached(plain)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 2, 6, 6)
    for one in (eager, compiled):
        one(x).square().mean().backward()
    check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)


def test_models_that_differ_in_numbers_alone():
    """Dynamo makes a variable of a number that is another one in a second model of the same kind."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)), torch.randn(6, 20)
    for options in ({"damping": 0.3}, {"damping": 0.7}, {"relative_damping": 0.5}, {"loss_reduction": 3.5}):
        eager, _ = attached(plain, **options)
        model, _ = attached(plain, **options)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for one in (eager, compiled):
            one(x).square().mean().backward()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.mix, self.scale = nn.Conv2d(channels, channels, 3), nn.Linear(3, 3)

    def forward(self, x):
        return x + self.mix(nn.functional.pad(self.scale(x), (1, 1, 1, 1))).relu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"averaging": 0.9, "refresh": 2}], ids=["own inputs", "averages"])
def test_many_blocks_that_are_compiled_one_by_one(options, backend):
    """More of them than Dynamo compiles of one function, so they must share what is compiled."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(4) for _ in range(10)])
    eager, eager_optimizer = attached(plain, 0.01, **options)
    model, optimizer = attached(plain, 0.01, **options)
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    for step in range(4):
        x = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(step))
        for one, stepping in ((eager, eager_optimizer), (model, optimizer)):
            stepping.zero_grad()
            one(x).square().mean().backward()
            stepping.step()
    check_same_grads(grads_of(model), grads_of(eager), rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_convolution_with_fewer_positions_than_features(backend):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(16, 8, 3, stride=2, dilation=2), nn.Flatten(), nn.Linear(8, 3))
    eager, _ = attached(plain)
    model, _ = attached(plain)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for samples in (2, 5, 9):
        x = torch.randn(samples, 16, 6, 6)
        for one in (eager, compiled):
            one.zero_grad()
            one(x).square().mean().backward()
        check_same_grads(grads_of(model), grads_of(eager), rtol=1e-4)
