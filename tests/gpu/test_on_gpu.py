"""Training by kernels on a GPU: launched one by one, and in a CUDA graph."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gpu.training import CASES, OPTIMIZERS, OWN, as_trained, batches, check_run, distance, name_of, network

import consequent
from consequent.gpu import moments
from consequent.layers.convolution import Convolution
from consequent_lab.graphs import WARM_UP_STEPS, GraphedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def all_digits(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_training(case, optimizer, monkeypatch):
    check_run(monkeypatch, case, optimizer, "cuda", 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_moments(dtype):
    torch.manual_seed(0)
    sources, expected = [], []
    for channels, size in ((3, 3), (20, 3), (70, 1)):
        operation = Convolution.of(torch.nn.Conv2d(channels, 4, size, stride=2, padding=size // 2))
        x = as_trained(torch.randn(9, channels, 20, 18) + 0.5, "cuda").to(dtype)
        D = operation.features
        moment, sums = torch.zeros(D, D, device="cuda"), torch.zeros(D, device="cuda")
        sources.append(moments.Source(*operation.as_images(x), moment, sums))
        expected.append(operation.moments(x.cpu().double())[:2])
    moments.add_moments(sources)
    for source, wanted in zip(sources, expected, strict=True):
        for found, its in zip(source[2:], wanted, strict=True):
            torch.testing.assert_close(found.cpu().double(), its[0], rtol=1e-4, atol=1e-4 * float(its.abs().max()))


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_does_what_launches_do(kind, optimizer):
    start, data = network(kind), [(as_trained(x, "cuda"), y.cuda()) for x, y in batches(kind, 4)]
    options = {**OPTIMIZERS[optimizer], **({"capturable": True} if optimizer == "Adam" else {})}

    def loss_of(model, x, y):
        return F.cross_entropy(model(x), y)

    models = [as_trained(copy.deepcopy(start), "cuda") for _ in range(2)]
    eager, graphed = (getattr(torch.optim, optimizer)(model.parameters(), **options) for model in models)
    for made, model in zip((eager, graphed), models, strict=True):
        consequent.attach(made, model, **OWN)
    step = GraphedStep(models[1], graphed, loss_of, data[0])
    for x, y in data:
        step(x, y)
    for x, y in [data[0]] * WARM_UP_STEPS + data:
        eager.zero_grad()
        loss_of(models[0], x, y).backward()
        eager.step()
    assert distance(models[1], models[0].cpu()) < 1e-3 < 0.01 * distance(models[1], start)
