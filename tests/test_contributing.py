"""The map in CONTRIBUTING.md: every module and every folder of tests is named, and nothing that is not there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "consequent"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def table_under(heading):
    """What is named in the first cells of the table with this heading."""
    table = CONTRIBUTING.split(f"| {heading} |")[1].split("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall("`(.*?)`", row.split("|")[1])]


def test_every_module_is_in_the_map_and_the_map_names_no_other():
    modules = {str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(table_under("file | its one idea")) == sorted(modules)


def test_every_folder_of_tests_is_in_the_map():
    named = table_under("folder | what is in it")
    assert all((ROOT / name).exists() for name in named)
    folders = {
        f"tests/{path.relative_to(ROOT / 'tests').parts[0]}/" for path in (ROOT / "tests").glob("*/**/test_*.py")
    }
    assert {name for name in named if name.startswith("tests/")} == folders


def test_paths_in_the_text_exist():
    paths = set(re.findall(r"`([a-z_/]+/[a-z_0-9]*\.py)`", CONTRIBUTING))
    assert paths
    assert [path for path in sorted(paths) if not ((LIBRARY / path).exists() or (ROOT / path).exists())] == []
