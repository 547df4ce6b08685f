import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import consequent
from consequent_lab.learner import first_model
from consequent_lab.race.contestants import CONTESTANTS, FlatMuon, contestant_named
from consequent_lab.race.tasks import TASKS, task_named
from consequent_lab.race.training import Run, curve_of
from consequent_lab.samples import Data, Samples
from consequent_lab.schedules import cosine

MLP = task_named("mlp-cifar10-b32", tiny=True)


def starts(name, task=MLP):
    return {knob.name: knob.start for knob in contestant_named(name).space(task)}


def curve(name, *, task=MLP, seed=0, graph=False, device="cpu", steps=8):
    data = task.load(None, seed).to(device)
    return curve_of(task, contestant_named(name), starts(name, task), {seed: data}, steps, graph, lambda curve: False)


def test_training_is_what_one_would_write_by_hand():
    data = MLP.load(None, 0)
    points, _ = curve("SGD", seed=3)
    model = first_model(3, lambda: MLP.model(""))
    run = Run(MLP, CONTESTANTS["SGD"], starts("SGD"), data, 3, 8, False)
    for step in range(8):
        rate = starts("SGD")["lr"] * cosine(0 if step < 4 else 4, 8)
        inputs, labels = data.train.take(run.batch(step))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * gradient
    expected = nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).item()
    assert [line["iteration"] for line in points] == [0, 4, 8]
    assert points[-1]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_an_epoch_has_every_sample_once_and_another_order_than_the_next():
    run = Run(MLP, CONTESTANTS["SGD"], starts("SGD"), MLP.load(None, 0), 0, 8, False)
    first, second = (torch.cat([run.batch(step) for step in steps]) for steps in (range(4), range(4, 8)))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(64))
    assert not torch.equal(first, second)


def test_all_contestants_have_the_same_first_weights_and_batches():
    begun = {name: curve(name)[0][0] for name in ("SGD", "Muon", "C-Adam")}
    assert begun["SGD"] == begun["Muon"] == begun["C-Adam"]
    assert begun["SGD"] != curve("SGD", seed=1)[0][0]


def test_a_run_that_diverges_ends():
    settings = {"lr": 1e9}
    points, _ = curve_of(MLP, CONTESTANTS["SGD"], settings, {0: MLP.load(None, 0)}, 8, False, lambda curve: False)
    assert not points[-1]["train_loss"] < 1e4
    assert MLP.measure.score(points, 8) >= 1e4


def test_the_curve_of_several_seeds_is_the_mean_of_theirs():
    task = task_named("table-wine", tiny=True)
    data = {seed: task.load(None, seed) for seed in (0, 1)}

    def with_seeds(*seeds, lr=0.1):
        chosen = {seed: data[seed] for seed in seeds}
        return curve_of(task, CONTESTANTS["SGD"], {"lr": lr}, chosen, 8, False, lambda curve: False)[0]

    first, second, both = with_seeds(0), with_seeds(1), with_seeds(0, 1)
    assert first != second
    for line, one, other in zip(both, first, second, strict=True):
        assert line == {name: pytest.approx((one[name] + other[name]) / 2) for name in one}
    assert [line["iteration"] for line in both] == [0, 4, 8]
    assert math.isnan(with_seeds(0, 1, lr=1e30)[-1]["train_loss"])


def test_every_seed_of_a_table_has_its_own_split_and_a_search_has_three():
    task = TASKS["table-wine"]
    assert [task.data_seed(seed) for seed in task.seeds_of_search] == [1000, 1001, 1002]
    assert [MLP.data_seed(seed) for seed in MLP.seeds_of_search] == [0]
    assert task.recipe()["search_seeds"] == 3
    assert "search_seeds" not in MLP.recipe()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TASKS["table-wine"].contestants)
def test_decay_takes_the_same_off_the_weights_of_everybody(name):
    task = replace(TASKS["table-wine"], model=lambda variant: nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]))
    model = task.model("")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    settings = starts(name, task) | {"decay": 0.1}
    optimizers = contestant_named(name).make(model, settings, task, False)
    for factor in (1.0, 0.5, 0.25):
        optimizers.schedule(factor)
        optimizers.zero_grad()
        (0 * model(torch.randn(4, 5)).sum()).backward()
        optimizers.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old * (0.9 * 0.95 * 0.975))


def test_muon_takes_kernels_as_matrices():
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(6, 3, 2, 2))
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    ours, torchs = FlatMuon([kernel], lr=0.1), torch.optim.Muon([matrix], lr=0.1)
    for _ in range(3):
        kernel.grad = torch.randn(6, 3, 2, 2)
        matrix.grad = kernel.grad.flatten(1)
        ours.step()
        torchs.step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_kernels_of_muon_are_corrected():
    torch.manual_seed(0)
    task = TASKS["resnet20-cifar10"]
    settings = starts("C-Muon", task)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    twin = copy.deepcopy(model)
    images, labels = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 1, 0, 1])
    optimizers = contestant_named("c-muon").make(model, settings, task, False)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizers.step()

    plain = copy.deepcopy(twin)
    nn.functional.cross_entropy(plain(images), labels).backward()
    consequent.attach(torch.optim.SGD(twin.parameters(), lr=1.0), twin, relative_damping=0.1)
    matrix = nn.Parameter((1 - settings["decay"]) * twin[1].weight.detach().flatten(1))
    nn.functional.cross_entropy(twin(images), labels).backward()
    matrix.grad = twin[1].weight.grad.flatten(1)
    assert not torch.allclose(twin[1].weight.grad, plain[1].weight.grad, rtol=0.1)
    torch.optim.Muon([matrix], lr=settings["lr"], weight_decay=0.0).step()
    torch.testing.assert_close(model[1].weight.flatten(1), matrix)


def test_muon_has_the_hidden_layers_and_adamw_the_others():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    muon, adamw = contestant_named("muon").make(model, starts("Muon"), MLP, False).parts
    assert [tuple(weight.shape) for group in muon.param_groups for weight in group["params"]] == [(4, 4, 3, 3), (3, 4)]
    owned = {parameter for group in adamw.param_groups for parameter in group["params"]}
    assert owned == set(model.parameters()) - {model[1].weight, model[3].weight}


def test_muon_and_adamw_are_corrected_jointly():
    data = MLP.load(None, 0)
    learner = Run(MLP, CONTESTANTS["C-Muon"], starts("C-Muon"), data, 0, 8, False)
    batch, correction = learner.batch(0), learner.optimizers.correction
    assert len(correction.optimizers) == 2
    learner.loss(learner.model, batch).backward()
    (inputs, labels), given = data.train.take(batch), dict(learner.model.named_parameters())
    # The last layer's, which AdamW holds, by hand: outputs, softmax − one-hot, and λ as a part of the mean eigenvalue.
    model = first_model(0, lambda: MLP.model(""))
    with torch.no_grad():
        hidden = model[:-1](inputs)
        changes = torch.softmax(model(inputs), 1) - nn.functional.one_hot(labels, 10)
        rows = torch.cat([hidden, torch.ones(len(hidden), 1)], 1).double()
        level = 0.1 * rows.square().sum() / min(rows.shape)
        expected = changes.T.double() @ torch.linalg.solve(rows @ rows.T + level * torch.eye(len(rows)), rows)
    last = len(model) - 1
    found = torch.cat([given[f"{last}.weight"].grad, given[f"{last}.bias"].grad[:, None]], 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_search_does_not_see_the_test_data():
    known, unseen = torch.arange(20), torch.arange(100, 110)
    split = Data(Samples(known, known), Samples(unseen, unseen)).with_validation()
    assert split.train.inputs.tolist() == split.train.targets.tolist() == list(range(18))
    assert split.test.inputs.tolist() == split.test.targets.tolist() == [18, 19]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp-cifar10-b32", "resnet20-cifar10", "resnet20-cifar10-train", "siren-128-china"])
def test_everybody_runs(task):
    for name in TASKS[task].contestants:
        points, _ = curve(name, task=task_named(task, tiny=True))
        assert [line["iteration"] for line in points] == [0, 4, 8], name
        assert points[-1]["train_loss"] < 1e4, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name, contestant in CONTESTANTS.items() if contestant.graphs])
def test_a_captured_run_learns_what_an_eager_one_does(name):
    task = task_named("resnet20-cifar10-train" if name.endswith("BN") else "mlp-cifar10-b32", tiny=True)
    eager, _ = curve(name, task=task, device="cuda", steps=40)
    graphed, is_graphed = curve(name, task=task, device="cuda", graph=True, steps=40)
    assert is_graphed
    for one, other in zip(eager, graphed, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=0.02)
