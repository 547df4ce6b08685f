"""docs/recipes.md: its code runs as it is written, and does what the page says."""

import ast
import math
import pathlib
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def functions_in(source):
    """The text of each function, by its name."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


FUNCTIONS = functions_in("\n".join(BLOCKS))


@pytest.fixture
def recipes():
    """The page's functions, by their names."""
    names = {}
    exec("\n".join([BLOCKS[0], *FUNCTIONS.values()]), names)
    return names


def stripes():
    """Images of four kinds that neither moves nor flips confuse."""
    torch.manual_seed(0)
    labels = torch.arange(96) % 4
    period = torch.where(labels < 2, 2, 4).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    along = torch.where((labels % 2 == 0).view(-1, 1, 1), x, y)
    images = (along // (period // 2) % 2).float().unsqueeze(1) - 0.5
    return images + 0.1 * torch.randn(images.shape), labels


class Residual(nn.Module):
    """What is inside, beside a shortcut."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def test_the_page_runs_from_top_to_bottom():
    images, labels = stripes()
    inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Residual(inner), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    names = {"model": model, "blocks": [inner], "images": images, "labels": labels, "epochs": 30, "batch_size": 32}
    first = inner[-1].weight.detach().clone()
    for block in BLOCKS:
        exec(block, names)
        if "start_near_shortcuts(block" in block:
            torch.testing.assert_close(inner[-1].weight, 0.1 * first)
            first = None
    assert first is None
    correction, averaged = names["correction"], names["averaged"]
    assert (len(correction.corrected), correction.failed) == (4, 0)
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    for m in (model, averaged):
        assert (m(images).argmax(1) == labels).float().mean() > 0.95


def test_the_example_has_the_same_functions():
    example = functions_in((ROOT / "examples" / "without_batchnorm.py").read_text())
    assert len(FUNCTIONS) == 5
    assert example == FUNCTIONS


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_takes_the_decay(recipes, momentum):
    """Without gradients; with momentum it takes a while until it does."""
    model = nn.Linear(4, 3).double()
    bias, weight = model.bias.detach().clone(), model.weight.detach().clone()
    optimizer = torch.optim.SGD(recipes["groups_with_decay"](model, 1e-3, 0.3, momentum), lr=0.3, momentum=momentum)
    for number in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = model.weight.detach().clone()
        optimizer.step()
        if number > 100:
            torch.testing.assert_close(model.weight / before, torch.full_like(weight, 1 - 1e-3), rtol=2e-5, atol=0)
    assert torch.equal(model.bias, bias)


def test_what_the_schedule_leaves_of_a_weight(recipes):
    model = nn.Linear(4, 3).double()
    weight = model.weight.detach().clone()
    optimizer = torch.optim.SGD(recipes["groups_with_decay"](model, 1e-3, 0.1, 0.9), lr=0.1, momentum=0.9)
    scheduler = recipes["warmed_up_cosine"](optimizer, 1000, 50)
    for _ in range(1000):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(model.weight / weight, torch.full_like(weight, math.exp(-0.5)), rtol=0.03, atol=0)


def test_the_schedule_rises_and_falls(recipes):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = recipes["warmed_up_cosine"](optimizer, 100, 5)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[50] == pytest.approx(1.0)
    assert rates[-1] < 1e-3
    assert optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("flips", [True, False])
def test_augmented_images_are_crops(recipes, flips):
    """Each is one of the crops of its own image, flipped or not, all channels alike; and all kinds come up."""
    torch.manual_seed(0)
    images = torch.randn(300, 2, 5, 4)
    found = recipes["augmented"](images, padding=1, flips=flips)
    assert found.shape == images.shape
    kinds = set()
    for image, new in zip(nn.functional.pad(images, [1] * 4), found, strict=True):
        crops = {(top, left): image[:, top : top + 5, left : left + 4] for top in range(3) for left in range(3)}
        matches = [(place, False) for place, crop in crops.items() if torch.equal(crop, new)]
        matches += [(place, True) for place, crop in crops.items() if torch.equal(crop.flip(-1), new)]
        assert len(matches) == 1
        kinds.add(matches[0])
    assert len(kinds) == (18 if flips else 9)


def test_covered_images_have_one_square_of_zeros(recipes):
    torch.manual_seed(0)
    images = 1 + torch.rand(300, 2, 5, 4)
    found = recipes["covered"](images, side=2)
    places = set()
    for image, new in zip(images, found, strict=True):
        rows, columns = (new[0] == 0).nonzero().T.tolist()
        top, left = min(rows), min(columns)
        image[:, top : top + 2, left : left + 2] = 0
        assert torch.equal(image, new)
        places.add((top, left))
    assert len(places) == 4 * 3


@pytest.mark.parametrize("when", ["before attaching", "after"])
def test_the_average_is_a_plain_model(recipes, when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def averages():
        return recipes["AveragedModel"](model, multi_avg_fn=recipes["get_ema_multi_avg_fn"](0.9))

    averaged = averages() if when == "before attaching" else None
    recipes["consequent"].attach(optimizer, model)
    averaged = averaged or averages()
    expected = None
    x = torch.randn(6, 3)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        expected = now if expected is None else [0.9 * a + 0.1 * b for a, b in zip(expected, now, strict=True)]
    for a, b in zip(averaged.module.parameters(), expected, strict=True):
        torch.testing.assert_close(a, b)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain.load_state_dict(averaged.module.state_dict())
    for one in (averaged.module, plain):
        one(x).square().mean().backward()
    for a, b in zip(averaged.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
