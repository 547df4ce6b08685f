"""What users do to models beside training them: copies, pickles, scripts, exports, other tools. And how scripts end."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from loops.networks import attached, batch, network, one_pass
from torch import nn

import consequent

MECHANISMS = pytest.mark.parametrize("averaging", [0.0, 0.9], ids=["own inputs", "averages"])


def trained(averaging, steps=2):
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, averaging=averaging)
    for step in range(steps):
        optimizer.zero_grad()
        one_pass(model, seed=step)
        optimizer.step()
    return model, optimizer, correction


@MECHANISMS
@pytest.mark.parametrize("steps", [0, 1])
def test_copies_and_pickles_are_plain(averaging, steps):
    model, optimizer, _ = trained(averaging, steps)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.zero_grad()
    one_pass(model)
    plain = network(torch.float32)
    plain.load_state_dict(model.state_dict())
    one_pass(plain)
    for one in copies:
        with torch.no_grad():
            for p in one.parameters():
                p.add_(0.0)
        one.zero_grad()
        one_pass(one)
        for p, q in zip(one.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        correction = consequent.attach(torch.optim.SGD(one.parameters(), lr=0.1), one)  # and may be corrected in turn
        assert len(correction.corrected) == 4
    assert optimizer is not None


def test_a_model_that_holds_its_correction_may_be_copied():
    model = network()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.correction = consequent.attach(model.optimizer, model)
    assert copy.deepcopy(model).correction is None
    assert pickle.loads(pickle.dumps(model.correction)) is None


@MECHANISMS
def test_a_saved_gradient_is_a_plain_tensor(averaging):
    """Of the second edition it could not be loaded with ``weights_only=True``."""
    model, *_ = trained(averaging)
    file = io.BytesIO()
    torch.save([p.grad for p in model.parameters()], file)
    file.seek(0)
    for loaded, p in zip(torch.load(file, weights_only=True), model.parameters(), strict=True):
        assert torch.equal(loaded, p.grad)
        assert type(p.grad) is torch.Tensor


class Branching(nn.Module):
    """Its forward uses names of this module, and a loop, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.upsample = nn.ConvTranspose1d(1, 1, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.relu(layer(x)) if bool(x.sum() > 0) else layer(x)
        return self.upsample(x.unsqueeze(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@MECHANISMS
def test_scripting_and_tracing(averaging):
    """Hooks on every container broke both in the second edition."""
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(3, 4)
    consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, averaging=averaging)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.jit.trace(model, x, check_trace=False)(x), model(x))


@MECHANISMS
def test_export(averaging):
    model, _, _ = trained(averaging)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        program = torch.export.export(model.eval(), (x,), strict=False)
        torch.testing.assert_close(program.module()(x), model(x))


def test_the_fast_path_of_transformers_stays():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.eval()
    with torch.no_grad(), torch.profiler.profile() as profiler:
        model(torch.randn(2, 5, 8))
    assert any("_transformer_encoder_layer_fwd" in event.key for event in profiler.key_averages())


@MECHANISMS
def test_an_empty_batch(averaging):
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, averaging=averaging)
    for samples in (0, 3, 0):
        optimizer.zero_grad()
        model(torch.randn(samples, 2, 4)).square().sum().backward()
        optimizer.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert samples or not any(p.grad.any() for p in model.parameters())


@MECHANISMS
def test_all_zero_inputs_and_duplicated_samples(averaging):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, averaging=averaging)
    for x in (torch.zeros(4, 6), torch.randn(1, 6).repeat(4, 1)):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert all(p.grad.isfinite().all() for p in model.parameters())


ENDS_EARLY = """
import torch, consequent
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
correction = consequent.attach(optimizer, model, averaging={averaging})
loss = model(torch.randn(3, 4)).square().mean()
loss.backward()
optimizer.step()
"""


@MECHANISMS
def test_a_script_may_end_while_something_is_attached(averaging):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY.format(averaging=averaging)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def switches():
    """All that holds for the whole process, and that the second edition changed for a while."""
    return {
        "gc.disable": (gc, "disable"),
        "sys._current_frames": (sys, "_current_frames"),
        "precision": (torch, "set_float32_matmul_precision"),
        "linalg": (torch.backends.cuda, "preferred_linalg_library"),
        "grad": (torch, "set_num_threads"),
        "dtype": (torch, "set_default_dtype"),
    }


@MECHANISMS
def test_nothing_of_the_whole_process_is_switched(averaging, monkeypatch):
    model, optimizer = attached(network(torch.float32), averaging=averaging)

    def refuse(*args, **kwargs):
        raise AssertionError("a switch of the whole process was touched")

    for where, name in switches().values():
        monkeypatch.setattr(where, name, refuse)
    for step in range(2):
        optimizer.zero_grad()
        one_pass(model, seed=step)
        optimizer.step()


@MECHANISMS
def test_nothing_grows_with_the_steps(averaging):
    """Whatever sizes the batches have: a table for each was kept in the second edition."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, averaging=averaging)

    def tensors():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    counts = []
    for samples in range(1, 61):
        optimizer.zero_grad()
        model(torch.randn(samples, 6)).square().mean().backward()
        optimizer.step()
        if samples % 20 == 0:
            counts.append(tensors())
    assert counts[2] <= counts[1]


@MECHANISMS
def test_a_model_that_is_thrown_away_is_freed(averaging):
    model, optimizer, correction = trained(averaging)
    kept = weakref.ref(model[5].weight)
    assert kept() is not None
    del model, optimizer, correction
    gc.collect()
    assert kept() is None


def test_inside_of_torch_func_layers_are_plain():
    model, plain = network(), network()
    consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)

    def loss(parameters, one, x):
        return torch.func.functional_call(one, parameters, (x,)).square().mean()

    for make in (torch.func.grad, lambda f: torch.func.jacrev(f)):
        found = make(lambda p: loss(p, model, x))(dict(model.named_parameters()))
        wanted = make(lambda p: loss(p, plain, x))(dict(plain.named_parameters()))
        torch.testing.assert_close(found, wanted)
    each = torch.func.vmap(lambda sample: model(sample[None]).sum())(x)
    torch.testing.assert_close(each, plain(x).sum(1))


def test_functional_call_hands_the_correction_to_its_own_tensors():
    model, plain = network(), network()
    consequent.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    torch.func.functional_call(model, others, (x,)).square().mean().backward()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(others[name].grad, p.grad)
    plain(x).square().mean().backward()
    assert not torch.allclose(plain[5].weight.grad, model[5].weight.grad)


def test_a_model_that_moves_to_another_dtype_after_attaching():
    model, optimizer = attached(network(torch.float32))
    model.double()
    other, its = attached(network(torch.float32).double())
    for one, stepping in ((model, optimizer), (other, its)):
        one_pass(one)
        stepping.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class Image(torch.Tensor):
    """A class of tensors, as libraries for images have them."""


def stepped(averaging, run):
    model, optimizer = attached(network(), 0.01, averaging=averaging)
    run(model)
    optimizer.step()
    return [p.grad for p in model.parameters()]


@MECHANISMS
def test_tensors_of_a_class_of_their_own(averaging):
    x, y = batch()

    def run(model, x=x):
        outputs = model(x)
        assert type(outputs) is type(x)
        nn.functional.cross_entropy(outputs, y).backward()

    images = stepped(averaging, lambda model: run(model, x.as_subclass(Image)))
    for grad, wanted in zip(images, stepped(averaging, run), strict=True):
        assert type(grad) is torch.Tensor
        torch.testing.assert_close(grad, wanted)


@MECHANISMS
@pytest.mark.parametrize("shape", [(0, 7, 4), (3, 0, 4), (0, 4)], ids=str)
def test_empty_batches_of_sequences(averaging, shape):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, averaging=averaging)
    outputs = model(torch.randn(shape))
    assert outputs.shape == (*shape[:-1], 2)
    outputs.sum().backward()
    optimizer.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


class Waiting(nn.Module):
    """A model whose evaluation waits inside of its forward until it is told to go on."""

    def __init__(self, model):
        super().__init__()
        self.model, self.entered, self.go_on = model, threading.Event(), threading.Event()

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.entered.set()
            assert self.go_on.wait(60)
        return self.model(x)


@MECHANISMS
def test_an_evaluation_in_another_thread_changes_nothing(averaging):
    wanted = stepped(averaging, one_pass)
    model = Waiting(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, averaging=averaging)
    evaluation = threading.Thread(target=torch.no_grad()(model), args=(batch(100)[0],))
    evaluation.start()
    assert model.entered.wait(60)
    one_pass(model)
    optimizer.step()
    model.go_on.set()
    evaluation.join()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)
