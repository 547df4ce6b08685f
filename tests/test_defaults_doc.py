"""What docs/defaults.md and docs/choosing.md say of the study of defaults is what results/defaults.jsonl.gz gives."""

import inspect
import pathlib
import re
import statistics

import pytest

import consequent
from benchmarks.defaults import study, summary
from benchmarks.defaults.contestants import CONTESTANTS
from consequent.maths.bound import DEFAULT as BOUND
from consequent.maths.damping import DEFAULT, DEFAULT_OF_SGD

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "defaults.md").read_text()
PROSE = " ".join(PAGE.split())
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
ADVICE = " ".join(CHOOSING.split())

DAMPING = f"relative {DEFAULT_OF_SGD.value:g}"
BOUNDED = f"{DAMPING}, bound {BOUND:g}"
AVERAGED = f"{DAMPING}, averaging 0.95, refresh 10"
RATES = {name: contestant.advised for name, contestant in CONTESTANTS.items()}
OF_SGD = ("c-sgd", "c-momentum", "c-nesterov")


@pytest.fixture(scope="module")
def judge():
    return summary.Judge(study.FULL, study.Results(ROOT / "results" / "defaults.jsonl.gz"))


def numbers(pattern, text=PROSE):
    """All the groups of the one place where a pattern is found, as numbers."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


def rounded(value, digits=2):
    return float(f"{value:.{digits}f}")


def of_all_four(judge, damping, rates, names=summary.CORRECTED):
    """The geometric mean over contestants of their verdicts."""
    verdicts = [judge.verdict(name, damping, rates and rates[name], study.SEEDS) for name in names]
    assert not any(verdict.missing for verdict in verdicts)
    return statistics.geometric_mean(verdict.mean for verdict in verdicts)


def test_the_defaults_are_those_that_are_told():
    sgd, others = DEFAULT_OF_SGD.value, DEFAULT.value
    assert f"λ = {sgd:g} · trace(XXᵀ) / min(N, D) with SGD" in ADVICE
    assert f"[{others:g} with all others]" in ADVICE
    assert f"`relative_damping={sgd:g}` ({others:g} with optimisers other than SGD), `bound={BOUND:g}`" in PROSE
    for kind in (consequent.CAdam, consequent.CAdamW):
        assert inspect.signature(kind).parameters["lr"].default == 0.003


def test_the_tables_are_those_of_the_summary(judge):
    tables = [
        summary.by_damping(judge, None, study.SEEDS),
        summary.by_damping(judge, RATES, study.SEEDS),
        summary.with_each_bound(judge, RATES, BOUNDED),
        summary.by_memory(judge, DAMPING, (1e-3, 3e-3)),
        summary.by_averages(judge, BOUNDED, {"c-adam": (1e-3, 3e-3), "c-sgd": (0.1,)}),
        summary.in_pairs(judge, (1e-3, 3e-3), study.LAST_SEEDS),
    ]
    for table in tables:
        assert "missing" not in table
        assert table in PAGE, table
    assert sum(table.count("\n") + 1 for table in tables) == sum(line.startswith("|") for line in PAGE.splitlines())


def test_what_is_said_of_the_damping(judge):
    some = [f"relative {rho}" for rho in (0.03, 0.1, 0.2, 0.3)]
    said = numbers(r"differ by about the noise: (\S+), (\S+), (\S+) and (\S+) for all four")
    assert said == [rounded(of_all_four(judge, damping, None)) for damping in some]
    low, default = some[:2]
    said = numbers(r"better than the default 0\.1\*\*, (\S+) against ([\d.]+)\. It is")
    assert said == [rounded(of_all_four(judge, damping, RATES)) for damping in (low, default)]
    said = numbers(r"gain, (\S+) against (\S+) for the three together; C-Adam loses, (\S+) against ([\d.]+)\. ")
    groups = (OF_SGD, ["c-adam"])
    assert said == [rounded(of_all_four(judge, one, RATES, names)) for names in groups for one in (low, default)]


def test_what_is_said_of_the_papers_damping(judge):
    former = "absolute 0.01"

    def diverged(damping):
        return sum(judge.verdict(name, damping, RATES[name], study.SEEDS).diverged for name in summary.CORRECTED)

    for rates in (None, RATES):
        means = sorted(of_all_four(judge, damping, rates) for damping in study.DAMPINGS)
        assert of_all_four(judge, former, rates) >= means[-2]
    assert diverged(former) == max(map(diverged, study.DAMPINGS))
    said = numbers(r"either way \((\S+) tuned, (\S+) at one rate\).*?: (\d+) of (\d+), against (\d+) with ρ = 0\.1\.")
    runs = len(summary.CORRECTED) * len(study.FULL.tasks) * len(study.SEEDS)
    means = [rounded(of_all_four(judge, former, rates)) for rates in (None, RATES)]
    assert said == [*means, diverged(former), runs, diverged(DAMPING)]


def test_what_is_said_of_the_bound(judge):
    def endings(damping):
        runs = [run for run in study.stress(study.FULL, judge.results, damping) if run.contestant in OF_SGD]
        records = [judge.results.records[run] for run in runs]
        not_finite = sum(record["final"] is None for record in records)
        diverged = sum(record["diverged"] for record in records)
        below = sum(not record["diverged"] and record["final"] < record["initial"] for record in records)
        return len(records), not_finite, diverged - not_finite, below

    runs, not_finite, above, _ = endings(DAMPING)
    assert numbers(r"without a bound (\d+) of (\d+) runs .*? and (\d+) more above") == [not_finite, runs, above]
    said = numbers(r"best rate (\d+) of (\d+) runs ended in NaN without it and none with it", ADVICE)
    assert said == [not_finite, runs]
    runs, not_finite, above, below = endings(BOUNDED)
    assert (not_finite, above) == (0, 0)
    said = numbers(r"none does, (\d+) of (\d+) end below their first loss and (\d+) above it")
    assert said == [below, runs, runs - below]
    bounds = [f"{DAMPING}, bound {bound}" for bound in (0.1, 0.2, 0.4)]
    adam = judge.verdict("c-adam", DAMPING, RATES["c-adam"], study.SEEDS).mean
    means = [of_all_four(judge, damping, RATES, OF_SGD) ** 0.75 * adam**0.25 for damping in bounds]
    assert numbers(r"0\.1, 0\.2 and 0\.4 have (\S+), (\S+) and ([\d.]+)\)") == [rounded(mean) for mean in means]


def test_where_the_c_versions_are_said_to_lose(judge):
    def ratio(name, task):
        return judge.verdict(name, DAMPING, None, study.SEEDS, [task]).mean

    tasks = study.FULL.tasks
    assert numbers(r"behind on (\d+) of 16 tasks\. It is compared") == [sum(ratio("c-sgd", task) > 1 for task in tasks)]
    best = [summary.tuned_plain(study.FULL, judge.results, task, ("sgd", "nesterov")) for task in tasks]
    assert numbers(r"which is Nesterov on (\d+) of 16") == [sum(name == "nesterov" for name, _ in best)]
    said = numbers(r"behind by a little \((\S+) and (\S+); (\S+) and (\S+)\)")
    assert said == [rounded(ratio(n, task)) for task in ("signals", "gpt-characters") for n in OF_SGD[1:]]
    named = ("pinn", "smooth-function", "digits-resnet-bn")
    assert {task for task in tasks if ratio("c-adam", task) > 1} == set(named)
    said = numbers(r"the PINN \((\S+)\), the smooth function \((\S+)\) and the ResNet with BatchNorm \((\S+)\)")
    assert said == [rounded(ratio("c-adam", task)) for task in named]
    at_one_rate = [judge.verdict(*who, 1e-3, study.SEEDS).mean for who in (("c-adam", DAMPING), ("adam", ""))]
    assert numbers(r"it is worse than Adam, (\S+) against ([\d.]+):") == [rounded(mean) for mean in at_one_rate]


def test_what_is_said_of_learning_rates(judge):
    said = numbers(r"\(the autoencoder: SGD (\S+), C-SGD ([\d.]+)\)")
    assert said == [judge.tuned_rate("autoencoder", *who) for who in (("sgd", ""), ("c-sgd", DAMPING))]
    names = ("table-regression", "table-classes", "digits-cnn", "digits-deep-mlp", "q-learning", "autoencoder", "vae")
    tasks = (*names, "siren")
    best = [[judge.results.best_rate(study.FULL, t, "c-sgd", d) for t in tasks] for d in (DAMPING, BOUNDED)]
    same = sum(free == bounded for free, bounded in zip(*best, strict=True))
    assert numbers(r"stays the same on (\d) of (\d) tasks") == [same, len(tasks)]
    said = numbers(r"have verdicts of (\S+), (\S+) and (\S+) without the bound and of (\S+), (\S+) and (\S+) with it")
    verdicts = [
        judge.verdict("c-sgd", damping, rate, [study.TUNING_SEED], tasks)
        for damping in (DAMPING, BOUNDED)
        for rate in (0.1, 0.3, 1.0)
    ]
    assert said == [rounded(verdict.mean) for verdict in verdicts]


def test_the_advised_rates_are_those_of_the_study(judge):
    table = CHOOSING.split("| my rate is |")[1].split("\n\n")[0]
    seen = 0
    for row, name in zip(table.splitlines()[2:], ("C-SGD", "C-Nesterov", "C-Adam"), strict=True):
        because = row.strip("| ").split(" | ")[2]
        for word, verdict, rate in re.findall(r"(?:(C-\w+|Adam) )?([\d.]+) at ([\d.]+)", because):
            name = word or name
            damping = {"Adam": "", "C-Adam": f"relative {DEFAULT.value:g}"}.get(name, DAMPING)
            found = judge.verdict(name.lower(), damping, float(rate), [study.TUNING_SEED])
            assert (found.missing, float(verdict)) == (0, rounded(found.mean)), (name, rate)
            seen += 1
    assert seen == table.count(" at ") == 15
    medians = summary.learning_rates(judge, DAMPING).split("**median of the quotient** | ")[1].split(" |\n")[0]
    sgd, momentum, nesterov, adam = medians.split(" | ")
    assert re.findall(r"best rates: (.*?) of", table) == [sgd, f"{nesterov} and {momentum}", adam]


def test_what_is_said_of_averages(judge):
    bounded = f"{AVERAGED}{BOUNDED.removeprefix(DAMPING)}"
    told = re.findall(r"(\d\.\d\d) instead of (\d\.\d\d) on `([\w-]+)`", PROSE)
    assert len(told) == 6
    for ours, theirs, task in told:
        means = [judge.verdict("c-sgd", case, 0.1, study.SEEDS, [task]).mean for case in (bounded, BOUNDED)]
        assert [float(ours), float(theirs)] == [rounded(mean) for mean in means]
    unbounded = judge.verdict("c-sgd", AVERAGED, None, study.SEEDS)
    said = numbers(r"tuned rates (\d+) of (\d+) runs of C-SGD diverged without it")
    assert said == [unbounded.diverged, unbounded.runs]
