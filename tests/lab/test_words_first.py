"""Words of a command line may stand anywhere among its options."""

import pytest

from consequent_lab import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("race times --contestants=SGD nothing --tiny", "no task 'nothing'"),
        ("race --images 9 1 data --output out nothing", "no set 'nothing'"),
        ("compare --figure None first --csv out.csv second", "first has no runs"),
        ("watch --once --every 2 first", "first has no runs"),
    ],
)
def test_words_behind_options_are_words(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "unknown"), [("race times --devcie cpu demo", "--devcie"), ("nothing --once", "nothing")]
)
def test_what_is_not_known_is_still_refused(arguments, unknown, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    assert unknown in capsys.readouterr().err
