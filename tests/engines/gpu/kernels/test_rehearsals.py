"""Rehearsals: what will be launched is compiled before, by other threads."""

import threading

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import launch as launching
from consequent.engines.gpu.kernels.launch import launch, rehearse


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
