"""Each pipeline of diffusers gives the result of its own `__call__`, and docs/diffusion-models.md says so."""

from pathlib import Path

import pytest

from tests.diffusion.comparison import CASES, compare
from tools.docs_site.diffusion_models import PAGE, render_row

# Many classes of diffusers and transformers use deprecated functions of torch and numpy.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", CASES)
def test_a_stage_gives_the_result_of_the_call(name: str, tmp_path: Path) -> None:
    row = render_row(compare(name, tmp_path))
    # If this fails, run python -m tools.docs_site.diffusion_models.
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_one_row_for_each_pipeline() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(CASES)
