"""The map in CONTRIBUTING.md: every module is named in the table of its folder, and nothing that is not there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "consequent"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

NOT_ASKED_FOR = {"__init__.py", "__main__.py"}  # they may be named, and need not be


def table_under(heading):
    """The first cell of every row of the table that follows the bold heading, as they are written."""
    beginning = CONTRIBUTING.index(f"\n**`{heading}`**")
    table = re.search(r"\n\|[^\n]*\|\n\|---\|---\|\n((?:\|[^\n]*\|\n)+)", CONTRIBUTING[beginning:])
    assert table is not None
    return [row.split("|")[1].strip() for row in table[1].splitlines()]


def folders_of_modules():
    """{a folder's heading in the map: the folder}."""
    folders = {path.parent for path in LIBRARY.rglob("*.py") if path.name not in NOT_ASKED_FOR}
    named = {f"{folder.relative_to(LIBRARY)}/": folder for folder in folders - {LIBRARY}}
    study = "benchmarks/defaults/"
    return {"consequent/": LIBRARY, study: ROOT / study} | dict(sorted(named.items()))


@pytest.mark.parametrize("heading", folders_of_modules())
def test_every_module_is_in_the_map_and_the_map_names_no_other(heading):
    folder = folders_of_modules()[heading]
    named = [cell.strip("`") for cell in table_under(heading)]
    assert len(set(named)) == len(named)
    assert set(named) - NOT_ASKED_FOR == {path.name for path in folder.glob("*.py")} - NOT_ASKED_FOR


def test_every_folder_of_tests_is_in_the_map():
    tests = ROOT / "tests"
    folders = {f"{path.parent.relative_to(tests)}/" for path in tests.rglob("test_*.py") if path.parent != tests}
    named = [name for cell in table_under("tests/") for name in re.findall("`(.*?)`", cell)]
    assert sorted(named) == sorted({"tests/", *folders})


def test_paths_in_the_text_exist():
    paths = set(re.findall(r"`([a-z_/]+/[a-z_0-9]*\.py)`", CONTRIBUTING))
    assert paths
    assert [path for path in sorted(paths) if not ((LIBRARY / path).exists() or (ROOT / path).exists())] == []
