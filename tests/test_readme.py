"""The README's code runs as it is written, and its numbers are those in results/."""

import json
import pathlib
import re

import pytest
import torch
from torch import nn

import consequent

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def backward(model):
    model.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()


def test_the_python_blocks_run_in_order(capsys):
    attached, ready_made, by_hand = re.findall(r"```python\n(.*?)```", README, re.S)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 4))
    model.add_module("head", nn.Linear(4, 2))
    names = {"torch": torch, "consequent": consequent, "model": model}

    exec(attached, names)
    assert list(names["correction"].corrected) == ["body"]
    assert "head  excluded" in capsys.readouterr().out
    names.pop("correction").detach()

    exec(ready_made, names)
    optimizer = names["optimizer"]
    backward(model)
    optimizer.step()

    backward(model)
    names |= {"correction": optimizer.correction, "inputs": torch.randn(3, 8), "output_grads": torch.randn(3, 2)}
    exec(by_hand, names)
    assert optimizer.correction.counters.steps == 2
    assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() <= 1.0 + 1e-3


def test_the_diff_is_the_one_added_line():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    names = {"torch": torch, "consequent": consequent, "model": nn.Linear(3, 2)}
    exec("\n".join(line[2:] for line in diff.splitlines()), names)
    assert names["correction"].optimizer is names["optimizer"]


def test_the_demos_numbers_are_in_results():
    demo = json.loads((ROOT / "results" / "demo.json").read_text())
    for contestant in demo["contestants"]:
        epochs, seconds = contestant["epochs"], contestant["seconds"]["median"]
        found = re.search(
            rf"\| \**{re.escape(contestant['name'])}\** \| \**([\d.]+)\** \(([\d.]+)–([\d.]+)\) \| ([\d.]+) \|", README
        )
        assert found, contestant["name"]
        expected = [epochs["median"], epochs["low"], epochs["high"], seconds]
        assert [float(x) for x in found.groups()] == pytest.approx(expected, abs=0.051)


def test_the_costs_are_in_results():
    rows = re.findall(r"^\| [^|]*(?:CPU|H200)[^|]*\| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) \|$", README, re.M)
    measured = [json.loads(line) for line in (ROOT / "results" / "step_cost.jsonl").read_text().splitlines()]
    assert len(rows) == len(measured) == 4
    for row, cost in zip(rows, measured, strict=True):
        expected = [cost["plain_ms"], cost["consequentialist_ms"], cost["ratio"]]
        assert [float(x) for x in row] == pytest.approx(expected, rel=0.02)
