"""tour.ipynb runs from top to bottom, and was saved with its outputs."""

import re

import pytest
from repository_files import EXPERIMENTS

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def kinds(notebook) -> list[list[str]]:
    """MIME types of the outputs of each cell of code, without warnings."""
    return [
        sorted(kind for output in cell.outputs if output.get("name") != "stderr"
               for kind in output.get("data", {output.output_type: None}))
        for cell in notebook.cells if cell.cell_type == "code"
    ]


def test_tour_is_saved_with_its_pictures():
    notebook = nbformat.read(EXPERIMENTS / "tour.ipynb", 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in found for found in kinds(notebook)) == 8
    assert (EXPERIMENTS / "tour.ipynb").stat().st_size < 500_000


@pytest.mark.slow
def test_tour_runs_and_repeats_its_outputs(interpreter, monkeypatch):
    for name, value in (("OMP_NUM_THREADS", "1"), ("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXPERIMENTS / "tour.ipynb", 4)
    saved = kinds(notebook)
    nbclient.execute(notebook, cwd=EXPERIMENTS, timeout=240, kernel_name="python3")
    assert kinds(notebook) == saved
    text = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output)
    first, last = map(float, re.findall(r"(\d\.\d\d) → (\d\.\d\d) bits", text)[0])
    assert last < 4 < first
