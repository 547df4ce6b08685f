"""CUDA graphs that cannot be captured; test_gpu_fast runs them in a process of their own."""

import pytest
import torch
from test_gpu_fast import convolutions, distance, images, take_step, twins
from torch import nn

import consequent


def test_training_goes_on_after_a_capture_that_failed():
    start, (model, optimizer), (twin, other), inputs, labels = twins()

    def failing_step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        loss.item()  # not in a graph

    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        failing_step()
    torch.cuda.set_stream(before)
    for _ in range(3):
        take_step(model, optimizer, inputs, labels)
    for _ in range(6):
        take_step(twin, other, inputs, labels)
    assert distance(model, twin, start) < 1e-3


def test_capturing_before_the_first_step_is_refused():
    model = convolutions()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    inputs, labels = images()
    model(inputs).sum().backward()  # cuDNN is ready
    optimizer.zero_grad()
    fresh = convolutions()
    optimizer = consequent.CSGD(fresh, lr=0.05, damping=0.1)
    with (
        pytest.raises(RuntimeError, match="before the first ordinary training step"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        take_step(fresh, optimizer, inputs, labels)
