"""The learner that all training is made of; its CUDA graphs by a stand-in."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_trainer import RATES, SMALL, run
from torch import nn

from consequent_lab import learner
from consequent_lab.configured import ConfiguredLearner
from consequent_lab.datasets import load, prepared
from consequent_lab.learner import Learner, first_model
from consequent_lab.models import mlp
from consequent_lab.optimizers import Optimizers, plain_optimizer
from consequent_lab.race.contestants import contestant_named
from consequent_lab.race.tasks import task_named
from consequent_lab.race.training import curve_of
from consequent_lab.samples import Samples

CPU = torch.device("cpu")


# ---- one trainer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "C-SGD", "C-Nesterov"])
def test_a_race_and_a_run_in_a_folder_learn_the_same(tmp_path, name):
    """One evaluation at the end, and so one learning rate; the same weights, batches and optimiser."""
    optimiser = name.removeprefix("C-").lower()
    config = replace(
        SMALL, optimiser=optimiser, consequentialist=name.startswith("C-"), lr=RATES[optimiser], momentum=0.9,
        relative_damping=0.3 if name.startswith("C-") else None, iterations=None, epochs=2, evaluate_every=90, seed=3,
    )  # fmt: skip
    task = replace(
        task_named("demo"),
        load=lambda place, seed: prepared(load("digits"), config.normalisation, CPU, flat=True),
        model=lambda variant: mlp(64, config.hidden, 10),
        evaluations=1,
    )
    settings = {"lr": config.lr} | ({"relative_damping": 0.3} if config.consequentialist else {})
    curve, _ = curve_of(task, contestant_named(name), settings, {3: task.load(None, 0)}, 90, False, lambda curve: False)
    last = run(config, tmp_path / "run").metrics()[-1]
    assert curve[-1]["iteration"] == last["iteration"] == 90
    for metric in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        assert curve[-1][metric] == pytest.approx(last[metric], rel=1e-4), metric
    assert curve[-1]["train_loss"] < 0.9 * curve[0]["train_loss"]


# ---- CUDA graphs -------------------------------------------------------------------------------------------------


class Replayed:
    """Stands in for a captured step: replays it with the learning rates of its last capture."""

    def __init__(self, captures, model, optimizers, loss, batch, warm_up):
        self.captures = captures
        self.arguments = model, optimizers, loss
        self.warm_up = warm_up
        self.capture()
        for _ in range(warm_up):
            self(*batch)
        captures[-1]["replays"] = 0

    def capture(self):
        rates = [group["lr"] for group in self.arguments[1].param_groups]
        self.captures.append({"warm_up": self.warm_up, "rates": rates, "replays": 0})

    def __call__(self, indices):
        model, optimizers, loss = self.arguments
        for group, rate in zip(optimizers.param_groups, self.captures[-1]["rates"], strict=True):
            group["lr"] = rate
        optimizers.zero_grad()
        loss(model, indices).backward()
        optimizers.step()
        self.captures[-1]["replays"] += 1


@pytest.fixture
def captures(monkeypatch):
    made = []
    monkeypatch.setattr(learner, "GraphedStep", partial(Replayed, made))
    monkeypatch.setattr(learner, "step_aside", lambda step: step())
    return made


def small_learner(graph):
    generator = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(40, 3, generator=generator), torch.randint(0, 2, (40,), generator=generator))
    model = first_model(0, lambda: nn.Linear(3, 2))
    optimizers = Optimizers(model, [plain_optimizer("nesterov", model.parameters(), 0.1)])
    return Learner(model, optimizers, samples, nn.functional.cross_entropy, 8, 0, graph=graph)


def test_a_graph_is_captured_after_the_first_steps_and_after_every_change_of_rates(captures):
    weights = []
    for graph in (False, True):
        learning = small_learner(graph)
        for iteration in range(20):
            if iteration % 10 == 0:
                learning.schedule(1 - iteration / 20)
            learning.learn(learning.batch(iteration))
        weights.append(learning.model.weight.detach().clone())
    assert torch.equal(*weights)
    assert captures == [
        {"warm_up": 0, "rates": [0.1], "replays": 5},
        {"warm_up": 0, "rates": [0.05], "replays": 10},
    ]


def graphed(config):
    learning = ConfiguredLearner(config, load("digits"), CPU)
    learning._wants_graph = True  # as on a GPU
    return learning


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_what_a_capture_trains_is_taken_back(captures, optimiser):
    config = replace(SMALL, optimiser=optimiser, lr=RATES[optimiser], augment=("crop",))
    learners = [graphed(config), ConfiguredLearner(config, load("digits"), CPU)]
    for learning in learners:
        learning.settle()
        for iteration in range(50):
            learning.step(iteration, 50)
    assert [(capture["warm_up"], capture["replays"]) for capture in captures] == [(3, 50)]
    assert learners[0].is_graphed
    for one, other in zip(*(learning.model.parameters() for learning in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert learners[0].tally.read(50) == pytest.approx(learners[1].tally.read(50), rel=1e-3)


def test_a_capture_that_fails_leaves_an_eager_step(monkeypatch):
    def fails(*_):
        raise RuntimeError("no graph")

    monkeypatch.setattr(learner, "GraphedStep", fails)
    learning = graphed(SMALL)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph and is run as it is: no graph"):
        learning.settle()
    learning.step(0, 10)
    assert not learning.is_graphed
    assert learning.tally.read(1)["batch_loss"] > 0
