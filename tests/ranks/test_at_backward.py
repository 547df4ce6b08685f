"""``at="backward"`` on several ranks: each corrects with its own inputs, and the gradients are averaged as ever."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from loop.expected import DAMPING, assert_close, build, corrected, gradients, loss_on, mean_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.cases import CASES
from ranks.cases import build as build_case
from ranks.test_ddp import share
from ranks.test_fsdp import gathered, shard

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
SIZES = [("wide", [2, 2]), ("wide", [1, 20]), ("tall", [9, 7]), ("conv", [4, 4])]


def averaged(parts):
    """The mean of the ranks' gradients; a rank without one has a zero."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part[name] for part in parts if name in part) / len(parts) for name in names}


def by_rank(kind, sizes, micro_batches=1):
    """What each rank's own correction is, worked out by one process, and their mean."""
    model, x, t = build(kind, batch=sum(sizes))
    parts = []
    for inputs, targets in zip(x.split(sizes), t.split(sizes), strict=True):
        pieces = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        own = [corrected(model, loss_on(a, b, 1 / micro_batches), samples=len(a)) for a, b in pieces]
        parts.append({name: sum(one[name] for one in own) for name in own[0]})
    return averaged(parts)


def pieces_of(x, t, sizes, micro_batches):
    x, t = share(x, sizes), share(t, sizes)
    return list(zip(x.chunk(micro_batches), t.chunk(micro_batches), strict=True))


# ---- DistributedDataParallel ----------------------------------------------------------------------------------------


def step(kind, sizes, dtype=torch.float64, attached="ddp", micro_batches=1, options=None):
    """The gradients of a rank, the samples of its last pass, how many passes there were."""
    model, x, t = build(kind, batch=sum(sizes), dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach = lambda to: consequent.attach(optimizer, to, damping=DAMPING, at="backward")  # noqa: E731
    correction = attach(model) if attached == "before" else None
    ddp = DDP(model, **(options or {}))
    if correction is None:
        correction = attach(ddp if attached == "ddp" else model)
    pieces = pieces_of(x, t, sizes, micro_batches)
    for _ in range(3):  # static_graph takes notes in the first
        optimizer.zero_grad()
        for place, (inputs, targets) in enumerate(pieces):
            with nullcontext() if place == len(pieces) - 1 else ddp.no_sync():
                (mean_loss(ddp(inputs), targets) / micro_batches).backward()
        optimizer.step()
    return gradients(model), correction.samples, correction.counters.steps


def check(results, kind, sizes, dtype=torch.float64, micro_batches=1):
    expected = by_rank(kind, sizes, micro_batches)
    for rank, (grads, samples, passes) in enumerate(results):
        assert_close(grads, expected, TOLERANCE[dtype])
        assert (samples, passes) == (sizes[rank] // micro_batches, 3 * micro_batches)
    for name, tensor in results[0][0].items():
        assert all(torch.equal(tensor, grads[name]) for grads, _, _ in results), "replicas would drift apart"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "sizes"), SIZES)
def test_the_mean_of_the_ranks_own_corrections(two, kind, sizes, dtype):
    check(two.run(step, kind, sizes, dtype), kind, sizes, dtype)


@pytest.mark.parametrize("attached", ["before", "module"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_attached_before_or_after_wrapping(two, kind, attached):
    check(two.run(step, kind, [2, 2], torch.float64, attached), kind, [2, 2])


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_micro_batches_without_sync(two, kind):
    results = two.run(step, kind, [4, 4], torch.float64, "ddp", 2)
    check(results, kind, [4, 4], micro_batches=2)


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_options_of_the_wrapper(two, kind, options):
    check(two.run(step, kind, [2, 2], torch.float64, "ddp", 1, options), kind, [2, 2])


def alone(name, ranks):
    """The correction of each rank's own pass, by one process for each rank's batch."""
    parts = []
    for rank in range(ranks):
        model, calls, targets = build_case(name, ranks)
        consequent.Consequentialism(model, damping=DAMPING, at="backward")
        mean_loss(model(*calls[rank]), targets[rank]).backward()
        parts.append(gradients(model))
    return averaged(parts)


def case(name, wrap="ddp"):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, calls, targets = build_case(name, ranks)
    wrapped = model
    if wrap == "ddp":
        wrapped = DDP(model, find_unused_parameters=True)
    else:
        shard(model, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    consequent.attach(optimizer, wrapped, damping=DAMPING, at="backward")
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(wrapped(*calls[rank]), targets[rank]).backward()
        optimizer.step()
    return gradients(model) if wrap == "ddp" else gathered(model)


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_layers(two, name):
    if name == "transposed weights":
        pytest.importorskip("transformers")
    expected = alone(name, 2)
    for grads in two.run(case, name):
        assert_close(grads, expected, 1e-9)


def table(sparse):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=sparse), torch.nn.Linear(4, 3)).double()
    words = torch.tensor([[1, 2, 2], [5, 1, 1], [7, 2, 5], [1, 1, 1]])
    return model, words, torch.randn(4, 3, 3).double()


def table_gradients(model, words, t, of=None):
    consequent.Consequentialism(model, damping=DAMPING, at="backward", include=["0", "1"])
    mean_loss((of or model)(words), t).backward()
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters()}


def table_step(sparse):
    model, words, t = table(sparse)
    return table_gradients(model, share(words), share(t), DDP(model))


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_of_embeddings(two, sparse):
    parts = []
    for rank in range(2):
        model, words, t = table(sparse)
        parts.append(table_gradients(model, words.chunk(2)[rank], t.chunk(2)[rank]))
    for grads in two.run(table_step, sparse):
        assert_close(grads, averaged(parts), 1e-6)


def trained(kind, attached):
    model, x, t = build(kind, batch=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DDP(model)
    if attached:
        consequent.attach(optimizer, ddp, damping=DAMPING, at="backward")
    for _ in range(4):
        optimizer.zero_grad()
        mean_loss(ddp(share(x)), share(t)).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_replicas_stay_together_over_several_steps(two):
    one, other = two.run(trained, "wide", True)
    assert all(map(torch.equal, one, other))
    plain, _ = two.run(trained, "wide", False)
    assert not any(map(torch.allclose, one, plain))


def bad_batch():
    model, x, t = build("wide", batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ddp = DDP(model)
    consequent.attach(optimizer, ddp, damping=DAMPING, at="backward")
    x, t = share(x), share(t)
    if dist.get_rank() == 1:
        x = x * torch.nan
    mean_loss(ddp(x), t).backward()
    return all(p.grad.isnan().all() for p in model.parameters())


def test_bad_numbers_on_one_rank_are_seen_on_all(two):
    assert two.run(bad_batch) == [True, True]


# ---- fully_shard ----------------------------------------------------------------------------------------------------


def sharded_step(kind, sizes, dtype=torch.float64, how="layers", micro_batches=1):
    model, x, t = build(kind, batch=sum(sizes), dtype=dtype)
    shard(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at="backward")
    pieces = pieces_of(x, t, sizes, micro_batches)
    for _ in range(3):
        optimizer.zero_grad()
        for place, (inputs, targets) in enumerate(pieces):
            model.set_requires_gradient_sync(place == len(pieces) - 1)
            (mean_loss(model(inputs), targets) / micro_batches).backward()
        optimizer.step()
    assert not correction.plain
    return gathered(model), correction.samples, correction.counters.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "sizes"), SIZES)
def test_sharded_the_mean_of_the_ranks_own_corrections(two, kind, sizes, dtype):
    check(two.run(sharded_step, kind, sizes, dtype), kind, sizes, dtype)


@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_sharded_as_one(two, kind):
    check(two.run(sharded_step, kind, [2, 2], torch.float64, "as one"), kind, [2, 2])


@pytest.mark.parametrize("how", ["as one", "layers"])
@pytest.mark.parametrize("kind", ["wide", "conv"])
def test_sharded_micro_batches_without_sync(two, kind, how):
    results = two.run(sharded_step, kind, [4, 4], torch.float64, how, 2)
    check(results, kind, [4, 4], micro_batches=2)


# Layers that share a weight must be sharded as one; a transposed weight stays plain; unused layers get no gradient.
UNFIT = re.compile("unused|biases|transposed")


@pytest.mark.parametrize("name", [name for name in CASES if not UNFIT.search(name)])
def test_sharded_all_kinds_of_layers(two, name):
    expected = alone(name, 2)
    for grads in two.run(case, name, "fsdp"):
        assert_close({name: grads[name] for name in expected}, expected, 1e-9)
