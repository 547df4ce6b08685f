"""The numbers of README and docs/ are those in results/."""

import json
import pathlib
import re
from collections import Counter
from statistics import fmean, median
from typing import get_args

import pytest
from faults.command import table
from faults.record import recorded

from benchmarks import first_step
from benchmarks.scaling.__main__ import growth_table
from consequent.maths.damping import DEFAULT
from consequent_lab.bench_tables import cost_table
from consequent_lab.paper import learning_rates, mlp, resnet20
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.experiments import experiments, find
from consequent_lab.paper.findings import KINDS, Verdict
from consequent_lab.paper.kept_contestants import seconds_of
from consequent_lab.race.results import Results
from consequent_lab.race.table import headings, markdown_rows, rows, spread_of
from consequent_lab.race.tasks import DEMO, TASKS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())


def page(name):
    """The text of a page of docs/, its line breaks too."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def prose(name):
    """The same without line breaks."""
    return " ".join(page(name).split())


def test_the_default_damping_is_the_one_that_is_told():
    assert DEFAULT.relative
    assert f"λ = {DEFAULT.value:g} · trace(XXᵀ) / min(N, D)" in prose("choosing")
    assert f"`relative_damping={DEFAULT.value:g}`" in (ROOT / "CHANGELOG.md").read_text()


def race(task):
    """The rows of a task's table by contestant, {heading: cell}."""
    results = Results.of(TASKS[task], ROOT / "results" / "race")
    heads = headings(results)
    return {row.contestant: dict(zip(heads, row.cells, strict=True)) for row in rows(results)}


def row_of(task):
    """The cells of the README's table of results in the first row of a task, bold or not."""
    (first, *_) = (line for line in README.splitlines() if line.startswith(f"| {task}"))
    return [cell.strip() for cell in first.replace("**", "").strip("|").split("|")]


def median_of(cell):
    return cell.split(" (")[0]


def test_the_race_of_perceptrons_is_the_one_in_results():
    found, kept = race("mlp-cifar10-b128"), Results.of(TASKS["mlp-cifar10-b128"], ROOT / "results" / "race")

    def cells(heading, *names):
        return ", ".join(f"{name} {median_of(found[name][heading])}" for name in names)

    steps, accuracy = "steps to training loss 0.01", "best test accuracy"
    ours, others = ("C-Adam-averaged", "C-Adam"), ("FOOF", "K-FAC", "Muon", "SOAP")
    told = [steps, cells(steps, *ours), cells(steps, *others).replace("438", "438 (one seed of five: never)")]
    assert row_of("deep plain perceptron, batches of 128")[1:] == told
    assert found["K-FAC"][steps] == "438 (375–…)"
    assert cells(steps, "Adam", "SGD", "Nesterov") == "Adam –, SGD –, Nesterov –"
    for name in (*ours, *others, "Adam", "SGD"):
        assert (len(kept.trials(name)), len(kept.finals(name))) == (12, 5)
    said = re.search(
        r"after (\d+) steps of 128 images with C-Adam and averages over batches, as with FOOF, [^.]*; Muon needs "
        r"(\d+), SOAP ([\d,]+), and [^.]* not there after ([\d,]+)\. ",
        PROSE,
    ).groups()
    in_steps = [median_of(found[name][steps]) for name in ("C-Adam-averaged", "FOOF", "Muon", "SOAP")]
    assert in_steps[0] == in_steps[1]
    assert [*said[:3]] == in_steps[1:]
    assert {line["steps"] for line in kept.finals("SGD")} == {int(said[3].replace(",", ""))}
    eager, graph = (f"{steps.replace('steps', 'seconds')}, {way}" for way in ("eager", "CUDA graph"))
    in_graphs = {name: f"{float(found[name][graph]):.2g}" for name in ("C-SGD", "Muon")}
    eagerly = {name: f"{float(found[name][eager]):.2g}" for name in ("C-Adam-averaged", "C-SGD", "Muon")}
    _, _, ours, others = row_of("the same | seconds for that")
    assert ours == f"C-Adam-averaged {eagerly['C-Adam-averaged']} / –, C-SGD {eagerly['C-SGD']} / {in_graphs['C-SGD']}"
    foof = [f"{float(found[name][eager]):.2g}" for name in ("FOOF", "FOOF-sparing")]
    assert others.startswith("FOOF {} / – (inverting every tenth step from the first on: {}), ".format(*foof))
    assert others.endswith(f", Muon {eagerly['Muon']} / {in_graphs['Muon']}")
    assert {line["device"] for line in kept.lines if line["kind"] == "time"} == {"NVIDIA H200"}
    said = re.search(
        r"the perceptron of C-Adam has ([\d.]+ %) of the test images, averaged ([\d.]+ %), Adam's ([\d.]+ %)", PROSE
    )
    least = min(found, key=lambda name: float(median_of(found[name][accuracy]).split()[0]))
    assert least == "C-Adam-averaged"
    assert "of the test images C-Adam with averages knows the fewest of all" in PROSE
    names = ("C-Adam", "C-Adam-averaged", "Adam")
    assert list(said.groups()) == [median_of(found[name][accuracy]) for name in names]
    found = race("mlp-cifar10-b128-test")
    told = [accuracy, cells(accuracy, "C-SGD", "C-AdamW"), cells(accuracy, "Muon", "FOOF", "AdamW", "SGD")]
    assert row_of("the same, everybody tuned for it")[1:] == told


def test_the_rates_of_perceptrons_are_those_that_were_found():
    rates = re.search(
        r"wanted less of C-Adam: (\S+), (\S+) and (\S+) with batches of 32, 128 and 512, with averages (\S+) at 32 and "
        r"(\S+) at 128 and 512",
        PROSE,
    ).groups()
    cases = [("C-Adam", 32), ("C-Adam", 128), ("C-Adam", 512), ("C-Adam-averaged", 32), ("C-Adam-averaged", 128)]
    for (name, batch), rate in zip([*cases, ("C-Adam-averaged", 512)], [*rates, rates[-1]], strict=True):
        results = Results.of(TASKS[f"mlp-cifar10-b{batch}"], ROOT / "results" / "race")
        assert results.best(name)["settings"]["lr"] == pytest.approx(float(rate), rel=0.05)


def test_resnet20_without_batch_norm_is_the_one_in_results():
    long, short, covered = (
        [
            sorted(100 * value for value in spread_of(results.task.measure, results.finals(name)).values)
            for name in ("C-Nesterov", "Nesterov-BN")
        ]
        for task in ("resnet20-cifar10", "resnet20-cifar10-20ep", "resnet20-cifar10-cutout")
        for results in [Results.of(TASKS[task], ROOT / "results" / "race")]
    )
    for (ours, theirs), row in (
        (covered, "ResNet-20, augmented, 100 epochs, cutout"),
        (short, "ResNet-20, augmented, 20 epochs"),
    ):
        texts = ("without BatchNorm: C-Nesterov {:.4g} %", "with BatchNorm: Nesterov {:.4g} %")
        told = [text.format(median(one)) for text, one in zip(texts, (ours, theirs), strict=True)]
        assert [cell.split(";")[0] for cell in row_of(row)[2:]] == told
    assert min(short[1]) < max(short[0])
    muon = race("resnet20-cifar10-20ep")["Muon"]["test accuracy at the end"]
    assert row_of("ResNet-20, augmented, 20 epochs")[3].endswith(f"; without: Muon {median_of(muon)}")
    muon_covered = race("resnet20-cifar10-cutout")["Muon"]["test accuracy at the end"]
    assert row_of("ResNet-20, augmented, 100 epochs, cutout")[3].endswith(f"without: Muon {median_of(muon_covered)}")
    told = (
        f"is right in {median(short[0]):.4g} % of CIFAR-10's test images after 20 epochs with C-Nesterov and in "
        f"{median_of(muon)} with Muon; with BatchNorm in {median(short[1]):.4g} %, and their seeds overlap. After 100 "
        f"epochs with cutout it is {median(covered[0]):.4g} % with C-Nesterov, {median_of(muon_covered)} with Muon "
        f"(fewer trials, and one seed of three among ours), and {median(covered[1]):.4g} % with BatchNorm."
    )
    assert told in PROSE
    recipe = re.search(
        r"\[([\d.]+) % of CIFAR-10's [^\]]*\]\S* and ([\d.]+) % with BatchNorm .*? After 20 epochs it knew ([\d.]+) %, "
        r"([\d.]+) % with BatchNorm, and [\d.]+ % with Muon instead of the correction; with "
        r"cutout besides, after 100, it was ([\d.]+) \(at 0.6, with a decay of 5 · 10⁻⁴\) and, with BatchNorm, "
        r"([\d.]+) %",
        prose("recipes"),
    )
    told = [median(one) for one in (*long, *short, *covered)]
    assert [float(number) for number in recipe.groups()] == pytest.approx(told)
    results, base = (
        Results.of(TASKS[task], ROOT / "results" / "race") for task in ("resnet20-cifar10-cutout", "resnet20-cifar10")
    )
    gains = []
    for name, plain in zip(("C-Nesterov", "Nesterov-BN"), long, strict=True):
        lines = [line for line in results.of_kind("final", name) if line["settings"] == base.best(name)["settings"]]
        gains.append(100 * median(line["curve"]["test_accuracy"][-1] for line in lines) - median(plain))
    told = "with the same decay it brought {:.1f} points without BatchNorm, {:.1f} with it".format(*gains)
    assert told in prose("recipes")
    settings = re.search(r"The rate was ([\d.]+), the damping ([\d.]+), the decay 10⁻³", prose("recipes")).groups()
    chosen = Results.of(TASKS["resnet20-cifar10"], ROOT / "results" / "race").best("C-Nesterov")["settings"]
    assert [*map(float, settings), 1e-3] == [chosen["lr"], chosen["relative_damping"], chosen["decay"]]


def test_the_gpt_is_the_one_in_results():
    found = race("gpt-bytes")
    damping = Results.of(TASKS["gpt-bytes"], ROOT / "results" / "race").best("C-AdamW")["settings"]["relative_damping"]
    assert f"the GPT's damping was {damping:.2g}, and with 0.1 and a lower rate it was behind AdamW" in PROSE
    told = ", ".join(row_of("a byte-level GPT, two epochs")[2:])
    names = ("C-AdamW", "Muon", "AdamW")
    assert told == ", ".join(f"{name} {median_of(found[name]['test loss at the end'])}" for name in names)


def test_resnet20_by_heart_is_the_one_in_results():
    found = race("resnet20-cifar10-train")
    steps, accuracy = "steps to training accuracy 100 %", "best test accuracy"
    ours, theirs, muon = (median_of(found[name][steps]) for name in ("C-Nesterov", "Nesterov-BN", "Muon"))
    row = [f"without BatchNorm: C-Nesterov {ours}", f"with BatchNorm: Nesterov {theirs}; without: Muon {muon}"]
    assert row_of("ResNet-20, not augmented")[2:] == row
    right = [f"{float(median_of(found[name][accuracy]).split()[0]):.0f}" for name in ("C-Nesterov", "Nesterov-BN")]
    assert "is right in {} % of the test images, and in {} % with BatchNorm".format(*right) in PROSE


def test_the_pictures_are_those_in_results():
    for kind, pictures, task in (
        ("siren-128", ("china", "flower", "astronaut"), "three pictures as a SIREN, 200 steps"),
        ("siren-256", ("china", "flower", "astronaut"), "the three larger, in batches, 800 steps"),
        ("fourier-128", ("china", "flower", "astronaut"), "the three behind Fourier features, 200 steps"),
    ):
        kept = [Results.of(TASKS[f"{kind}-{picture}"], ROOT / "results" / "race") for picture in pictures]
        told = ", ".join(row_of(task)[2:]).split(", ")
        for cell in told:
            name, numbers, _ = cell.split()
            decibels = sorted(spread_of(one.task.measure, one.finals(name)).median for one in kept)
            assert numbers == "–".join(dict.fromkeys(f"{one:.0f}" for one in (decibels[0], decibels[-1])))
            assert {f"{line['steps']} steps" for one in kept for line in one.finals(name)} == {task.split(", ")[-1]}
            counts = {len(results.finals(name)) for results in kept}
            assert counts == ({3, 5} if (kind, name) == ("siren-256", "SOAP") else {5})
    row_text = " ".join(row_of("three pictures as a SIREN, 200 steps"))
    of = {name: numbers.replace("–", " to ") for name, numbers in re.findall(r"([\w.-]+) (\d+–\d+) dB", row_text)}
    lead = (
        f"is at {of['C-Adam']} dB after 200 steps with C-Adam, at {of['K-FAC']} with K-FAC, at {of['Muon']} with Muon, "
    )
    lead += f"at {of['Adam']} with Adam ({of['Adam-0.95']} with β₂ = 0.95)."
    assert f"A **picture as a SIREN**, all pixels in one batch, {lead}" in PROSE


def test_the_rates_are_those_of_the_page_with_the_reasons():
    def rates(text):
        return re.findall(r"^\| ((?:SGD|Adam)[^|]*?) \| ([^|]*?) \|", text, re.M)

    advised = rates(README.split("## Learning rates")[1])
    assert len(advised) == 3
    assert advised == rates(page("choosing"))


def test_the_demos_table_is_in_results():
    lines = json.loads((ROOT / "results" / "demo.json").read_text())["lines"]
    results = Results(TASKS[DEMO], ROOT, lines)
    assert markdown_rows(results) in page("demo")
    steps = {name: spread_of(results.task.measure, results.finals(name)).median for name in results.task.contestants}
    times = {name: results.of_kind("time", name)[-1]["milliseconds"]["eager"]["median"] for name in steps}
    seconds = {name: times[name] * count for name, count in steps.items()}
    assert max(steps["C-SGD"], steps["C-Adam"]) < min(steps[name] for name in ("SGD", "Adam", "Muon"))
    assert min(seconds["C-SGD"], seconds["C-Adam"]) > max(seconds["SGD"], seconds["Adam"])
    assert f"with `make demo`'s on a CPU {times['C-SGD'] / times['SGD']:.1f}, so that" in PROSE


def bench(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def test_the_costs_are_in_results():
    records = [bench(name) for name in ("bench-h200", "bench-cpu")]
    assert not any(record["quick"] for record in records)
    lines = cost_table(records)
    assert len(lines) > 7
    assert "\n".join(lines) in page("speed")
    assert "\n".join(first_step.table(records[0])) in page("speed")


def test_the_costs_of_both_ways_beside_the_choice_are_in_results():
    for record, names in ((bench("bench-cpu"), ["mlp"]), (bench("bench-h200"), ["mlp-graph", "mlp-512"])):
        for name in names:
            rows = [row for row in record["rows"] if row["name"] == name and row["quantity"] == "time"]
            at_step, at_backward = (row["ratio"]["median"] for row in rows)
            assert re.search(rf"\| {at_step:.2f}\b[^|]*\| {at_backward:.2f}\b", page("choosing")), name


def test_before_and_after_are_in_results():
    section = page("speed").split("| | first edition | now")[1].split("\n\n")[0]
    lines = section.splitlines()[2:]
    pairs = []
    for name in ("bench-h200", "bench-cpu"):
        now = {_key(row): row for row in bench(name)["rows"]}
        for row in bench(f"{name}-first-edition")["rows"]:
            pairs.append((row["task"], row["ratio"]["median"], now[_key(row)]["ratio"]["median"]))
    assert len(lines) == len(pairs)
    for line, (task, before, after) in zip(lines, pairs, strict=True):
        assert line.startswith(f"| {task}, ")
        assert line.endswith(f"| {before:.2f} | {after:.2f} |")


def _key(row):
    return row["name"], row["quantity"], row["ours"]["name"], row["baseline"]["name"]


def within_rounding(text):
    """A number as it is written: equal to all that round to it."""
    return pytest.approx(float(text.replace("−", "-")), rel=0, abs=0.5001 * 10.0 ** -len(text.partition(".")[2]))


def test_the_cost_beside_batch_norm_is_in_results():
    (percent,) = re.findall(r"ResNet-20\s+without\s+BatchNorm\s[^.]*?\(([+−-][\d.]+) %\)", page("speed"))
    rows = json.loads((ROOT / "results" / "bench-h200.json").read_text())["rows"]
    wanted = ("CUDA graph", "time", "C-Nesterov", "Nesterov + BN")
    (row,) = (
        row for row in rows if (row["mode"], row["quantity"], row["ours"]["name"], row["baseline"]["name"]) == wanted
    )
    assert 100 * (row["ratio"]["median"] - 1) == within_rounding(percent)


def test_the_precision_table_is_in_results():
    text = page("speed")
    moments = json.loads((ROOT / "results" / "precision-cpu.json").read_text())["moments"]
    rows = re.findall(r"^\| (.*?), λ = .*?, (\d+) \| (\S+) … (\S+) \| (\S+) … (\S+) \| (\S+) … (\S+) \|$", text, re.M)
    assert len(rows) == len(moments)
    for (title, iteration, *errors), moment in zip(rows, moments, strict=True):
        assert (title, int(iteration)) == (moment["title"], moment["iteration"])
        kinds = ("float32", "tf32", "bfloat16")
        expected = [moment[which][kind] for kind in kinds for which in ("median_error", "largest_error")]
        assert [float(x) for x in errors] == pytest.approx(expected, rel=0.6)  # one digit is shown


def test_no_factorisation_failed_in_full_runs():
    text = prose("speed")
    pattern = r"on a GPU, (\w+) of C-SGD over ([\d,]+) iterations and (\w+) of C-Nesterov over ([\d,]+);"
    ((few, long, some, short),) = re.findall(pattern, text)
    numbers = {"two": 2, "three": 3}
    archive = Archive(ROOT / "results" / "paper", unfinished=True)
    for variant, count, iterations in (("c-sgd", few, long), ("c-nesterov", some, short)):
        finished = []
        runs = [
            run
            for name in archive.variants("resnet20")
            if name.startswith(f"{variant}-lr")
            for run in archive.runs("resnet20", name)
        ]
        for run in runs:
            assert {start["device"]["type"] for start in run.starts} == {"cuda"}
            counters = run.lines[-1]["counters"]
            assert counters["rescued"] == counters["fallen_back"] == counters["skipped"] == 0
            if run.outcome["outcome"] == "finished":
                finished.append(counters["steps"])
        assert finished == [int(iterations.replace(",", ""))] * numbers[count]


def test_the_tables_of_kernels_and_growth_are_in_results():
    text = page("speed")
    for kernel in json.loads((ROOT / "results" / "roofline-h200.json").read_text())["kernels"]:
        values = [kernel[name] for name in ("microseconds", "gigaflop", "megabytes", "floor_microseconds")]
        assert f"| {kernel['what']} | {' | '.join(f'{value:g}' for value in values)} |" in text
    growth = json.loads((ROOT / "results" / "scaling-h200.json").read_text())
    assert "\n".join(growth_table(growth)) in text


def test_the_table_of_faults_is_in_results():
    record = json.loads((ROOT / "results" / "faults.json").read_text())
    assert not record["quick"]
    trials, soaked = recorded(record)
    assert "\n".join(table(trials, soaked)) in page("reliability")
    assert sum(trial.tried for trial in trials if trial.fault.startswith("kill")) >= 100
    assert sum(trial.tried for trial in trials if trial.fault.startswith("one of two ranks lost")) >= 6
    assert soaked.steps >= 200_000


@pytest.fixture(scope="module")
def resnet20_finding():
    return resnet20.finding(ROOT / "results" / "paper")


def test_the_runs_of_resnet20_are_those_in_results(resnet20_finding):
    table = resnet20_finding.tables[0]
    heading, section = page("paper").split("| ResNet-20, CIFAR-10 |")[1].split("\n", 1)
    wanted = [
        "contestant",
        *(name.replace("99.99 %", "iteration of 99.99 %") for name in heading.strip("| ").split(" | ")),
    ]
    wanted = [name.removesuffix(" at iteration") for name in wanted]
    found = [[dict(zip(table.columns, row, strict=True))[name] for name in wanted] for row in table.rows]
    expected = [
        [re.sub(r"; \d seeds\)", ")", f"{value:g}" if isinstance(value, float) else str(value)) for value in cells]
        for cells in found
    ]
    rows = [line.strip("| ").split(" | ") for line in section.split("\n\n")[0].splitlines()[1:]]
    assert rows == expected


def test_what_is_said_of_resnet20_is_what_was_found(resnet20_finding):
    text = prose("paper")

    def measured(words):
        return measured_of(resnet20_finding, words)

    for words in ("without forgetting any sample", "sometimes forgot", "finally crossed", "its stability"):
        assert measured(words).verdict == "holds"
    for words in ("C-SGD achieved 100%", "reached 100% accuracy"):
        iterations = re.search(r"an epoch: \S+ \(([\d,]+)–([\d,]+); 3 seeds\)", measured(words).measured).groups()
        assert all(6000 < int(iteration.replace(",", "")) < 7000 for iteration in iterations)
    (said,) = re.findall(r"crosses C-SGD's loss at about ([\d,]+) \(the paper: 25,000;", text)
    crossing = re.match(r"([\d,]+) ", measured("finally crossed").measured).group(1)
    assert round(int(crossing.replace(",", "")), -3) == int(said.replace(",", ""))
    beginning = measured("in the beginning")
    (early, late) = re.search(r"BatchNorm has the lower loss until iteration ([\d,]+) to ([\d,]+)", text).groups()
    assert f"({early}–{late}; 9 pairs of seeds) on it stays below" in beginning.measured
    (points,) = re.findall(r"training accuracy differ by ([\d.]+) points on average over 10,000 iterations", text)
    assert f"C-SGD {points} points;" in measured("striking resemblance").measured
    for words in ("SGD does better than other", "C-Adam did not change", "at all", "performed better than Adam"):
        assert measured(words).verdict == "does not hold", words
    for words in ("in the beginning", "vanishing and exploding", "striking resemblance"):
        assert measured(words).verdict == "does not hold", words


def test_how_many_learning_rates_are_good_is_what_was_found():
    (statement,) = learning_rates.finding(ROOT / "results" / "paper").statements
    assert "ResNet-20, SGD 1.5, C-SGD 0.5 " in statement.measured
    text = prose("defaults")
    assert "than for plain SGD (half a decade instead of one and a half)" in text
    assert "C-Adam wanted three times Adam's rate" in text
    rates = {
        row[1]: row[2]
        for row in learning_rates.finding(ROOT / "results" / "paper").tables[0].rows
        if row[0] == "ResNet-20"
    }
    assert rates["C-Adam"] == pytest.approx(3 * rates["Adam"])


def test_test_accuracies_of_resnet20_are_as_is_said(resnet20_finding):
    """Those of the C- versions are no higher than that of plain SGD, those with BatchNorm the highest by far."""
    table = resnet20_finding.tables[0]
    (column,) = (place for place, name in enumerate(table.columns) if name.startswith("test accuracy"))
    means = {row[0]: float(re.match(r"[\d.]+", str(row[column])).group()) for row in table.rows}
    assert max(means["C-SGD"], means["C-Nesterov"]) <= means["SGD"] + 0.001
    with_norm = {"SGD-BN", "Nesterov-BN", "Adam-BN", "SGD-BN control"}
    assert min(means[name] for name in with_norm) > 0.05 + max(means[name] for name in means.keys() - with_norm)
    assert measured_of(resnet20_finding, "the combination of them did not help").verdict == "holds"


def test_what_is_said_of_controls_is_what_was_found(resnet20_finding):
    text = prose("paper")
    better, plain = (
        measured_of(resnet20_finding, words) for words in ("also better than SGD", "Nesterov respectively")
    )
    said = re.search(r"loss is ([\d.]+) decades below the SGD control's \(SGD's: ([\d.]+)\) and ([\d.]+) below", text)
    control, with_norm = re.findall(r"below SGD\S* control \+([\d.]+)", better.measured)
    assert said.groups() == (control, re.search(r"C-SGD below SGD \+([\d.]+)", plain.measured).group(1), with_norm)
    earlier = measured_of(resnet20_finding, "knows the training set earlier")
    assert (better.verdict, earlier.verdict) == ("holds", "holds")
    (iteration,) = re.findall(r"training set by then \(C-SGD: after ([\d,]+) iterations\)", text)
    never = "SGD control not within 10,000, SGD-BN control not within 10,000"
    assert re.match(rf"99 %: C-SGD {iteration} \([^)]*\), {never};", earlier.measured)
    (ends,) = re.findall(r"the control, too, has the lower loss until iteration ([\d,]+) to ([\d,]+), and", text)
    assert f"({'–'.join(ends)}; 9 pairs of seeds)." in earlier.measured
    little = measured_of(resnet20_finding, "change little")
    (said,) = re.findall(r"lower the loss by ([\d.]+) decades \(SGD\) and ([\d.]+) \(SGD-BN\) on average", text)
    assert (list(said), little.parts) == (re.findall(r"below SGD\S* \+([\d.]+)", little.measured), (False, True))


def test_test_accuracies_of_controls_are_as_is_said(resnet20_finding):
    accuracies = {}
    for words in ("also better than SGD", "change little"):
        for label, *numbers in re.findall(
            r"([\w-]+(?: control)?) ([\d.]+) \(([\d.]+)–([\d.]+)\)", measured_of(resnet20_finding, words).circumstances
        ):
            accuracies[label] = [float(number) for number in numbers]
    pattern = r"SGD control, ([\d.]+) %, is ([\d.]+) points above SGD's and ([\d.]+) above C-SGD's"
    control, above_plain, above_ours = map(float, re.search(pattern, prose("paper")).groups())
    mean, lowest, _ = accuracies["SGD control"]
    assert (mean, lowest > accuracies["C-SGD"][2]) == (control, True)
    assert mean - accuracies["SGD"][0] == pytest.approx(above_plain, abs=0.1)
    assert mean - accuracies["C-SGD"][0] == pytest.approx(above_ours, abs=0.1)


def measured_of(finding, words):
    (statement,) = (statement for statement in finding.statements if words in statement.paper)
    return statement


def test_what_is_said_of_perceptrons_is_what_was_found():
    finding = mlp.finding(ROOT / "results" / "paper")
    text = prose("paper")
    for words in ("from the beginning", "more overall stability", "usually occurs earlier"):
        assert measured_of(finding, words).verdict == "holds"
    for words in ("almost identical", "does help neither"):
        assert measured_of(finding, words).verdict == "does not hold"
    assert measured_of(finding, "more sensitive").share == "3 of 6"
    assert "SGD in 4 of 6" in measured_of(finding, "drops sharply").measured

    def thousands(numbers):
        return [round(int(number.replace(",", "")), -3) for number in numbers]

    def by_setting(measured):
        settings = r"((?:CIFAR-10|CIFAR-100|Fashion-MNIST)(?: NF)?) "
        names, values = (re.split(settings, measured)[start::2] for start in (1, 2))
        return dict(zip(names, values, strict=True))

    def iterations(measured):
        """All of them: one run's, or mean, earliest and latest."""
        return thousands(re.findall(r"\d+,\d+", measured))

    drops = by_setting(measured_of(finding, "usually occurs earlier").measured)
    assert len(drops) == 6
    both = [one.split(" and ") for one in drops.values()]
    ours, theirs = ([place for pair in both for place in iterations(pair[which])] for which in (0, 1))
    (first, last, other) = thousands(
        re.search(r"loss comes at ([\d,]+) to ([\d,]+) iterations; SGD's own at ([\d,]+) or later", text).groups()
    )
    assert (min(ours), max(ours), min(theirs)) == (first, last, other)
    seeds = Counter(row[0] for row in finding.tables[1].rows)
    late = {name: pair[1] for name, pair in zip(drops, both, strict=True) if "in " in pair[1]}
    assert list(late) == ["CIFAR-100", "Fashion-MNIST"]
    assert late["CIFAR-100"].startswith("not in 100 epochs")
    assert late["Fashion-MNIST"].startswith("in 2 of 3 seeds")
    assert "not in 100 epochs on CIFAR-100 with inputs in [0, 1] (two seeds) and with one of three seeds on" in text
    assert (seeds["CIFAR-100 SGD"], seeds["Fashion-MNIST SGD"]) == (2, 3)

    crossed = by_setting(measured_of(finding, "from the beginning").measured.split("from iteration:")[1])
    (early, late) = thousands(
        re.search(r"four of six: from iteration ([\d,]+) on at the earliest, ([\d,]+) at the latest", text).groups()
    )
    (count,) = re.findall(r"On CIFAR-10 NF it is in (\d of \d pairs of seeds), on Fashion-MNIST with inputs in", text)
    assert crossed.pop("CIFAR-10 NF").startswith(f"in {count} (")
    assert crossed.pop("Fashion-MNIST").startswith("not in 100 epochs")
    places = [iterations(one) for one in crossed.values()]
    assert (len(places), min(map(min, places)), max(map(max, places))) == (4, early, late)


def test_test_accuracies_of_perceptrons_are_as_is_said():
    text = prose("paper")
    table = mlp.finding(ROOT / "results" / "paper").tables[1]
    column = table.columns.index("test accuracy")
    found = {}
    for row in table.rows:
        found.setdefault(row[0], []).append(100 * row[column])
    counts = {name: len(values) for name, values in found.items()}
    assert "three seeds on CIFAR-10 and Fashion-MNIST, two on CIFAR-100" in text
    assert counts == {name: 2 if name.startswith("CIFAR-100 ") else 3 for name in counts}
    mean = {name: fmean(values) for name, values in found.items()}
    lower = {name: mean[name.replace("C-SGD", "SGD")] - value for name, value in mean.items() if "C-" in name}
    assert max(abs(gap) for name, gap in lower.items() if " NF " not in name) < 0.6
    (said,) = re.findall(r"up to ([\d.]+) points lower with normalised features", text)
    assert max(gap for name, gap in lower.items() if " NF " in name) == within_rounding(said)
    ranges = re.findall(
        r"\((CIFAR-10(?: NF)?): ([\d.]+) %.*?, ([\d.]+) to ([\d.]+).*?; SGD ([\d.]+), ([\d.]+) to ([\d.]+)", text
    )
    assert [name for name, *_ in ranges] == ["CIFAR-10", "CIFAR-10 NF"]
    for name, *numbers in ranges:
        expected = [of(found[f"{name} {label}"]) for label in ("C-SGD", "SGD") for of in (fmean, min, max)]
        assert expected == [within_rounding(number) for number in numbers]


def test_how_many_statements_hold_is_what_was_found():
    rows = re.findall(r"^\| ([^|]+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page("paper"), re.M)
    findings = find(list(experiments()), ROOT / "results" / "paper")
    found = Counter((one.kind, one.verdict) for finding in findings for one in finding.statements)
    assert len(rows) == len(KINDS)
    for (title, *said), (kind, expected_title) in zip(rows, KINDS.items(), strict=True):
        counts = [found[kind, verdict] for verdict in get_args(Verdict)]
        assert (title, *map(int, said)) == (expected_title, sum(counts), *counts)


def test_seconds_until_99_percent_are_those_that_were_found(resnet20_finding):
    statement = measured_of(resnet20_finding, "performed almost the same by considering the time")
    assert statement.verdict == "does not hold"
    (said,) = re.findall(r"after ([\d.]+) s, SGD with BatchNorm after ([\d.]+) \(", prose("paper"))
    assert list(said) == re.findall(r"SGD(?:-BN)? ([\d.]+) \(", statement.measured)


def test_times_of_an_iteration_are_those_in_results():
    text = prose("paper")
    (said,) = re.findall(
        r"C-SGD takes ([\d.]+) of the time of SGD with BatchNorm on ResNet-20 and ([\d.]+) to ([\d.]+) of SGD's", text
    )
    archive = Archive(ROOT / "results" / "paper")

    def seconds(recipe, variant):
        (run,) = archive.runs(f"{recipe}-timing", variant)
        return seconds_of(run)

    sets = ("cifar10", "cifar100", "fashion-mnist")
    ratios = [seconds("mlp", f"{name}-unit-c-sgd") / seconds("mlp", f"{name}-unit-sgd") for name in sets]
    ratio = seconds("resnet20", "c-sgd") / seconds("resnet20", "sgd-bn")
    for number, value in zip(said, (ratio, min(ratios), max(ratios)), strict=True):
        assert value == within_rounding(number)
