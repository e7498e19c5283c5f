"""What a notebook shows: short reprs, small tables, figures, progress."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_report import TINY

from bltoolbox import RunResult, load_recipe, plot, run, show_images
from bltoolbox.errors import BltError
from bltoolbox.reports.notebook import html_table

FEW = [*TINY, "budget={steps: 2}"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(load_recipe("smoke", FEW), out=tmp_path_factory.mktemp("notebook") / "run")


def test_reprs_are_short(result: RunResult) -> None:
    assert result.evaluation is not None
    for one in (result, result.model, result.evaluation, result.model.recipe):
        text = repr(one)
        assert len(text) < 200 and "\n" not in text and text.startswith(type(one).__name__ + "(")
    assert f"-> {result.evaluation.mean():.2f} dB" in repr(result) and "budget spent" in repr(result)
    assert repr(result.evaluation).startswith("Evaluation(5 images, PSNR ")
    assert repr(result.model.recipe).startswith("Recipe('smoke': dead-leaves, identity, foe, agd, cg-ift")


def test_tables_have_the_figures(result: RunResult) -> None:
    assert result.evaluation is not None
    for one in (result, result.model, result.evaluation, result.model.recipe):
        table = one._repr_html_()
        assert table.startswith(("<table>", "<details>")) and "<script" not in table
    assert f"{result.evaluation.mean():.2f} dB" in result._repr_html_()
    assert "regularizer.kernels" in result.model._repr_html_() and "2×3×3×3" in result.model._repr_html_()
    assert result.evaluation._repr_html_().count("<tr>") == 7
    assert "&lt;b&gt;" in html_table("<b>", [("a", "<i>")]) and "<i>" not in html_table("", [("a", "<i>")])


def test_figures_show_themselves(result: RunResult, tmp_path: Path) -> None:
    for figure in (plot(result), show_images(result)):
        assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
        figure.savefig(tmp_path / "figure.pdf")
    assert [axes.get_title() for axes in plot(result).axes][-1] == "PSNR in dB"
    assert len(show_images(result).axes) == 4 * 4, "true, measured, baseline and restored of four images"


def test_a_run_without_images_is_a_sentence() -> None:
    result = run(load_recipe("smoke", [*FEW, "evaluation=null", "baseline=null", "validation={count: 0}"]))
    with pytest.raises(BltError, match="no images to show"):
        show_images(result)
    assert "PSNR" not in repr(result) and "PSNR" not in result._repr_html_()


def test_progress(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every check where there is neither a terminal nor a notebook with widgets."""
    recipe = load_recipe(
        "smoke", [*FEW, "evaluation=null", "baseline=null", "validation={count: 2, checks: 2}"]
    )
    run(recipe, progress=True)
    said = capfd.readouterr().err
    assert "step 0: validation PSNR" in said and "step 2: validation PSNR" in said
    run(recipe)
    assert capfd.readouterr().err == ""
    assert "\n" in said and "started: smoke" in said


CELLS = """
from bltoolbox import load_recipe, run
from test_notebook import FEW
result = run(load_recipe("smoke", FEW), out={out!r}, progress=True)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_shows_a_bar_and_nothing_red(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    setup = f"import sys; sys.path[:0] = {here!r}"
    cells = [nbformat.v4.new_code_cell(text) for text in (setup, CELLS.format(out=str(tmp_path / "run")))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (output,) = notebook.cells[1].outputs
    assert output.output_type == "display_data"
    page = output.data["text/html"]
    assert '<progress value="1.0000"' in page and "step 2 · budget spent" in page and str(tmp_path) in page
    assert "red" not in page
