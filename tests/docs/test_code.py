"""Every block of Python in README and docs/ runs as it is written, and every command exists."""

import io
import re
import shlex
from contextlib import redirect_stdout

import pytest
import torch
import tyro
from pages import PAGES, ROOT, blocks
from torch import nn

import consequent
from consequent_lab.cli import commands

RUN_ELSEWHERE = {"recipes.md", "train.md"}  # by tests that look at what comes out as well


def python_pages():
    return [page for page in PAGES if blocks(page, "python") and page.name not in RUN_ELSEWHERE]


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.name)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page"}
    if page.name == "README.md":
        names["model"] = nn.Linear(3, 2)
    try:
        for block in blocks(page, "python"):
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_block_is_missed():
    for page in PAGES:
        assert page.read_text().count("```python") == len(blocks(page, "python")), page.name


@pytest.mark.parametrize(
    ("rate", "added", "told"),
    [
        ("0.1", True, "epoch 1: training loss # epoch 2: training loss # epoch 3: training loss #"),
        ("0.1", False, "Without that line it is #, # and #. "),
        ("0.5", False, "with `lr=0.5` the last number is # without the line"),
        ("0.5", True, "without the line, and # with it"),
    ],
)
def test_the_first_script_learns_as_the_page_says(rate, added, told):
    page = ROOT / "docs" / "index.md"
    (code,) = (block.code for block in blocks(page, "python") if "# the one added line" in block.code)
    code = code.replace("lr=0.1", f"lr={rate}")
    if not added:
        code = "\n".join(line for line in code.splitlines() if "correction" not in line)
    said = io.StringIO()
    with redirect_stdout(said):
        exec(code, {})
    losses = [float(line.split()[-1]) for line in said.getvalue().splitlines() if "training loss" in line]
    numbers = re.search(re.escape(told).replace(r"\#", r"(\d\.\d+)"), " ".join(page.read_text().split())).groups()
    assert losses[-len(numbers) :] == pytest.approx([float(number) for number in numbers], rel=0.1)


def test_the_table_of_foresight_is_what_the_code_before_it_prints():
    page = ROOT / "docs" / "index.md"
    (code,) = (block.code for block in blocks(page, "python") if "print(consequent.foresight(" in block.code)
    (table,) = (block.code for block in blocks(page, "") if "cosine between" in block.code)
    said = io.StringIO()
    with redirect_stdout(said):
        exec(code, {"torch": torch, "nn": nn, "consequent": consequent})
    numbers = [[float(x) for x in line.split()] for line in said.getvalue().splitlines()[2:]]
    told = [[float(x) for x in line.split()] for line in table.splitlines()[2:]]
    assert said.getvalue().splitlines()[:2] == table.splitlines()[:2]
    for ours, theirs in zip(numbers, told, strict=True):
        assert ours == pytest.approx(theirs, abs=0.002)


def shell_lines():
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.code.splitlines():
                yield page.name, line.split("  #")[0].split(" # ")[0].strip()


def test_commands_of_pages_exist():
    seen = set()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page, line in shell_lines():
        if line.startswith("consequent "):
            tyro.extras.subcommand_cli_from_dict(commands(), args=shlex.split(line)[1:])  # reads it, and does not run
        elif line.startswith("make "):
            assert shlex.split(line)[1] in targets, (page, line)
        seen.add(line.split()[0] if line else "")
    assert {"consequent", "make"} <= seen
