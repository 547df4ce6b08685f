"""How much is compiled before a first step: each compilation takes a second or several."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import consequent

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import launch as launching
from consequent.engines.gpu.kernels.launch import launch, rehearse

DENSE = {"_gram": 1, "_factor": 1, "_solve": 1, "_look": 1, "_write": 1}
FEATURES = {"_factorise": 1, "_first_product": 1, "_second_product": 1}
LAGS = {"_multiply": 3, "_put_lags": 4}
EXPECTED = {
    "ResNet-20": FEATURES | LAGS | {"_turn_around": 2, "_multiply_strips": 1, "_add_splits": 1, "_pad": 1},
    "ResNet-20, channels first": FEATURES
    | LAGS
    | {"_turn_around": 3, "_multiply_strips": 1, "_add_splits": 1, "_pad": 1},
    "MLP 3072-8×800-10, batch 32": DENSE,
    "MLP 256-5×256-10, batch 16384": FEATURES | {"_pad": 1},
}


def test_what_is_compiled_for_known_networks():
    script = Path(__file__).with_name("count_compilations.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == EXPECTED


# ---- rehearsals -------------------------------------------------------------------------------------------------


class Parameter:
    is_constexpr = False

    def __init__(self, do_not_specialize=False, do_not_specialize_on_alignment=False):
        self.do_not_specialize = do_not_specialize
        self.do_not_specialize_on_alignment = do_not_specialize_on_alignment


class Kernel:
    """Notes who compiles and launches it; compiling takes until it is allowed."""

    def __init__(self):
        self.fn = object()
        self.params = [Parameter(), Parameter(), Parameter(do_not_specialize=True)]
        self.compiled, self.launched = [], []
        self.asked_for_its_key = []
        self.may_compile = threading.Event()
        self.error = None

    @property
    def cache_key(self):
        self.asked_for_its_key.append(threading.get_ident())
        return "of this kernel"

    def warmup(self, *arguments, grid, **options):
        assert self.may_compile.wait(10)
        self.compiled.append((arguments, threading.get_ident()))
        if self.error:
            raise self.error

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launched.append((arguments, len(self.compiled)))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((arguments, grid))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_being_compiled", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return Kernel()


def test_a_rehearsal_compiles_on_another_thread_and_launches_nothing(kernel):
    tensor = torch.zeros(4)
    rehearse(lambda: launch(kernel, (1,), (tensor, 5, 7)))
    assert not kernel.launched
    assert not kernel.compiled, "nobody waits"
    threading.Timer(0.05, kernel.may_compile.set).start()
    launch(kernel, (1,), (tensor, 6, 8))  # alike, as Triton sees it
    ((arguments, thread),) = kernel.compiled
    assert arguments == (torch.float32, 5, 7), "memory is not held on to"
    assert thread != threading.get_ident()
    ((_, compiled_before),) = kernel.launched
    assert compiled_before == 1, "the launch has waited"
    launch(kernel, (3,), (tensor, 6, 8))
    assert kernel.launched[1] == ((tensor, 6, 8), (3, 1, 1))


def test_the_keys_of_tritons_cache_do_not_depend_on_threads(kernel):
    """Triton 3.6 makes a function's from what it knows so far of the functions that it calls."""
    kernel.may_compile.set()
    rehearse(lambda: launch(kernel, (1,), (torch.zeros(4), 5, 7)))
    assert kernel.asked_for_its_key == [threading.get_ident()]


def test_what_was_launched_or_rehearsed_before_is_not_compiled_again(kernel):
    kernel.may_compile.set()
    tensor = torch.zeros(4)
    rehearse(lambda: [launch(kernel, (1,), (tensor, 5, 7)) for _ in range(2)])
    launch(kernel, (1,), (tensor, 5, 7))
    rehearse(lambda: launch(kernel, (1,), (tensor, 5, 7)))
    assert len(kernel.compiled) == len(kernel.launched) == 1
    assert not launching._being_compiled


@pytest.mark.parametrize("other", [(torch.zeros(4), 16, 7), (torch.zeros(5)[1:], 5, 7), (torch.zeros(4), 1, 7)])
def test_arguments_that_triton_tells_apart(kernel, other):
    kernel.may_compile.set()
    rehearse(lambda: [launch(kernel, (1,), arguments) for arguments in ((torch.zeros(4), 5, 7), other)])
    assert len(launching._being_compiled) == 2


def test_a_compilation_that_fails_is_left_to_the_launch(kernel):
    kernel.may_compile.set()
    kernel.error = RuntimeError("no room on the disk")
    rehearse(lambda: launch(kernel, (1,), (torch.zeros(4), 5, 7)))
    launch(kernel, (1,), (torch.zeros(4), 5, 7))
    assert len(kernel.launched) == 1


def test_a_rehearsal_that_fails_is_over(kernel):
    def work():
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        rehearse(work)
    launch(kernel, (1,), (torch.zeros(4), 5, 7))
    assert len(kernel.launched) == 1


def test_other_threads_launch_while_one_rehearses(kernel):
    def work():
        thread = threading.Thread(target=lambda: launch(kernel, (1,), (torch.zeros(4), 5, 7)))
        thread.start()
        thread.join()

    rehearse(work)
    assert len(kernel.launched) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)), (32, 96)),
        (lambda: nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10)), (512, 48)),
        (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 8, 3, 2, 1), nn.Flatten()), (64, 3, 16, 16)),
    ],
    ids=["samples", "features", "convolutions"],
)
def test_all_that_a_first_step_launches_was_foreseen(make, shape, monkeypatch):
    from consequent.engines.gpu import compiled_ahead

    foreseen = set()
    compile_aside = launching._compile_aside

    def noted(place, *rest):
        foreseen.add(place)
        compile_aside(place, *rest)

    monkeypatch.setattr(launching, "_compile_aside", noted)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(compiled_ahead, "_foreseen", set())
    model, inputs = make().cuda(), torch.rand(shape, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    model(inputs).square().mean().backward()
    optimizer.step()
    assert launching._compiled
    assert set(launching._compiled) <= foreseen
