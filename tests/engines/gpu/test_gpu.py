"""The same numbers on a GPU, and no waiting for it."""

import copy

import pytest
import torch
from torch import nn

import consequent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision():
    """Compare without TF32; its error is the subject of another measurement."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 10),
    )


def batch(device, dtype=torch.float32, samples=16):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return inputs.to(device, dtype), labels.to(device)


def train(model, device, dtype=torch.float32, steps=3, **options):
    model = model.to(device, dtype)
    optimizer = consequent.CSGD(model, lr=0.05, momentum=0.9, nesterov=True, damping=0.1, **options)
    inputs, labels = batch(device, dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model, optimizer


def weights(model):
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_training_equals_the_cpu_in_float64(dtype, tolerance, memory_format):
    expected, _ = train(net(), "cpu", torch.float64)
    actual, _ = train(net().to(memory_format=memory_format), "cuda", dtype)
    start = weights(net())
    moved = (weights(expected) - start).norm()
    assert (weights(actual) - weights(expected)).norm() <= tolerance * moved


def test_no_step_waits_for_the_device():
    model = net().cuda()
    optimizer = consequent.CSGD(model, lr=0.05, momentum=0.9, damping=0.1)
    inputs, labels = batch("cuda")
    for step in range(4):
        if step == 2:  # the layers are looked at once, at the first steps
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        finally:
            if step == 3:
                torch.cuda.set_sync_debug_mode("default")
    assert optimizer.correction.counters.steps == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_numbers_change_nothing_without_waiting(bad):
    model = net().cuda()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    inputs, labels = batch("cuda")
    inputs[3, 0, 0, 0] = bad
    before = weights(model)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    assert torch.equal(weights(model), before)
    assert optimizer.correction.counters.skipped == 1


def test_check_raises():
    model = net().cuda()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1, check=True)
    inputs, labels = batch("cuda")
    inputs[0] = float("nan")
    before = weights(model)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(consequent.NonFiniteError):
        optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("check", [False, True])
def test_a_failed_factorisation_selects_a_safe_update(check):
    layer = nn.Linear(4, 2, bias=False).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    correction = consequent.attach(optimizer, layer, damping=1e-30, loss_reduction="sum", check=check)
    x = torch.ones(64, 4, device="cuda") * torch.linspace(1, 300, 64, device="cuda")[:, None]
    target = torch.randn(64, 2, device="cuda")
    before = (layer(x) - target).norm()
    (0.5 * (layer(x) - target) ** 2).sum().backward()
    optimizer.step()
    assert correction.counters.rescued + correction.counters.fallen_back == 1
    assert (layer(x) - target).norm() <= before


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_in_float16(fused):
    """A first step overflows and is skipped; the steps after it equal training without a scaler."""
    model = net().cuda()
    twin = copy.deepcopy(model)
    inputs, labels = batch("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    correction = consequent.attach(optimizer, model, damping=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-30)
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    consequent.attach(other, twin, damping=0.1)
    before = weights(model)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert torch.equal(weights(model), before)
        else:
            other.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(twin(inputs), labels)
            loss.backward()
            other.step()
    moved = (weights(twin) - before).norm()
    assert (weights(model) - weights(twin)).norm() <= 0.05 * moved
    assert correction.counters.skipped == 0  # the scaler skipped it


def test_bfloat16_autocast():
    expected, _ = train(net(), "cpu", torch.float64, steps=1)
    model = net().cuda()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    inputs, labels = batch("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    start = weights(net())
    moved, wanted = weights(model) - start, weights(expected) - start
    assert torch.cosine_similarity(moved, wanted, dim=0) > 0.98


def test_a_model_moved_to_the_gpu_after_attaching():
    model = net()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        inputs, labels = batch(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert optimizer.correction.counters.steps == 3
    assert weights(model).isfinite().all()


def test_backward_and_step_inside_autocast_are_those_outside():
    results = []
    for inside in (False, True):
        model = net().cuda()
        optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
        inputs, labels = batch("cuda")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), labels)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=inside):
                loss.backward()
                optimizer.step()
        results.append(weights(model))
    outside, inside = results
    moved = (outside - weights(net())).norm()
    assert (inside - outside).norm() <= 1e-3 * moved
