"""What docs/race.md says of pictures and the distance field is in results/race."""

from race_page import CHINA, ROOT, TEXT, ends

PICTURES = ("china", "flower", "astronaut")


def spread(races, one, other, digits=0):
    """By how many decibels one contestant is above another on several pictures."""
    gaps = [race[one] - race[other] for race in races]
    return f"{min(gaps):.{digits}f} to {max(gaps):.{digits}f} dB"


def test_larger_pictures_and_the_distance_field():
    large = [ends(f"siren-256-{name}") for name in PICTURES]
    names = ("C-Adam", "Adam", "Muon")
    assert "C-Adam {:.1f} dB, Adam {:.1f}, Muon {:.1f}".format(*(large[0][name] for name in names)) in TEXT
    gaps = [race["C-Adam"] - race["Adam"] for race in large[1:]]
    assert f"on 'flower' C-Adam is {gaps[0]:.0f} dB above Adam, on 'astronaut' {-gaps[1]:.0f} dB below" in TEXT
    assert f"With β₂ = 0.95 C-Adam gains {spread(large, 'C-Adam-0.95', 'C-Adam')}, but so does Adam" in TEXT
    assert f"which is {spread(large, 'Adam-0.95', 'C-Adam-0.95', 1)} above C-Adam-0.95 on all three" in TEXT
    for name in PICTURES:
        found = ends(f"fourier-256-{name}")
        assert sorted(found, key=found.get, reverse=True)[:3] == ["SOAP", "Muon", "C-Adam-0.95"]
    field = ends("siren-sdf")
    assert sorted(field, key=field.get, reverse=True)[:2] == ["SOAP", "C-Adam-0.95"]
    over, under = field["C-Adam-0.95"] - field["Adam"], field["SOAP"] - field["C-Adam-0.95"]
    assert f"C-Adam-0.95 is second, {over:.0f} dB above Adam and {under:.0f} dB below SOAP" in TEXT
    assert 0 < field["C-Adam"] - field["Adam"] < 1


def test_fourier_features():
    fourier = [ends(f"fourier-128-{name}") for name in PICTURES]
    assert f"C-Adam is {spread(fourier, 'C-Adam', 'Adam')} above Adam" in TEXT
    assert f"with β₂ = 0.95 it is {spread(fourier, 'C-Adam-0.95', 'Adam')} above Adam" in TEXT
    assert f"and still {spread(fourier, 'SOAP', 'C-Adam-0.95')} below SOAP" in TEXT


def test_who_ends_below_whom():
    sirens = [ends(f"siren-128-{name}") for name in PICTURES]
    assert all(max(race["C-SGD"], race["C-Nesterov"]) < race["Adam"] for race in sirens)
    assert all(race["C-Muon"] < race["Muon"] for race in (*sirens, ends("fourier-128-china")))


def test_what_more_damping_gave_is_in_the_trials():
    first = CHINA.trials("C-Adam")[0]
    assert first["settings"]["relative_damping"] == 0.1
    (chosen,) = {f"{line['settings']['relative_damping']:.2g}" for line in CHINA.finals("C-Adam")}
    high, low = f"{ends('siren-128-china')['C-Adam']:.0f}", f"{-first['score']:.0f}"
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    assert f"SIRENs {chosen}, where that meant {high} dB instead of {low}" in choosing
