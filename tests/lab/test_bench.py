"""`consequent bench`: what it measures, how it sums up, and what it does when a measurement fails."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import consequent
from consequent_lab import bench_tables, cli, speed, targets, timing
from consequent_lab.graphs import GraphedStep
from consequent_lab.models import mlp
from consequent_lab.optimizers import plain_optimizer
from consequent_lab.timing import Plan, Quartiles
from consequent_lab.workloads import Entrant, Task, TrainingStep

pytestmark = pytest.mark.slow

FAST = Plan(rounds=5, seconds=1, sample_seconds=0.0, warm_up=1)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def bench(folder, *arguments):
    """Runs the command as a user would; returns what it printed and recorded."""
    path = folder / "out" / "numbers.json"
    command = [sys.executable, "-m", "consequent_lab.cli", "bench", *arguments, "--output", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run, json.loads(path.read_text())


# ---- speed ------------------------------------------------------------------------------------------------------


def test_quick_bench_runs_and_records_everything(tmp_path, capsys):
    run, record = bench(tmp_path, "--quick")
    assert run.stderr == ""
    assert "\x1b" not in run.stdout, "no terminal, no control codes"
    assert record["study"] == "speed"
    assert record["quick"] is True
    assert record["device"]["type"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "consequent", "torch", "triton", "cuda"} == set(record["versions"])
    assert "bench --quick" in record["command"]
    rows = [(row["name"], row["way"], row["target"]) for row in record["rows"]]
    assert rows[:2] == [("mlp", "own", 1.2), ("mlp", "averages", None)]
    assert rows[2:] == [("resnet20", "own", 1.6), ("resnet20", "averages", None)]
    for row in record["rows"]:
        assert (row["mode"], row["quantity"], row["unit"], row["error"]) == ("eager", "time", "ms", None)
        assert row["met"] is None, "a quick bench judges nothing"
        ratio = row["ratio"]
        assert 0 < ratio["low"] <= ratio["lower_quartile"] <= ratio["median"] <= ratio["upper_quartile"]
        assert ratio["upper_quartile"] <= ratio["high"]
        assert f"{row['ratio']['median']:.2f}" in run.stdout
        assert row["task"] in run.stdout
    assert cli.main(["bench", "--tables", str(tmp_path / "out" / "numbers.json")]) == 0
    assert capsys.readouterr().out.splitlines() == bench_tables.cost_table([record])
    for measurement in record["measurements"]:
        assert measurement["rounds"] == 5
        assert measurement["steps_per_sample"] >= 1
        names = [entrant["name"] for entrant in measurement["entrants"]]
        assert names == ["SGD", "C-SGD", "C-SGD, averages"]
        for entrant in measurement["entrants"]:
            assert entrant["milliseconds"]["median"] > 0
            assert (entrant["error"], entrant["failed"]) == (None, 0)


def test_targets_are_those_that_were_set():
    def row(device, name, ours, baseline, quantity="time"):
        match = next(match for match in targets.matches(device) if match.name == name)
        assert match.graph == name.endswith("-graph")
        wanted = (baseline, quantity)
        comparison = next(c for c in match.comparisons if (c.ours, c.baseline, c.quantity) == (ours, *wanted))
        assert {ours, baseline} <= {entrant.name for entrant in match.entrants}
        return comparison.target

    eager = {"mlp": 1.3, "mlp-128": 1.5, "mlp-512": 1.7, "mlp-2048": 2}
    eager |= {"mlp-256-wide": 1.5, "mlp-256-wide-16384": 1.5, "mlp-1024-wide": 2}
    graph = dict(zip(eager, (1.1, 1.25, 1.6, 2, 1.3, 1.5, 2), strict=True))
    assert {name: row("cuda", name, "C-SGD", "SGD") for name in eager} == eager
    assert {name: row("cuda", f"{name}-graph", "C-SGD", "SGD") for name in graph} == graph
    assert (row("cpu", "mlp", "C-SGD", "SGD"), row("cpu", "resnet20", "C-SGD", "SGD")) == (1.2, 1.6)
    for name, with_norm, plain in (("resnet20", 1.15, None), ("resnet20-graph", 1.0, 1.12)):
        assert row("cuda", name, "C-Nesterov", "Nesterov + BN") == with_norm
        assert row("cuda", name, "C-Nesterov", "Nesterov") == plain
    assert {row("cuda", name, "C-Nesterov", "Nesterov") for name in ("resnet50", "resnet50-graph")} == {1.5}
    assert [row("cuda", name, "C-AdamW", "AdamW") for name in ("gpt2", "gpt2-graph")] == [1.4, 1.3]
    assert row("cuda", "resnet20", "C-Nesterov", "Nesterov", "memory") == 1.2
    assert row("cuda", "resnet20", "C-Nesterov, averages", "Nesterov") == 1.25
    assert row("cuda", "resnet50", "C-Nesterov, averages", "Nesterov") == 1.15
    assert row("cuda", "gpt2", "C-AdamW, averages", "AdamW") == 1.15


def test_only_eager_matches_have_averages_and_sample_whole_periods():
    for match in targets.matches("cuda"):
        has_averages = any(entrant.way == "averages" for entrant in match.entrants)
        assert match.period == (targets.PERIOD if has_averages else 1)
        assert match.graph != has_averages, "a CUDA graph is every step the same"


@pytest.mark.parametrize("match", targets.matches("cuda", quick=True), ids=lambda match: match.name)
def test_every_entrant_of_the_gpu_table_trains(match):
    task = replace(match.task, autocast=False)  # bfloat16 is slow, and on some processors unknown
    for entrant in match.entrants:
        step = TrainingStep(task, entrant, "cpu")
        first = step()
        assert first.isfinite()
        assert not torch.equal(first, step()), "the second step sees other weights"
        assert step.failed == 0


def test_an_entrant_that_fails_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def broken():
        raise MemoryError("no room for this model\nand more")

    model = lambda: mlp(8, [4], 10)  # noqa: E731
    ours = Entrant("C-SGD", model, "sgd", {"damping": 0.1})
    entrants = Entrant("SGD", model, "sgd"), ours, Entrant("broken", broken, "sgd")
    comparisons = targets.Comparison("C-SGD", "SGD", 1e9), targets.Comparison("broken", "SGD", 1.0)
    task = Task("tiny", (4, 8))
    table = (
        targets.Match("none", task, (Entrant("SGD", broken, "sgd"), ours), comparisons[:1]),
        targets.Match("eager", task, entrants, comparisons),
    )
    monkeypatch.setattr(targets, "matches", lambda device, quick: table)
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--device", "cpu", "--repeats", "5", "--output", str(path)]) == 0
    none, good, bad = json.loads(path.read_text())["rows"]
    assert none["error"] == "SGD: MemoryError: no room for this model"
    assert none["met"] is None
    assert none["ratio"] is None
    assert good["error"] is None
    assert good["met"] is True
    assert bad["error"] == "broken: MemoryError: no room for this model"
    assert bad["met"] is None
    printed = " ".join(capsys.readouterr().out.split())
    assert "tiny, eager: broken ÷ SGD failed: broken: MemoryError: no room for this model" in printed
    assert " met" in printed
    assert " failed" in printed


def test_a_loss_that_is_not_finite_is_no_measurement():
    class Diverging(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * math.nan

    match = targets.Match(
        "diverging",
        Task("tiny", (4, 8)),
        (Entrant("SGD", lambda: Diverging(8, 10), "sgd"), Entrant("other", lambda: nn.Linear(8, 10), "sgd")),
        (targets.Comparison("SGD", "other", 1.0),),
    )
    (row,), _ = speed.play(match, "cpu", FAST, judge=True)
    assert "loss is not finite" in row["error"]
    assert row["met"] is None


def test_a_ratio_above_its_target_is_missed():
    comparison = targets.Comparison("ours", "plain", 1.5)
    match = targets.Match("m", Task("t", (1, 1)), (), (comparison,))
    times = timing.Timings({"plain": [1.0, 2.0, 2.0], "ours": [2.0, 4.0, 6.0]})
    row = speed.compared(match, comparison, times, {}, judge=True)
    assert (row["ours"], row["baseline"]["value"]) == ({"name": "ours", "value": 4.0}, 2.0)
    assert row["ratio"]["median"] == 2.0
    assert row["met"] is False


def test_memory_that_was_not_measured_is_missed_by_name():
    comparison = targets.Comparison("ours", "plain", 1.2, "memory")
    match = targets.Match("m", Task("t", (1, 1)), (), (comparison,))
    one = timing.PeakMemory(9.0, 3.0)
    row = speed.compared(match, comparison, timing.Timings(), {"plain": one}, judge=True)
    assert (row["error"], row["unit"], row["met"]) == ("no peak memory of ours", "MiB", None)
    row = speed.compared(match, comparison, timing.Timings(), {"plain": one, "ours": one}, judge=True)
    assert (row["ratio"]["median"], row["met"]) == (1.0, True)


def test_a_table_has_a_column_for_every_way():
    def row(way, median, target):
        ratio = dict.fromkeys(("low", "lower_quartile", "median", "upper_quartile", "high"), median)
        return {"task": "MLP", "mode": "eager", "quantity": "time", "unit": "ms", "way": way, "ratio": ratio} | {
            "baseline": {"name": "SGD", "value": 2.0},
            "target": target,
        }

    record = {"rows": [row("own", 1.5, 1.3), row("averages", 1.1, 1.15)]}
    record["device"] = {"type": "cuda", "name": "NVIDIA H200"}
    head, _, line = bench_tables.cost_table([record])
    assert head == "| | plain | own inputs | averages, `refresh=10` | wanted |"
    cells = "1.50 (1.50–1.50) | 1.10 (1.10–1.10)"
    assert line == f"| MLP, H200, eager | SGD 2 ms | {cells} | 1.3, averages 1.15 |"


# ---- timing -----------------------------------------------------------------------------------------------------


def test_contestants_take_turns_and_neither_always_goes_first():
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    timings = timing.measure(steps, "cpu", FAST)
    assert timings.steps_per_sample == 1
    assert {name: len(times) for name, times in timings.milliseconds.items()} == {"a": 5, "b": 5}
    rounds = ["".join(calls[place : place + 2]) for place in range(2, len(calls), 2)]
    assert set(rounds) == {"ab", "ba"}
    assert len(rounds) == timing.UNCOUNTED_ROUNDS + 5


def test_times_and_ratios_are_of_one_step():
    steps = {"slow": lambda: time.sleep(0.004), "fast": lambda: time.sleep(0.001)}
    timings = timing.measure(steps, "cpu", Plan(rounds=7, seconds=5, sample_seconds=0.005, warm_up=2))
    assert 2 <= timings.steps_per_sample <= 5
    assert timing.Quartiles.of(timings.milliseconds["slow"]).low >= 4
    assert 1.5 < timings.ratio("slow", "fast").median < 4.5
    assert 1 < timings.difference("slow", "fast").median < 10


def test_a_contestant_that_breaks_down_later_drops_out():
    calls = iter(range(100))

    def breaks():
        if next(calls) == 5:
            raise RuntimeError("worn out")

    timings = timing.measure({"breaks": breaks, "lasts": lambda: None}, "cpu", FAST)
    assert timings.errors == {"breaks": "RuntimeError: worn out"}
    assert list(timings.milliseconds) == ["lasts"]
    assert len(timings.milliseconds["lasts"]) == 5


def test_samples_are_of_whole_periods():
    calls = []
    plan = Plan(rounds=5, seconds=5, sample_seconds=0.013, warm_up=1, period=10)
    timings = timing.measure({"a": lambda: calls.append(time.sleep(0.001))}, "cpu", plan)
    assert timings.steps_per_sample in (10, 20)
    assert len(calls) == 1 + 7 * timings.steps_per_sample


def test_time_runs_out_after_a_few_rounds():
    plan = replace(FAST, rounds=1000, seconds=0.0)
    assert len(timing.measure({"a": lambda: None}, "cpu", plan).milliseconds["a"]) == timing.FEWEST_ROUNDS


# ---- CUDA graphs ------------------------------------------------------------------------------------------------


def loss_of(model, inputs, labels):
    return nn.functional.cross_entropy(model(inputs), labels)


def graphed_training(make_optimizer, steps=4):
    """Trains the same model on the same batches eagerly and as a graph; returns both weights."""
    torch.manual_seed(0)
    weights = []
    batches = [(torch.rand(8, 12, device="cuda"), torch.randint(0, 10, (8,), device="cuda")) for _ in range(steps)]
    start = mlp(12, [16, 16], 10).state_dict()
    for graph in (False, True):
        model = mlp(12, [16, 16], 10).cuda()
        model.load_state_dict(start)
        optimizer = make_optimizer(model)
        if graph:
            step = GraphedStep(model, optimizer, loss_of, batches[0], warm_up=5)
        for _ in range(0 if graph else 5):
            optimizer.zero_grad()
            loss_of(model, *batches[0]).backward()
            optimizer.step()
        for batch in batches:
            if graph:
                assert step(*batch).isfinite()
                continue
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return weights


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda model: plain_optimizer("nesterov", model.parameters(), 1e-4, momentum=0.95),
        lambda model: plain_optimizer("adamw", model.parameters(), 1e-4, 0.01, capturable=True),
        lambda model: consequent.CSGD(model, lr=0.05, momentum=0.9, damping=0.1),
    ],
    ids=["Nesterov", "AdamW", "C-Momentum"],
)
def test_a_replayed_step_equals_the_eager_one(make_optimizer):
    eager, replayed = graphed_training(make_optimizer)
    assert (eager - replayed).norm() <= 1e-4 * eager.norm()


@gpu
@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_as_it_was():
    model = nn.Linear(3, 2).cuda()
    batch = torch.zeros(4, 3, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    before = torch.cuda.current_stream()

    def waits(model, inputs, labels):
        loss = loss_of(model, inputs, labels)
        return loss * float(loss)

    with pytest.raises(RuntimeError):
        GraphedStep(model, torch.optim.SGD(model.parameters(), lr=0.1), waits, batch)
    assert torch.cuda.current_stream() == before
    torch.cuda.synchronize()
    assert float(loss_of(model, *batch)) > 0


@gpu
@pytest.mark.gpu
def test_peak_memory_counts_model_and_activations():
    task = Task("", (1024, 1024))
    entrant = Entrant("SGD", lambda: mlp(1024, [1024], 10), "sgd")
    peak = timing.peak_memory(lambda: TrainingStep(task, entrant, "cuda"))
    assert 16 <= peak.later <= 200  # MiB: weight, gradient, inputs and activations of 4 MiB each, and workspaces


# ---- the command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--output", "bench.txt"], "--output must end in .json, got bench.txt"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_measurement_is_named_with_those_there_are(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--quick", "--only", "vgg", "--output", str(path)]) == 1
    assert "--only vgg is unknown here; there are mlp, resnet20" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_said_so(tmp_path, capsys):
    assert cli.main(["bench", "--device", "cuda", "--output", str(tmp_path / "bench.json")]) == 1
    assert "--device cuda: PyTorch finds no CUDA device here" in capsys.readouterr().err


def test_a_file_of_another_kind_is_named(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert cli.main(["bench", "--tables", str(path)]) == 1
    assert "other.json: not a file of consequent bench" in capsys.readouterr().err


def test_quartiles_of_one_value():
    assert Quartiles.of([2.0]) == Quartiles(2.0, 2.0, 2.0, 2.0, 2.0)
