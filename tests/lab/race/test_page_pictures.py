"""What docs/race.md says of pictures and the distance field is in results/race."""

import re

from race_page import CHINA, RACE, ROOT, TEXT, ends

from consequent.maths.damping import DEFAULT
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.measures import TimeTo
from consequent_lab.race.results import Results
from consequent_lab.race.table import headings, rows, spread_of
from consequent_lab.race.tasks import TASKS


def test_what_is_said_of_larger_pictures_and_the_distance_field():
    large = {name: ends(f"siren-256-{name}") for name in ("china", "flower", "astronaut")}
    gaps = [large[name]["C-Adam"] - large[name]["Adam"] for name in ("flower", "astronaut")]
    assert f"on 'flower' C-Adam is {gaps[0]:.0f} dB above Adam, on 'astronaut' {-gaps[1]:.0f} dB below" in TEXT
    gains = [found["C-Adam-0.95"] - found["C-Adam"] for found in large.values()]
    assert f"With β₂ = 0.95 C-Adam gains {min(gains):.0f} to {max(gains):.0f} dB, but so does Adam" in TEXT
    lost = [found["Adam-0.95"] - found["C-Adam-0.95"] for found in large.values()]
    assert f"which is {min(lost):.1f} to {max(lost):.1f} dB above C-Adam-0.95 on all three" in TEXT
    assert f"the correction makes Adam worse, by {min(lost):.1f} to {max(lost):.1f} dB" in TEXT
    for name, firsts in {"china": ["Muon", "Adam-0.95"], "flower": ["Muon", "Adam-0.95"]}.items():
        assert sorted(large[name], key=large[name].get, reverse=True)[:2] == firsts
    assert max(large["astronaut"], key=large["astronaut"].get) == "Adam-0.95"
    fourier = [ends(f"fourier-256-{name}") for name in large]
    for found in fourier:
        assert sorted(found, key=found.get, reverse=True)[:3] == ["SOAP", "Muon", "C-Adam-0.95"]
    gaps = [[found["C-Adam-0.95"] - found[name] for found in fourier] for name in ("Adam", "Adam-0.95")]
    assert (
        f"then Muon, then C-Adam-0.95, {min(gaps[0]):.0f} to {max(gaps[0]):.0f} dB above Adam and "
        f"{min(gaps[1]):.0f} to {max(gaps[1]):.0f} dB above Adam-0.95" in TEXT
    )
    field = ends("siren-sdf")
    assert sorted(field, key=field.get, reverse=True)[:2] == ["SOAP", "C-Adam-0.95"]
    over, under = field["C-Adam-0.95"] - field["Adam"], field["SOAP"] - field["C-Adam-0.95"]
    assert f"C-Adam-0.95 is second, {over:.0f} dB above Adam and {under:.0f} dB below SOAP" in TEXT
    assert f"Adam-0.95 is {field['Adam-0.95'] - field['Adam']:.1f} dB above Adam" in TEXT
    assert (
        f"second behind SOAP with β₂ = 0.95, {field['C-Adam-0.95'] - field['Adam-0.95']:.1f} dB above Adam with" in TEXT
    )
    assert 0 < field["C-Adam"] - field["Adam"] < 1


def test_who_is_first_on_the_way_to_the_end():
    def firsts(picture, decibels):
        results = Results.of(TASKS[f"siren-128-{picture}"], RACE.output)
        measure = TimeTo("psnr", decibels, rising=True)
        found = {name: spread_of(measure, results.finals(name)).median for name in CONTESTANTS if results.finals(name)}
        return [name for name in sorted(found, key=found.get) if found[name] == min(found.values())], found

    for picture in ("china", "flower"):
        names, found = firsts(picture, 40.0)
        assert names == ["C-Adam-0.95"]
        assert sorted(found, key=found.get)[1] == "C-Adam"
    assert {*firsts("astronaut", 40.0)[0]} == {"C-Adam-0.95", "C-Nesterov"}
    for picture in ("china", "flower", "astronaut"):
        assert "C-Nesterov" in firsts(picture, 30.0)[0]


def test_what_is_said_of_a_short_memory_of_squares():
    results = Results.of(TASKS["fourier-128-china"], RACE.output)
    pictures = ("china", "flower", "astronaut")
    china, *others = fourier = [ends(f"fourier-128-{picture}") for picture in pictures]
    ours = china["C-Adam-0.95"]
    said = re.search(
        r"ends (\d+) dB above C-Adam, and is then before C-Muon, behind SOAP by (\d+) dB and Muon by (\d+)\. "
        r"Adam itself gains (\d+) dB.*? it gains (\d+) dB on 'flower' and (\d+) dB on 'astronaut'",
        TEXT,
    )
    gains = [ours - china["C-Adam"], china["SOAP"] - ours, china["Muon"] - ours, china["Adam-0.95"] - china["Adam"]]
    gains += [one["C-Adam-0.95"] - one["C-Adam"] for one in others]
    assert list(said.groups()) == [f"{gain:.0f}" for gain in gains]
    assert ours > china["C-Muon"]

    def spread(races, one, other):
        gaps = [race[one] - race[other] for race in races]
        return f"{min(gaps):.0f} to {max(gaps):.0f} dB"

    assert f"C-Adam is {spread(fourier, 'C-Adam', 'Adam')} above Adam" in TEXT
    assert f"with β₂ = 0.95 it is {spread(fourier, 'C-Adam-0.95', 'Adam')} above Adam" in TEXT
    assert f"and still {spread(fourier, 'SOAP', 'C-Adam-0.95')} below SOAP" in TEXT
    sirens = [ends(f"siren-128-{picture}") for picture in pictures]
    assert f"Adam itself gains {spread(sirens, 'Adam-0.95', 'Adam')}" in TEXT
    assert f"C-Adam-0.95 is {spread(sirens, 'C-Adam', 'C-Adam-0.95')} below C-Adam" in TEXT
    large = ends("siren-256-china")
    assert (
        "C-Adam {:.1f} dB, Adam {:.1f}, Muon {:.1f}".format(*(large[one] for one in ("C-Adam", "Adam", "Muon"))) in TEXT
    )
    assert f"and Muon {large['Muon'] - large['Adam']:.0f} dB above both" in TEXT
    assert {line["device"] for name in ("C-Adam-0.95", "Adam-0.95") for line in results.finals(name)} == {"cpu"}
    page = " ".join((ROOT / "docs" / "defaults.md").read_text().split())
    assert f"with 0.95 it ended {gains[0]:.0f} dB higher" in page


def test_what_a_higher_rate_and_more_damping_gave_is_in_the_trials():
    results = Results.of(TASKS["fourier-128-china"], RACE.output)
    near = [
        min(results.trials(name), key=lambda line: abs(line["settings"]["lr"] - rate))
        for name, rate in (("C-Adam", 0.0043), ("C-Adam-0.95", 0.0046))
    ]
    assert [f"{line['settings']['lr']:.4f}" for line in near] == ["0.0043", "0.0046"]
    assert {f"{line['settings']['relative_damping']:.2f}" for line in near} == {"0.03"}
    assert f"it was {near[0]['score'] - near[1]['score']:.0f} dB, in single trials" in TEXT
    first = CHINA.trials("C-Adam")[0]
    assert first["settings"]["relative_damping"] == DEFAULT.value
    (chosen,) = {f"{line['settings']['relative_damping']:.2g}" for line in CHINA.finals("C-Adam")}
    high, low = f"{ends('siren-128-china')['C-Adam']:.0f}", f"{-first['score']:.0f}"
    choosing, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/choosing.md", "README.md"))
    assert f"SIRENs {chosen}, where that meant {high} dB instead of {low}" in choosing
    assert f"{high} dB came with a damping of {chosen}, with {DEFAULT.value:g} and a lower rate it was {low}" in readme
    assert first["settings"]["lr"] < CHINA.best("C-Adam")["settings"]["lr"]
    lines = {name: next(row for row in rows(CHINA) if row.contestant == name).cells for name in ("Adam", "C-Adam")}
    place = headings(CHINA).index("steps to PSNR 40.0 dB") + 1
    eager = [f"{float(lines[name][place]):.2f}" for name in ("Adam", "C-Adam")]
    assert "at 40 dB after {} s, C-Adam after {}".format(*eager) in TEXT


def test_halving_gave_up_on_as_many_of_adams_trials_as_the_page_says():
    (trials, pruned) = re.findall(r"Of Adam's (\d+) trials (\d+) were given up", TEXT)[0]
    states = [line["state"] for line in CHINA.trials("Adam")]
    assert (len(states), states.count("pruned")) == (int(trials), int(pruned))
    assert CHINA.best("Adam")["number"] == 0
