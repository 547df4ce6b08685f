"""Looking at the frames of threads neither hangs nor changes whether garbage is collected."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from consequent.capture.loss_nodes import outermost_backward
from consequent.capture.torch_internals import innermost_frames

# What has a thread's own values in it asks, when it is destroyed, for a lock that Python 3.11.0 to 3.11.8 holds here.
GARBAGE_MEANWHILE = """
import faulthandler, gc, threading
from consequent.capture.torch_internals import innermost_frames

faulthandler.dump_traceback_later(60, exit=True)

class Thing:
    def __init__(self):
        self.itself = self
        self.of_thread = threading.local()
        self.of_thread.value = 1

def look():
    innermost_frames()

gc.freeze()
for number in range(20000):
    gc.set_threshold(2 + number % 13, 1, 1)  # so that collections begin at any place
    Thing()
    others = [[] for _ in range(number % 12)]
    look()
"""


def test_garbage_that_is_collected_meanwhile_does_not_hang():
    subprocess.run([sys.executable, "-c", GARBAGE_MEANWHILE], check=True, timeout=90)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before(collects):
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert threading.get_ident() in innermost_frames()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_call_in_another_thread_is_found():
    found = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, grad):
            thread = threading.get_ident()
            looking = threading.Thread(target=lambda: found.append(outermost_backward(thread)))
            looking.start()
            looking.join()
            found.append(outermost_backward(thread))
            return grad

    loss = Slow.apply(torch.ones((), requires_grad=True))
    loss.backward()
    from_outside, from_inside = found
    assert from_outside.losses[0] is from_inside.losses[0] is loss
    assert outermost_backward(threading.get_ident()) is None
