"""`consequent bench`: what it measures, how it sums up, and what it does when a measurement fails."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import consequent
from consequent_lab import bench_tables, cli, speed, targets, timing
from consequent_lab.graphs import GraphedStep
from consequent_lab.models import mlp
from consequent_lab.optimizers import plain_optimizer
from consequent_lab.timing import Plan, Quartiles
from consequent_lab.workloads import Work, training_step

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
    assert (record["study"], record["quick"], record["device"]["type"]) == ("speed", True, "cpu")
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "consequent", "torch", "triton", "cuda"} == set(record["versions"])
    assert "bench --quick" in record["command"]
    rows, found = record["rows"], {}
    for row in rows:
        found.setdefault(row["name"], []).append(row["way"])
        assert row["wanted"] is None, "a quick bench judges nothing"
        if row["way"] == "cheaper" and row["error"]:  # attach does not know it yet
            continue
        assert row["error"] is None
        assert f"{row['way']} {bench_tables.cost(row)}" in run.stdout
        assert min(row["plain"]["low"], row["ours"]["low"]) > 0
        assert list(row["cost"].values()) == sorted(row["cost"].values())
        assert row["unit"] == "s" or (row["rounds"], row["steps"] % 10) == (5, 0)
    assert found.pop("first-step") == ["own inputs", "averages 10"] * 2
    assert found == {f"{name}-eager": list(wanted) for name, wanted in targets.CPU["eager"].items()}
    assert record["scaling"] == [], "only if it is asked for"
    assert cli.main(["bench", "--tables", str(tmp_path / "out" / "numbers.json")]) == 0
    assert capsys.readouterr().out.splitlines() == bench_tables.tables([record])


def test_samples_are_of_whole_periods_and_graphs_are_every_step_the_same():
    for match in (*targets.matches("cuda"), *targets.scaling("cuda"), *targets.matches("cpu")):
        refreshes = [(targets.WAYS[way] or {}).get("refresh", 1) for way in match.wanted]
        assert not any(match.period % refresh for refresh in refreshes)
        assert match.mode != "CUDA graph" or refreshes == [1]


@pytest.mark.parametrize(
    "match",
    [match for match in targets.matches("cuda", quick=True) if match.name != "resnet50-compiled"],  # a minute
    ids=lambda match: match.name,
)
def test_every_step_of_the_gpu_table_trains(match, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for way in {targets.PLAIN, *match.wanted} - {"averages 30"}:
        work = replace(match.work_of(way), autocast=False)  # bfloat16 is slow, and on some processors unknown
        step = training_step(work, targets.WAYS[way], "cpu", "eager" if match.mode == "CUDA graph" else match.mode)
        first = step()
        assert first.isfinite()
        assert not torch.equal(first, step()), "the second step sees other weights"


def test_the_head_of_the_language_model_is_left_out(monkeypatch):
    attached, attach = [], consequent.attach
    monkeypatch.setattr(consequent, "attach", lambda *args, **options: attached.append(attach(*args, **options)))
    training_step(targets.works(quick=True)["gpt2"], {"averaging": 0.95}, "cpu")
    assert "blocks.0.attention_in" in attached[0].averaged
    assert {"head", "tokens"}.isdisjoint(attached[0].corrected)


def tiny(model, *ways, mode="eager"):
    return targets.Match("tiny-eager", Work("tiny", model, (4, 8)), mode, dict.fromkeys(ways, 1e9))


def test_what_fails_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def broken():
        raise MemoryError("no room for this model\nand more")

    monkeypatch.setitem(targets.WAYS, "broken", {"damping": -1.0})
    match = tiny(lambda: mlp(8, [4], 10), "own inputs", "broken")
    monkeypatch.setattr(targets, "matches", lambda device, quick: [match])
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--quick", "--only", "tiny", "--output", str(path)]) == 0
    good, bad = json.loads(path.read_text())["rows"]
    assert (good["error"], bad["cost"]) == (None, None)
    assert bad["error"].startswith("broken: ValueError: damping")
    assert bad["error"] in " ".join(capsys.readouterr().out.split())
    (none,) = speed.play(tiny(broken, "own inputs"), "cpu", FAST)
    assert none["error"].startswith("plain: MemoryError: no room for this model; own inputs: ")
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        speed._in_a_process("nothing", "cpu", True, "")


def test_a_loss_that_is_not_finite_is_no_measurement():
    class Diverging(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * math.nan

    (row,) = speed.play(tiny(lambda: Diverging(8, 10), "own inputs"), "cpu", FAST)
    assert "loss is not finite" in row["error"]


def test_compiled_steps_are_warmed_up_for_both_of_their_graphs(monkeypatch):
    plans = []
    monkeypatch.setattr(speed, "measure", lambda steps, device, plan: plans.append(plan) or timing.Timings())
    speed.play(tiny(lambda: mlp(8, [4], 10), "averages 10", "averages 30", mode="compiled"), "cpu", FAST)
    assert (plans[0].warm_up, plans[0].period) == (32, 30)


def test_peak_memory_is_of_first_and_of_later_steps(monkeypatch):
    peaks = iter([timing.PeakMemory(10.0, 8.0), timing.PeakMemory(20.0, 10.0)])
    monkeypatch.setattr(speed, "peak_memory", lambda make, later: next(peaks) if later >= 10 else None)
    rows = speed.play(tiny(nn.Identity, "averages 10", mode="peak memory"), "cpu", FAST)
    found = {row["mode"]: (row["unit"], row["cost"]["median"]) for row in rows}
    assert found == {"peak memory": ("MiB", 1.25), "peak memory, first steps": ("MiB", 2.0)}


def test_first_steps_are_of_processes_with_caches_of_their_own(monkeypatch):
    folders, seconds = [], iter([1.0, 0.5, 8.0, 1.0, 5.0, 1.5])
    monkeypatch.setattr(speed, "_in_a_process", lambda *args: folders.append(args) or [next(seconds)])
    rows = speed.first_steps("cpu", quick=True)
    assert folders[::2] == folders[1::2]
    assert len({folder for *_, folder in folders}) == 3
    assert [(row["way"], row["cost"]["median"], row["wanted"]) for row in rows] == [
        *(("own inputs", 7, 6), ("averages 10", 4, 6)),  # cold
        *(("own inputs", 0.5, 1), ("averages 10", 1, 1)),
    ]


# ---- tables and figure ------------------------------------------------------------------------------------------


def row_of(way, cost, wanted=None, **others):
    times = timing.Timings({"plain": [2.0, 2.0, 2.0], way: [2 * cost, 2 * cost, 9.0]})
    return speed.compared({"task": "MLP", "mode": "eager", "unit": "ms"} | others, way, wanted, times)


def test_a_table_for_each_machine_has_a_column_for_each_way():
    gpu = [row_of("own inputs", 1.5, 1.3), row_of("averages 10", 1.1, 1.15), row_of("with BatchNorm", 1.4)]
    gpu += [row_of("averages 10", 3.0, 6, mode="first step", unit="s")]
    records = [{"device": {"name": "NVIDIA H200"}, "rows": rows} for rows in (gpu[:3], gpu[3:])]
    records += [{"device": {"name": "CPU"}, "rows": [row_of("cheaper", 1.0)]}, {"device": {"name": "none"}, "rows": []}]
    assert bench_tables.tables(records) == [
        "| NVIDIA H200 | | plain | own inputs | averages 10 |",
        "|---|---|---:|---:|---:|",
        "| MLP (with BatchNorm 1.40) | eager | 2 ms | 1.50 (1.3) | **1.10** (1.15) |",
        "| MLP | first step | 2 s |  | **+4.0 s** (6) |",
        *("", "| CPU | | plain | cheaper |", "|---|---|---:|---:|", "| MLP | eager | 2 ms | 1.00 |"),
        *("", bench_tables.LEGEND),
    ]
    assert bench_tables.tables(records[3:]) == []


def test_the_figure_has_three_panels_for_each_machine(tmp_path):
    numbers, svg = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    assert cli.main(["bench", "--quick", "--only", "scaling", "--output", str(numbers)]) == 0
    record = json.loads(numbers.read_text())
    assert record["rows"] == []
    figure = bench_tables.scaling_figure([record, record | {"device": {"name": "another"}}])
    assert [panel.x[0].column for panel in figure.panels] == ["width", "depth", "batch"] * 2
    for panel in figure.panels:
        assert [one.label for one in panel.series][:3] == ["plain", "own inputs", "averages 10"]
        assert panel.series[1].columns[panel.x[0].column] == [2, 4]
    assert cli.main(["bench", "--tables", str(numbers), "--figure", str(svg)]) == 0
    assert svg.read_text().count('<g id="axes') == 3
    with pytest.raises(ValueError, match="--figure: none of these files"):
        bench_tables.scaling_figure([record | {"scaling": []}])


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
    work = Work("", lambda: mlp(1024, [1024], 10), (1024, 1024))
    peak = timing.peak_memory(lambda: training_step(work, None, "cuda"))
    assert 16 <= peak.later <= 200  # MiB: weight, gradient, inputs and activations of 4 MiB each, and workspaces


# ---- the command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "bench.txt"], "--figure must end in .svg, .png or .pdf, got bench.txt"),
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
    assert "--only vgg is unknown here; there are mlp-32-eager, mlp-128-eager" in capsys.readouterr().err


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
