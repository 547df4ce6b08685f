"""fully_shard: each rank corrects its own rows, to what one process comes to with all samples."""

import re
import warnings
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loop.expected import DAMPING, assert_close, build, corrected, loss_on, mean_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import consequent
from ranks.cases import CASES, by_one_process
from ranks.cases import build as build_case
from ranks.sharing import busily, shared
from ranks.test_ddp import share


def gathered(model):
    """Whole gradients, which only the test gathers."""
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}


def shard(model, how):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "parts"))
    if how != "as one":
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


def step(kind, samples, dtype, how, micro_batches=1, steps=3):
    model, x, t = build(kind, batch=samples, dtype=dtype)
    shard(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    x, t = share(x), share(t)
    for _ in range(steps):
        optimizer.zero_grad()
        pieces = list(zip(x.chunk(micro_batches), t.chunk(micro_batches), strict=True))
        for place, (inputs, targets) in enumerate(pieces):
            model.set_requires_gradient_sync(place == len(pieces) - 1)
            (mean_loss(model(inputs), targets) / micro_batches).backward()
        optimizer.step()
    assert (correction.counters.edited, correction.counters.skipped) == (0, 0)
    assert not correction.plain
    return gathered(model), correction.samples


def check(results, kind, samples, dtype):
    model, x, t = build(kind, batch=samples)
    expected = corrected(model, loss_on(x, t), samples=samples)
    for grads, counted in results:
        assert counted == samples
        assert_close(grads, expected, {torch.float32: 1e-5, torch.float64: 1e-9}[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "samples"), [("wide", 4), ("wide", 16), ("tall", 16), ("conv", 8)])
def test_as_one_process(two, kind, samples, dtype):
    check(two.run(step, kind, samples, dtype, "layers"), kind, samples, dtype)


@pytest.mark.parametrize("how", ["as one", "layers", "hybrid"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_four_ranks(four, kind, how):
    """Three outputs for four ranks: one has no rows of the last layer."""
    check(four.run(step, kind, 8, torch.float64, how), kind, 8, torch.float64)


@pytest.mark.parametrize("how", ["as one", "layers"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_micro_batches_without_sync(two, kind, how):
    check(two.run(step, kind, 8, torch.float64, how, 2), kind, 8, torch.float64)


# Layers that share a weight must be sharded as one; a transposed weight stays plain; unused layers get no gradient.
UNFIT = re.compile("unused|biases|transposed")


def case(name):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, calls, targets = build_case(name, ranks)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model(*calls[rank]), targets[rank]).backward()
        optimizer.step()
    return gathered(model)


@pytest.mark.parametrize("name", [name for name in CASES if not UNFIT.search(name)])
def test_all_kinds_of_layers(two, name):
    expected = by_one_process(name, 2)
    for grads in two.run(case, name):
        assert_close({name: grads[name] for name in expected}, expected, 1e-9)


# ---- the life of a sharded gradient -----------------------------------------------------------------------------


def forgotten_batch(set_to_none):
    """A backward pass whose gradient was thrown away must not be in the next correction."""
    model, x, t = build("wide", batch=8)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    mean_loss(model(share(x[:4])), share(t[:4])).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    mean_loss(model(share(x[4:])), share(t[4:])).backward()
    optimizer.step()
    return gathered(model), correction.samples


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(two, set_to_none):
    model, x, t = build("wide", batch=8)
    expected = corrected(model, loss_on(x[4:], t[4:]), samples=4)
    for grads, samples in two.run(forgotten_batch, set_to_none):
        assert samples == 4
        assert_close(grads, expected, 1e-9)


def train(kind):
    model, x, t = build(kind, batch=8)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(5):
        optimizer.zero_grad()
        mean_loss(model(share(x)), share(t)).backward()
        optimizer.step()
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_training(two, kind):
    model, x, t = build(kind, batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(5):
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        optimizer.step()
    for found in two.run(train, kind):
        assert_close(found, dict(model.named_parameters()), 1e-9)


def nan_on_one_rank():
    model, x, t = build("wide", batch=8)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, damping=DAMPING, check=True)
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    mean_loss(model(bad * share(x)), share(t)).backward()
    del correction
    optimizer.step()


def test_nan(two):
    errors = two.errors(nan_on_one_rank)
    assert all("NonFiniteError" in error for error in errors), errors


def skipped_first(kind):
    """A first step with NaN, in which nothing can be compared."""
    model, x, t = build(kind, batch=8)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    for step in range(3):
        bad = float("nan") if step == 0 and dist.get_rank() == 1 else 1.0
        optimizer.zero_grad()
        mean_loss(model(bad * share(x)), share(t)).backward()
        with warnings.catch_warnings():
            if step == 0:
                warnings.simplefilter("ignore", consequent.ConsequentWarning)
            optimizer.step()
    return gathered(model), correction.counters


def test_a_first_step_that_is_skipped(four):
    """One rank has no rows of the last layer's weight, but samples, which belong to what the others compare with."""
    model, x, t = build("conv", batch=8)
    expected = corrected(model, loss_on(x, t), samples=8)
    for grads, counters in four.run(skipped_first, "conv"):
        assert (counters.skipped, counters.edited) == (1, 0)
        assert_close(grads, expected, 1e-9)


def failing_factorisations():
    """From the second step on, of a layer of which one rank has no rows."""
    model, x, t = build("conv", batch=8)
    shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model, damping=DAMPING, check=True)
    cholesky = torch.linalg.cholesky_ex

    def broken(matrix):
        factor, info = cholesky(matrix)
        return factor, torch.full_like(info, matrix.shape[-1] == 4)

    for step in range(2):
        optimizer.zero_grad()
        mean_loss(model(share(x)), share(t)).backward()
        before = [p.full_tensor() for p in model.parameters()]
        with ExitStack() as patches:
            if step == 1:
                error = torch.linalg.LinAlgError("on purpose")
                patches.enter_context(mock.patch.object(torch.linalg, "cholesky_ex", broken))
                patches.enter_context(mock.patch.object(torch.linalg, "eigh", side_effect=error))
                patches.enter_context(pytest.raises(torch.linalg.LinAlgError, match="could not be factorised"))
            optimizer.step()
    return all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("how", [None, shared])
def test_all_ranks_raise_together(four, how):
    answers = four.run(failing_factorisations) if how is None else [a for a, _ in four.run(how, failing_factorisations)]
    assert all(answers), "no weight was changed"


def bias_in_a_group(dampings):
    """Of a layer only the bias is trained, with a λ of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, calls, targets = build_case("only a bias", ranks)
    shard(model, "layers")
    params = [{"params": list(model.one.parameters())}, {"params": [model.two.bias]}]
    optimizer = torch.optim.SGD([group | {"damping": d} for group, d in zip(params, dampings, strict=True)], lr=0.0)
    consequent.attach(optimizer, model, damping=99.0)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model(*calls[rank]), targets[rank]).backward()
        optimizer.step()
    return gathered(model)


@pytest.mark.parametrize("how", [shared, busily])
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_group_with_its_own_damping(two, damping, how):
    """The part of a parameter that a rank has stands for the parameter that is in the group."""
    expected = by_one_process("only a bias", 2, damping)["two.bias"]
    for grads, _ in two.run(how, bias_in_a_group, (DAMPING, damping)):
        assert_close({"two.bias": grads["two.bias"]}, {"two.bias": expected}, 1e-9)


def weights_and_biases_apart(at):
    model, x, t = build("wide", batch=4)
    shard(model, "layers")
    parts = [[p for p in model.parameters() if (p.ndim == 1) == is_bias] for is_bias in (False, True)]
    optimizers = [torch.optim.SGD(part, lr=0.0) for part in parts]
    try:
        consequent.attach(optimizers, model, damping=DAMPING, at=at)
    except ValueError as error:
        return str(error)
    mean_loss(model(share(x)), share(t)).backward()
    for optimizer in optimizers:
        optimizer.step()
    return gathered(model)


def test_layers_in_two_optimizers_are_refused_at_the_step(two):
    for refusal in two.run(weights_and_biases_apart, "step"):
        assert re.search(r"layer '0': its weight and its bias are sharded.*at=\"backward\"", refusal)
    for grads in two.run(weights_and_biases_apart, "backward"):
        assert all(grad.isfinite().all() for grad in grads.values())


def by_columns():
    from torch.distributed.tensor import Shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(model, mesh=mesh)
    return consequent.Consequentialism(model).plain


def by_inputs():
    model, _, _ = build_case("transposed weights", 2)
    model.append = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return consequent.Consequentialism(model).plain


def test_transposed_weights_stay_plain(two):
    pytest.importorskip("transformers")
    for plain in two.run(by_inputs):
        assert plain == dict.fromkeys(("one", "two"), "its weight is sharded by its inputs, not by its outputs")


def test_weights_sharded_otherwise_stay_plain(two):
    for plain in two.run(by_columns):
        assert list(plain) == ["0"]
        assert "sharded otherwise than by rows" in plain["0"]


# ---- as it is used ----------------------------------------------------------------------------------------------


def in_mixed_precision(kind, micro_batches):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, x, t = build(kind, batch=8, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    pieces = list(zip(share(x).chunk(micro_batches), share(t).chunk(micro_batches), strict=True))
    for place, (inputs, targets) in enumerate(pieces):
        model.set_requires_gradient_sync(place == len(pieces) - 1)
        (mean_loss(model(inputs).float(), targets) / micro_batches).backward()
    optimizer.step()
    assert (correction.counters.edited, correction.counters.skipped, correction.samples) == (0, 0, 8)
    assert not correction.plain
    return gathered(model)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", ["wide", "tall"])
def test_mixed_precision(two, kind, micro_batches):
    model, x, t = build(kind, batch=8)
    expected = corrected(model, loss_on(x, t), samples=8)
    for grads in two.run(in_mixed_precision, kind, micro_batches):
        assert_close(grads, expected, 0.1)  # numbers with 8 bits


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(12, 20), torch.nn.Linear(20, 12)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))


def blocks(wrapper):
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if wrapper else block(x)
            return x

    torch.manual_seed(0)
    model = Net().double()
    x, t = torch.randn(2, 8, 12, dtype=torch.float64)
    if wrapper:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x, t = share(x), share(t)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model(x), t).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {n: (p.full_tensor() if wrapper else p).detach().clone() for n, p in model.named_parameters()}


def test_blocks_with_activation_checkpointing_and_clipping(two):
    expected = blocks(None)
    for found in two.run(blocks, "fsdp"):
        assert_close(found, expected, 1e-7)
