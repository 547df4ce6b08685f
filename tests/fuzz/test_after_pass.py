"""The fuzzer's loops as a GPU goes through them with `at="backward"`, where weights are solved for at a pass's end.

Kernels and side streams are replaced by plain solves in the model's own dtype; who waits, for whom, and what becomes of
`.grad` is what is tested.
"""

import threading

import pytest
import torch
from torch import nn

import consequent
from consequent.engines.gpu import after_pass
from consequent.statistics.moment import Moment
from fuzz.run import IllegalError, run

SEEDS = range(90_000, 90_040)


class AtOnce:
    """Second moments without side streams; their factor is the moment itself, with λ."""

    def add(self, record, damping):
        rows = record.statistic
        use = rows.uses[0]
        matrix = use.operation.second_moment(use.inputs, ones=bool(rows.biases))
        use.let_go()
        factor = (damping, (matrix, damping.level(rows.rows, rows.columns)))
        record.statistic = Moment(rows.uses, rows.features, rows.biases, rows.rows, matrix, factor)

    def join(self):
        pass

    def forget(self):
        pass


class OneByOne:
    """In the place of the kernels for all layers."""

    def __init__(self, device, *, has_gradients):
        self.solves = []

    def add_features(self, weight_grad, bias_grad, factor, scale):
        self.solves.append((self.by_features, weight_grad, bias_grad, factor, scale))

    def add_dense(self, use, weight_grad, bias_grad, damping, scale):
        self.solves.append((self.by_samples, weight_grad, bias_grad, (use, damping), scale))

    def prepare(self):
        pass

    def write(self, counts):
        for solve, weight_grad, bias_grad, known, scale in self.solves:
            update = solve(weight_grad, bias_grad, *known) * scale
            weight_grad.copy_(update[:, : weight_grad[0].numel()].reshape(weight_grad.shape))
            if bias_grad is not None:
                bias_grad.copy_(update[:, -1])

    @staticmethod
    def by_features(weight_grad, bias_grad, moment, level):
        gradient = weight_grad.flatten(1)
        if bias_grad is not None:
            gradient = torch.cat([gradient, bias_grad[:, None]], dim=1)
        damped = moment + level(moment) * torch.eye(moment.shape[-1], dtype=moment.dtype)
        return torch.linalg.solve(damped[0], gradient.mT).mT

    @staticmethod
    def by_samples(weight_grad, bias_grad, use, damping):
        X, dZ = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (use.inputs, use.output_grad))
        if bias_grad is not None:
            X = torch.cat([X, X.new_ones(len(X), 1)], dim=1)
        gram = (X @ X.mT)[None]
        damped = gram + damping.level(*X.shape)(gram) * torch.eye(len(X), dtype=X.dtype)
        return torch.linalg.solve(damped[0], dZ).mT @ X


@pytest.fixture
def waited(monkeypatch):
    """How many weights waited for the end of their pass."""
    weights = []
    original = after_pass.AfterPass.add

    def add(self, gathered, damping, scale):
        weights.append(gathered.products[0].use.weight.shape)
        original(self, gathered, damping, scale)

    def is_ordinary(use):
        operation = use.operation
        is_odd = operation.is_sparse or operation.groups > 1 or not operation.has_rows_of_outputs
        return not is_odd and use.weight.is_contiguous()

    monkeypatch.setattr(after_pass.AfterPass, "add", add)
    monkeypatch.setattr(after_pass, "Ahead", AtOnce)
    monkeypatch.setattr(after_pass, "FusedStep", OneByOne)
    monkeypatch.setattr(after_pass, "fits_dense_kernel", lambda use: True)
    monkeypatch.setattr(after_pass, "_has_rows_for_kernels", lambda use, inputs, output_grad: use.operation.is_dense)
    monkeypatch.setattr(after_pass, "_is_ordinary", is_ordinary)
    return weights


def run_all():
    for seed in SEEDS:
        try:
            run(seed, "backward")
        except IllegalError:
            continue


def test_random_loops(waited):
    run_all()
    assert len(waited) > 3 * len(SEEDS)


@pytest.mark.usefixtures("waited")
def test_gradients_that_are_added_twice_are_found(monkeypatch):
    original = after_pass._add_to

    def add_twice(parameter, gradient):
        original(parameter, gradient.clone())
        original(parameter, gradient)

    monkeypatch.setattr(after_pass, "_add_to", add_twice)
    with pytest.raises(AssertionError):
        run_all()


def test_weights_wait_while_another_thread_calls_the_model(waited):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at="backward")
    x = torch.randn(5, 4, dtype=torch.float64)

    def evaluate(grad):
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()

    found = []
    for hook in (None, evaluate):
        hidden = model[1](model[0](x))
        if hook is not None:
            hidden.register_hook(hook)
        model[2](hidden).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
        optimizer.zero_grad()
    correction.detach()
    assert len(waited) == 4
    torch.testing.assert_close(found[1], found[0])
