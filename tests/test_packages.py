"""Wheel and sdist are built, installed into an empty environment and used there; versions agree; CITATION.cff."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
import tomllib
import yaml

import consequent
from consequent_lab.cli import main

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE_PACKAGES = pathlib.Path(sysconfig.get_path("purelib"))

ONE_STEP = """
import pathlib, sys, torch, consequent
assert pathlib.Path(consequent.__file__).is_relative_to(sys.prefix), consequent.__file__
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
inputs, targets = torch.eye(2, 3) + 0.5, torch.tensor([[1.0], [2.0]])
optimizer = consequent.CSGD(model, lr=1.0, damping=1e-6)
(0.5 * (model(inputs) - targets) ** 2).mean().backward()
optimizer.step()
assert (model(inputs) - targets).abs().max() < 1e-3
assert (pathlib.Path(consequent.__file__).parent / "py.typed").exists()
"""


def run(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Wheel and sdist, built from what git has."""
    folder = tmp_path_factory.mktemp("packages")
    tree = folder / "tree"
    files = run("git", "ls-files", "-z", "src", *PROJECT["license-files"], "README.md", "pyproject.toml", cwd=ROOT)
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    build = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    run(sys.executable, "-c", build, cwd=tree)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_is_installed_and_used(packages, kind, tmp_path):
    prefix = tmp_path / "environment"
    venv.create(prefix, with_pip=False, symlinks=True)
    python = prefix / "bin" / "python"
    here = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Nothing is downloaded. To build an sdist takes setuptools, which is lent alone …
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "setuptools",
        "_distutils_hack",
        "pkg_resources",
        *(p.name for p in SITE_PACKAGES.glob("setuptools-*")),
    ):
        if (SITE_PACKAGES / name).exists():
            (tools / name).symlink_to(SITE_PACKAGES / name)
    (here / "lent.pth").write_text(f"{tools}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", packages[kind])
    # … and to use it torch and what the command needs. (No .pth file of that folder is read: they may name this tree.)
    (here / "lent.pth").write_text(f"{SITE_PACKAGES}\n")
    run(python, "-I", "-c", ONE_STEP, cwd=tmp_path)
    assert run(prefix / "bin" / "consequent", "--version", cwd=tmp_path).startswith(f"consequent {PROJECT['version']} ")
    assert "demo" in run(prefix / "bin" / "consequent", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_nothing_is_missing_in_them(packages):
    files = run("git", "ls-files", cwd=ROOT / "src").split()
    files = {name for name in files if (ROOT / "src" / name).exists()}
    assert {pathlib.Path(name).suffix for name in files} >= {".py", ".html", ".css", ".js", ".typed"}
    in_wheel = set(zipfile.ZipFile(packages["wheel"]).namelist())
    assert files - in_wheel == set()
    with tarfile.open(packages["sdist"]) as archive:
        in_sdist = {name.partition("/src/")[2] for name in archive.getnames()}
    assert files - in_sdist == set()


def test_the_version_is_one(capsys):
    assert consequent.__version__ == PROJECT["version"]
    assert main(["--version"]) == 0
    assert re.match(rf"consequent {re.escape(PROJECT['version'])} \(torch \S+, Python \S+\)$", capsys.readouterr().out)


def test_the_citation_is_that_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    names = [author["family-names"] for author in paper["authors"]]
    assert f"[{' & '.join(names)}, {paper['year']}]({paper['url']})" in " ".join(
        (ROOT / "README.md").read_text().split()
    )
