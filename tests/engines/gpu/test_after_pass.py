"""`at="backward"` on a GPU: all weights of a pass are solved for at its end, with the numbers of one by one."""

import copy
import gc
import weakref

import pytest
import torch
from recorder import Recorder
from torch import nn

pytest.importorskip("triton")

import consequent
from consequent.engines.gpu import after_pass, kernels
from consequent.engines.gpu.kernels import dense
from consequent.engines.gpu.recordings import Replays
from consequent.engines.gpu.row_launches import RowLaunches
from consequent.engines.inverse_factor import inverse_factor
from consequent.statistics.moment import Moment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class AtOnce:
    """Stands in for what computes moments beside the pass, for which there must be a GPU."""

    def add(self, record, damping):
        rows = record.statistic
        level = damping.level(rows.rows, rows.columns)
        matrix = rows.uses[0].operation.second_moment(rows.uses[0].inputs, ones=bool(rows.biases))
        factor = (damping, inverse_factor(matrix, level))
        rows.uses[0].let_go()
        record.statistic = Moment(rows.uses, rows.features, rows.biases, rows.rows, matrix, factor)

    def join(self):
        pass

    def forget(self):
        pass


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(after_pass, "Ahead", AtOnce)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 16, 20),
        nn.ReLU(),
        nn.Linear(20, 20, bias=False),
        nn.ReLU(),
        nn.Linear(20, 5),
        nn.ReLU(),
        nn.Linear(5, 4),
    ).to(DEVICE)


def data(samples=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 2, 4, 4, generator=generator).to(DEVICE)


def backward(model, x, scale=1.0):
    (model(x).square().mean() * scale).backward()


def gradients(model):
    return {name: p.grad.detach().cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def expected(model, x, **options):
    """On the CPU in float64, where every weight is solved for by itself."""
    other = copy.deepcopy(model).cpu().double()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    consequent.attach(optimizer, other, at="backward", **options)
    backward(other, x.cpu().double())
    return gradients(other)


def assert_same(found, wanted, tolerance=2e-4):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


def attached(model, **options):
    """The optimiser, which has to stay alive, and the correction."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return optimizer, consequent.attach(optimizer, model, at="backward", **options)


@pytest.fixture
def waited(monkeypatch):
    """The layers that waited for the end of their pass."""
    names = []
    original = after_pass.AfterPass.add

    def add(self, gathered, damping, scale):
        names.append(tuple(gathered.products[0].use.weight.shape))
        original(self, gathered, damping, scale)

    monkeypatch.setattr(after_pass.AfterPass, "add", add)
    return names


@pytest.mark.parametrize("options", [{}, {"damping": 0.1}, {"relative_damping": 0.01}], ids=str)
@pytest.mark.parametrize("most_rows", [128, 3])
def test_the_gradients_of_one_after_the_other(monkeypatch, options, most_rows, waited):
    monkeypatch.setattr(dense, "MOST_ROWS", most_rows)
    model, x = network(), data()
    wanted = expected(model, x, **options)
    optimizer, correction = attached(model, **options)
    backward(model, x)
    assert_same(gradients(model), wanted)
    assert len(waited) == 5
    assert correction._rewriter.sides == {
        "0": "features",
        "3": "samples",
        "5": "samples",
        "7": "samples",
        "9": "features",
    }
    assert correction.counters.steps == 1
    optimizer.zero_grad()
    backward(model, x)
    assert_same(gradients(model), wanted)


def test_passes_add_up(waited):
    model, x = network(), data()
    first, second = expected(model, x), expected(model, -x[:4])
    _kept = attached(model)
    backward(model, x)
    backward(model, -x[:4])
    assert_same(gradients(model), {name: first[name] + second[name] for name in first})
    assert len(waited) == 10


def test_who_wants_the_gradient_during_the_pass_gets_it(waited):
    model, x = network(), data()
    wanted = expected(model, x)
    _kept = attached(model)
    seen = {}
    model[3].weight.register_hook(lambda grad: seen.setdefault("hook", grad.clone()))
    model[5].weight.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad.clone()))

    def look(*_):
        seen["accumulator"] = model[7].weight.grad.clone()

    accumulator = torch.autograd.graph.get_gradient_edge(model[7].weight).node
    accumulator.register_hook(look)
    backward(model, x)
    assert_same(gradients(model), wanted)
    for name, layer in (("hook", 3), ("after", 5), ("accumulator", 7)):
        right = wanted[f"{layer}.weight"]
        assert (seen[name].cpu().double() - right).norm() <= 2e-4 * right.norm()
    assert len(waited) == 2


def test_autograd_grad_and_create_graph_get_theirs_at_once(waited):
    model, x = network(), data()
    wanted = expected(model, x)
    _kept = attached(model)
    weight = model[3].weight
    (found,) = torch.autograd.grad(model(x).square().mean(), [weight])
    assert (found.cpu().double() - wanted["3.weight"]).norm() <= 2e-4 * wanted["3.weight"].norm()
    assert weight.grad is None
    assert not waited


def test_a_pass_that_raises_leaves_nothing_behind():
    model, x = network(), data()
    wanted = expected(model, x)
    _kept, correction = attached(model)
    hidden = model[:5](x)
    hidden.register_hook(_raise)
    loss = model[5:](hidden).square().mean()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    assert all(p.grad is None for p in model[5:].parameters())
    backward(model, x)
    assert_same(gradients(model), wanted)
    assert not correction._passes.after_pass._passes


def _raise(grad):
    raise RuntimeError("on purpose")


def test_a_weight_that_is_used_twice_does_not_wait(waited):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE)
    model[2].weight = model[0].weight
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = expected(model, x)
    _kept = attached(model)
    backward(model, x)
    assert_same(gradients(model), wanted)
    assert not waited


@pytest.mark.parametrize("channels", [2, 3])
def test_transposed_convolutions_do_not_wait(channels, waited):
    """Their weights are [channels, outputs, …], which may well look like [outputs, channels, …]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(2, channels, 3, padding=1), nn.Flatten()).to(DEVICE)
    x = data()
    wanted = expected(model, x)
    _kept = attached(model)
    backward(model, x)
    assert_same(gradients(model), wanted)
    assert not waited


def test_hooks_that_come_later_are_seen(waited):
    model, x = network(), data()
    _kept = attached(model)
    backward(model, x)
    assert len(waited) == 5
    seen = []
    accumulator = torch.autograd.graph.get_gradient_edge(model[5].weight).node
    accumulator.register_hook(lambda *_: seen.append(model[5].weight.grad is not None))
    model.zero_grad()
    backward(model, x)
    assert seen == [True]
    assert len(waited) == 9


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_what_is_not_finite_stays_in_the_gradients():
    model, x = network(), data()
    x[0, 0, 0, 0] = torch.nan
    _kept, correction = attached(model)
    backward(model, x)
    assert all(not p.grad.sum().isfinite() for p in model.parameters())
    assert correction.counters.steps == 1


def test_recorded_launches_read_what_is_there_now_and_overwrite_no_gradient(monkeypatch):
    monkeypatch.setattr(dense, "MOST_ROWS", 3)
    if DEVICE.type == "cpu":
        replays = Replays(Recorder(), 2**30)
        monkeypatch.setattr(RowLaunches, "_replays_on", lambda self, device: replays)
    Recorder.replayed = 0
    model = network()
    optimizer, correction = attached(model)
    kept = []
    for seed in range(6):
        x = torch.randn(7, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        model.zero_grad()
        backward(model, x)
        assert_same(gradients(model), expected(model, x))
        kept.append(([p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]))
    for its, copies in kept:
        assert all(torch.equal(*pair) for pair in zip(its, copies, strict=True))
    if DEVICE.type == "cpu":
        assert Recorder.replayed >= 3
    memory = [weakref.ref(one) for its in correction._passes.after_pass._launches._copies.values() for one in its]
    assert memory
    correction.detach()
    if DEVICE.type == "cpu":
        replays._pieces.clear()
    gc.collect()
    assert not any(one() is not None for one in memory), "what is recorded is let go"
    del optimizer
