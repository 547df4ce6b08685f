"""The study of shortened steps: it judges as it says, and what docs say of it is in results/shortened.jsonl.gz."""

import pathlib
import re

import pytest

from benchmarks.defaults import shortened
from benchmarks.defaults.residual import RESIDUAL
from benchmarks.defaults.shortened import ADVISED, Rule

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "defaults.md").read_text().split("## Do shortened steps tell")[1].split("\n## ")[0]
PROSE = " ".join(PAGE.split())
ADVICE = " ".join((ROOT / "docs" / "choosing.md").read_text().split())


@pytest.fixture(scope="module")
def study():
    return shortened.Study(ROOT / "results" / "shortened.jsonl.gz")


def tables():
    """The cells of each table of the page, without its heads."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in one.splitlines()[2:]] for one in found]


def test_the_rule_that_was_chosen_is_the_one_on_the_page_and_none_passes(study):
    choice = study.choice()
    assert choice.rule == Rule(0.7, 100, 0, of_layer=False)
    checked = study.verdicts(choice.rule)["checking"]
    said = f"has alarms in {checked.false} of {checked.good} good runs of the other tasks and finds {checked.found} of"
    assert f"more than 70 % in 100 steps, {said} {checked.bad} bad ones" in PROSE
    passing = {
        part: sum(shortened.passes(shortened.verdict(rule, runs)) for rule in shortened.RULES)
        for part, runs in study.parts.items()
    }
    assert passing["choosing"] == passing["checking"] == 0
    assert f"alone {passing['residual']} of the {len(shortened.RULES)} rules would pass" in PROSE
    assert f"jsonl.gz), {len(study.runs)} in all" in PROSE


def test_the_tables_are_in_the_results(study):
    alarms, bands = tables()
    for share, *cells in alarms:
        rule = Rule(float(share.removesuffix(" %")) / 100, 100, 0, of_layer=False)
        verdicts = study.verdicts(rule).values()
        counts = [(one.false, one.good, one.found, one.bad) for one in verdicts]
        assert cells == [
            cell for false, good, found, bad in counts for cell in (f"{false} of {good}", f"{found} of {bad}")
        ]
    for cells, band in zip(bands, study.bands(), strict=True):
        assert cells[0] == band.kind
        assert cells[1] == (f"to {band.high:.0%}" if band.high else "none")
        assert list(map(int, cells[2:5])) == [band.runs, band.good, band.bad]
        assert cells[5:] == [f"{count} of {band.with_lower}" for count in (band.lower_is_better, band.lower_is_worse)]


def test_the_numbers_in_the_text_are_in_the_results(study):
    bands = list(study.bands())
    none = [band for band in bands if band.high == 0]
    assert f"{sum(band.bad for band in none)} of {sum(band.runs for band in none)} such runs is bad" in PROSE
    assert f"better for {sum(b.lower_is_better for b in none)} of {sum(b.with_lower for b in none)}." in PROSE
    between = [band for band in bands[:5] if 0 < band.high <= 0.3]
    assert (
        f"coin on the tasks, {sum(b.lower_is_better for b in between)} of {sum(b.with_lower for b in between)}" in PROSE
    )
    most = bands[4]
    assert f"for {most.lower_is_better} of {most.with_lower} runs" in PROSE
    assert f"better for {most.lower_is_better} of {most.with_lower} such runs" in ADVICE
    alarms = study.verdicts(Rule(0.1, 100, 0, of_layer=False))
    tasks = [alarms["choosing"], alarms["checking"]]
    assert f"with 10 % in {sum(one.false for one in tasks)} of {sum(one.good for one in tasks)} good runs" in PROSE


def test_what_is_said_of_advised_rates_is_in_the_results(study):
    def advised(*contestants, residual):
        found = [one for one in study.runs if one.record["rate"] == ADVISED[one.record["contestant"]]]
        found = [one for one in found if one.record["contestant"] in contestants]
        return [one for one in found if (one.record["task"] in RESIDUAL) == residual]

    tasks, residual = (advised("c-sgd", residual=kind) for kind in (False, True))
    assert not any(one.is_bad for one in tasks)
    assert f"bad in none of {len(tasks)} runs" in PROSE
    assert all(one.is_bad for one in residual)
    assert f"{len(residual)} of {len(residual)} runs" in ADVICE
    ratios = [one.ratio for one in residual]
    assert f"from {min(ratios):.0f} to {max(ratios):.0f}" in PROSE
    assert f"{min(ratios):.0f} to {max(ratios):.0f} times worse at 0.1" in ADVICE
    best = {
        one.record["rate"] for one in study.parts["residual"] if one.ratio == 1 and one.record["contestant"] == "c-sgd"
    }
    assert best == {0.01, 0.03}
    with_momentum = [advised("c-momentum", "c-nesterov", residual=kind) for kind in (False, True)]
    first, second = (f"{sum(one.is_bad for one in runs)} of {len(runs)}" for runs in with_momentum)
    assert f"bad in {first} runs on the tasks and in {second} on the residual" in PROSE
    few = [one for one in residual if one.record["task"] == "residual-sines-64"]
    assert {f"{one.ratio:.0f}" for one in few} == {"7"}
    said = " and ".join(f"{100 * shortened.whole_share(one.record):.1f}" for one in few)
    assert f"with {said} % shortened" in PROSE


def made_up(rate, final, shortened="0 0 0 0", **others):
    return {"task": "a", "contestant": "c-sgd", "seed": 0, "rate": rate, "final": final, "floor": 0.0} | {
        "diverged": final is None, "layers": 2, "shortened": shortened, **others
    }  # fmt: skip


def test_shares_of_windows():
    record = made_up(0.1, 1.0, "3 1 0 1 2 3 3")
    assert shortened.whole_share(record) == 9 / 14
    assert shortened.highest_share(record, 2, 0, of_layer=False) == 3 / 4  # the last step is in no window
    assert shortened.highest_share(record, 2, 0, of_layer=True) == 1
    assert shortened.highest_share(record, 2, 1, of_layer=False) == 1
    assert shortened.highest_share(record, 4, 0, of_layer=False) == 1 / 2
    assert shortened.highest_share(record, 4, 4, of_layer=False) == 0


def test_good_and_bad_runs_and_their_alarms():
    records = [
        made_up(0.01, 4.0),
        made_up(0.03, 1.1),
        made_up(0.1, 1.0, "3 3 0 0"),
        made_up(0.3, 2.0),
        made_up(1, None),
    ]
    runs = shortened.judged(records[::-1])
    assert [one.record["rate"] for one in runs] == [0.01, 0.03, 0.1, 0.3, 1]
    assert [one.is_good for one in runs] == [False, True, True, False, False]
    assert [one.is_bad for one in runs] == [False, False, False, True, True]
    assert [one.is_below for one in runs] == [True, True, False, False, False]
    found = shortened.verdict(Rule(0.9, 2, 0, of_layer=False), runs)
    assert found[1:] == (2, 1, 2, 0, 2, 0, 1, 0, 0)
    assert shortened.verdict(Rule(0.9, 2, 2, of_layer=False), runs).alarms == 0


def test_a_rule_by_layers_has_to_be_worth_it():
    def verdict(found, false=0, *, of_layer=False, share=0.1):
        return shortened.Verdict(Rule(share, 20, 0, of_layer), 100, false, 100, found, 0, 0, 0, 0, 0)

    best = verdict(50)
    assert shortened.chosen([verdict(90, false=6), best, verdict(40)]) is best
    assert shortened.chosen([best, verdict(59, of_layer=True)]) is best
    assert shortened.chosen([best, better := verdict(60, of_layer=True)]) is better
    assert shortened.chosen([best, higher := verdict(50, share=0.2)]) is higher
    assert shortened.chosen([verdict(90, false=6)]) is None


def test_a_run_notes_what_the_counter_counts(monkeypatch, bounded, tmp_path):
    task = shortened.ALL_TASKS["table-regression"]
    steps = 6

    def short(seed):
        made = task(seed)
        made.steps = steps
        return made

    monkeypatch.setitem(shortened.ALL_TASKS, "table-regression", short)
    record = shortened.train("table-regression", "c-sgd", 10.0, 0)  # which looks whether both agree
    assert record["layers"] == 3
    assert len(record["shortened"].split()) == steps
    assert 0 < shortened.whole_share(record) <= 1
    path = tmp_path / "runs.jsonl"
    shortened.Records(path).append(record)
    assert shortened.Records(path).records == {("table-regression", "c-sgd", 10.0, 0): record}
