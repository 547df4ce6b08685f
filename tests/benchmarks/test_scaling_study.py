"""The study of growth: which powers it finds, where it stops, and what it says of it."""

import json
import math
import pathlib
import shutil

import pytest
import torch
from torch import nn

from benchmarks.scaling import study
from benchmarks.scaling.__main__ import main
from benchmarks.scaling.operations import correction_operations
from consequent_lab.models import mlp
from consequent_lab.workloads import Task

pytestmark = pytest.mark.slow


def test_exponents_are_found_where_the_time_grows():
    sizes = [2**k for k in range(9)]
    assert study.fit_exponent(sizes, [3 * size**2.5 for size in sizes]) == pytest.approx(2.5)
    values = [1000 + 3 * size**2.5 for size in sizes]
    assert sizes[study.growing(sizes, values)] == sizes[2:]
    assert 1.7 < study.fit_exponent(sizes, values) < 2.5
    assert math.isnan(study.fit_exponent(sizes, [10 + 0.001 * size for size in sizes])), "flat"
    assert math.isnan(study.fit_exponent(sizes, [10.0] * 8 + [30.0])), "one step is no power"
    assert math.isnan(study.fit_exponent([1, 2, 4, 8], [1.0, 1.0, -1.0, 0.5]))
    assert math.isnan(study.fit_exponent([], []))


def counted(task, model):
    with torch.device("meta"):
        return correction_operations(task, model())


def test_operations_are_counted_from_shapes():
    dense = counted(Task("", (4, 8)), lambda: nn.Sequential(nn.Linear(8, 6)))
    assert dense == 4**2 * 9 + 4**3 / 6 + 4**2 * 6 + 4 * 6 * 9
    convolution = counted(Task("", (4, 3, 8, 8)), lambda: nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1, bias=False)))
    assert convolution == 4 * 16 * 27**2 + 27**3 / 6 + 27**2 * 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp-batch", 1),
        ("mlp-width", 2),
        ("conv-batch", 1),
        ("conv-channels", 2),
        ("conv-side", 2),
        ("conv-depth", 1),
    ],
)
def test_predicted_exponents_at_the_largest_sizes(name, expected):
    sweep = next(sweep for sweep in study.sweeps("cuda") if sweep.name == name)
    counts = [counted(*sweep.setup(size)) for size in sweep.sizes[-3:]]
    assert study.slope(sweep.sizes[-3:], counts) == pytest.approx(expected, abs=0.25)
    assert sweep.prediction.startswith(str(expected if name != "conv-channels" else 3))


def test_a_sweep_stops_where_a_size_fails():
    def setup(size):
        return Task("", (size, 4)), lambda: mlp(4 if size < 8 else -1, [4], 10)

    sweep = study.Sweep("s", "t", "a", (2, 4, 8, 16), setup, "")
    curve = study.run_sweep(sweep, "cpu", study.Limits(5, 5, 20))
    assert curve.sizes == [2, 4]
    assert curve.stopped.startswith("8 failed: RuntimeError")


def test_a_sweep_stops_when_time_runs_out():
    sweep = next(sweep for sweep in study.sweeps("cpu", quick=True) if sweep.name == "mlp-width")
    curve = study.run_sweep(sweep, "cpu", study.Limits(5, point_seconds=1e-6, sweep_seconds=20))
    assert curve.sizes == list(sweep.sizes[:2]), "two points are needed to guess the third"
    assert curve.stopped == f"{sweep.sizes[2]} would take too long"


def test_quick_scaling_draws_and_records(tmp_path, capsys):
    numbers = tmp_path / "out" / "numbers.json"
    assert main(["--quick", "--repeats", "5", "--only", "mlp-width", "conv-depth", "--output", str(numbers)]) == 0
    assert "Picture: " in capsys.readouterr().out
    assert numbers.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    record = json.loads(numbers.read_text())
    assert [curve["name"] for curve in record["curves"]] == ["mlp-width", "conv-depth"]
    for curve in record["curves"]:
        assert set(curve["exponents"]) == {"plain", "ours", "backward", "correction"}
        assert len(curve["points"]) >= 2
        for point in curve["points"]:
            assert point["ours"]["median"] > 0
            assert point["backward"]["median"] > 0
            assert point["operations"] > 0
        assert curve["prediction"]


def test_picture_and_table_are_made_again_from_their_numbers(tmp_path, capsys):
    numbers = tmp_path / "scaling-h200.json"
    shutil.copy(pathlib.Path(__file__).parents[2] / "results" / "scaling-h200.json", numbers)
    curves = study.recorded_curves(json.loads(numbers.read_text()))
    assert curves[0].sizes[-1] == 65536
    assert main(["--draw", str(numbers)]) == 0
    assert numbers.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["--table", str(numbers)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| what grows | up to |")
    assert len(lines) == 2 + len(curves)


@pytest.mark.parametrize("content", [b"no JSON", b"[1]", b'{"study": "speed"}', bytes([255, 254, 0])])
@pytest.mark.parametrize("option", ["--draw", "--table"])
def test_another_file_is_refused_by_name(option, content, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert main([option, str(path)]) == 1
    assert "other.json: not a file of this study" in capsys.readouterr().err
