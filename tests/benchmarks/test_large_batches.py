"""What docs/choosing.md says of large batches is in results/large_batches.txt; and what a step does to all outputs."""

import pathlib
import re

import pytest
import torch
from torch.func import functional_call

from benchmarks.large_batches import gain, network

AVERAGED = "`averaging=0.95, refresh=10`"
ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "results" / "large_batches.txt").read_text()
PAGE = (ROOT / "docs" / "choosing.md").read_text().split("## Many more samples than inputs")[1].split("\n## ")[0]
PROSE = " ".join(PAGE.split())


def tables():
    """Of the results: the title of each, and its rows by their first cell, {head: cell}."""
    found = {}
    for title, table in re.findall(r"^(\S[^\n|]*)\n\n((?:\|[^\n]*\n)+)", TEXT, re.M):
        heads, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines())
        found[title] = {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}
    return found


def test_the_table_of_the_page_is_in_the_results():
    known = next(iter(tables().values()))
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    heads, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    columns = [head.replace(",000", "000").removesuffix(" at each step") for head in heads[1:]]
    assert len(rows) == 7
    for name, *cells in rows:
        name = name.removeprefix("plain ").removesuffix(", the default")
        name = re.sub(r"`relative_damping=(\d+)`", r"ρ = \1", name).replace(AVERAGED, "averaged")
        assert [known[name][column] for column in columns] == cells


def test_the_numbers_in_the_text_are_in_the_results():
    ends = next(iter(tables().values()))
    pair = [ends[f"C-SGD 0.1{which}"]["batch 500, new samples"].split()[0] for which in (", averaged", "")]
    assert "new samples are learned to {} instead of {}".format(*pair) in PROSE


def test_the_gain_of_plain_steps_is_the_largest_eigenvalue_of_their_kernel():
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 10)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    in_double = network().double()
    jacobian = torch.func.jacrev(lambda values: functional_call(in_double, values, (x.double(),)))(parameters)
    J = torch.cat([part.reshape(8, -1) for part in jacobian.values()], 1)
    expected = float(torch.linalg.eigvalsh(J @ J.T)[-1]) / len(x)
    assert gain(weights, x, corrected=False)[0] == pytest.approx(expected, rel=0.02)
