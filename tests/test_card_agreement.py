"""The comparison with the original card refuses what it cannot compare, and reads the card's figures."""

import json

import pytest

from experiments.card_agreement import Agreement, compare_with_card
from tests.tiny_models import needs_gguf, needs_smollm2


def test_cells_and_counts_outside_the_card_are_refused():
    with pytest.raises(ValueError, match="cells has .poetry, 0."):
        Agreement(cells=(("poetry", 0),))
    with pytest.raises(ValueError, match="per_cell is 129"):
        Agreement(per_cell=129)


@needs_gguf
@needs_smollm2
@pytest.mark.slow
def test_a_few_answers_come_near_the_card(shared, tmp_path):
    """Four greedy code answers: one draft is accepted as often as the card says, to sampling error."""
    texts = tuple(shared / "smollm2" / f"smollm2_onpolicy_{part}.npz" for part in (0, 1))
    out = tmp_path / "agreement.json"
    config = Agreement(source=shared / "smollm2" / "smollm2_dspark_2l_r64", texts=texts, cells=(("code", 0),), per_cell=4, out=out)
    report = compare_with_card(config)
    cell = json.loads(out.read_text())["cells"]["code at 0"]
    assert cell == report["cells"]["code at 0"] and len(cell["ours"]) == len(cell["card"]) == 7
    assert abs(cell["ours"][0] - cell["card"][0]) < 0.15
