"""docs/notebook.ipynb runs from top to bottom, and shows what it claims to."""

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ROOT

PATH = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(PATH, as_version=4)
    looks_at = "(min(losses[-20:]), [min(some[-20:]) for some in plain.values()], middle.tolist())"
    notebook.cells.append(nbformat.v4.new_code_cell(looks_at))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *cells, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    drawn = [any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells]
    assert sum(drawn) == 3
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    ours, plain, cosines = eval(last.outputs[0]["data"]["text/plain"])
    assert ours < min(plain)
    assert all(corrected > backprop for backprop, corrected in cosines)


def test_it_is_kept_as_it_ran():
    notebook = nbformat.read(PATH, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert PATH.stat().st_size < 300_000
