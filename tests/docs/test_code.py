"""Every block of Python in README and docs/ runs as it is written, and every command exists."""

import io
import re
import shlex
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist
import tyro
from pages import PAGES, ROOT, blocks
from torch import nn

import consequent
from consequent_lab.cli import commands

RUN_ELSEWHERE = {"recipes.md"}  # by tests/test_recipes.py, which looks at what comes out as well
NOT_RUN = {"speed.md": 1, "distributed.md": 1}  # blocks that say why


def python_pages():
    return [page for page in PAGES if blocks(page, "python", "diff") and page.name not in RUN_ELSEWHERE]


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone, and the names of docs/distributed.md."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.nn.parallel import DistributedDataParallel

    yield {
        "DistributedDataParallel": DistributedDataParallel,
        "dcp": dcp,
        "get_state_dict": get_state_dict,
        "folder": tmp_path / "checkpoint",
    }
    dist.destroy_process_group()


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_the_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page"}
    if page.name in ("README.md", "distributed.md"):
        names |= {"torch": torch, "consequent": consequent, "model": nn.Linear(3, 2)}
    if page.name == "distributed.md":
        names |= request.getfixturevalue("one_rank")
    for block in blocks(page, "python", "diff"):
        if block.not_run:
            compile(block.code, str(page), "exec")
            continue
        code = block.code
        if block.language == "diff":
            code = "".join(line[2:] for line in code.splitlines(keepends=True))
        if page.name == "distributed.md" and "correction" in names and "attach" in code:
            names.pop("correction").detach()
            names["model"] = names["model"].module
        exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), names)


def test_only_these_blocks_are_not_run():
    assert {page.name: count for page in PAGES if (count := sum(bool(b.not_run) for b in blocks(page, "python")))} == (
        NOT_RUN
    )
    # … and no fence is missed by the pattern
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
@pytest.mark.usefixtures("bounded")
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
    (code,) = (block.code for block in blocks(page, "python") if "print(correction.foresight())" in block.code)
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
