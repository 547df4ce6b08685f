"""docs/train.md: its code and its commands, as they stand, with fewer epochs."""

import re
import shlex
from pathlib import Path

import torch

from consequent_lab import cli


def test_the_page_works_as_it_stands(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    code, commands = re.findall(r"```(?:python|sh)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "consequent"
        short = ["--epochs", "2", "--device", "cpu"] if words[1] == "train" else []
        assert cli.main([*words[1:], *short]) == 0, line
    assert (tmp_path / "comparison.png").exists()
    [checkpoint, *_] = Path("runs/train").glob("*/seed0/checkpoint.pt")
    assert "1.weight" in torch.load(checkpoint, weights_only=True)["state"]["learner"]["model"]
