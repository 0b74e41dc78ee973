"""The latency of the sequential head: drafters that differ in the head alone, and shares that follow from the times."""

import pytest

from dspark_jax.drafters.kinds import drafter_from
from experiments.head_latency import HEADS, LatencyOptions, drafter_with, plot, rows_of
from experiments.presets import smollm2_dspark


def test_drafters_differ_in_the_head_alone():
    """Without a head nothing of it is left among the parameters; with one, the backbone is the same."""
    shapes = {head: drafter_with(head, 5, 1024, 16).abstract_params() for head in HEADS}
    assert "markov_head" not in shapes["none"]
    for head in HEADS[1:]:
        rest = {name: leaf for name, leaf in shapes[head].items() if name != "markov_head"}
        assert rest == shapes["none"]
        assert shapes[head]["markov_head"]["markov_w2"]["weight"].shape == (1024, 16)
    backbone = drafter_from(smollm2_dspark().drafter).abstract_params()["layers_0"]
    assert backbone == shapes["none"]["layers_0"], "that of the released drafter"


def test_shares_are_of_a_proposal_and_of_a_round(tmp_path):
    options = LatencyOptions(block_sizes=(4, 8), vocabularies=(1024,))
    seconds = {("target", size): 0.060 for size in (4, 8)}
    seconds |= {(head, 1024, size): 0.010 for head in HEADS for size in (4, 8)} | {("rnn", 1024, 8): 0.020}
    rows = rows_of(seconds, options)
    assert [(row["head"], row["block_size"]) for row in rows] == [(head, size) for head in HEADS for size in (4, 8)]
    slow = rows[-1]
    assert (slow["proposal_ms"], slow["head_ms"], slow["share_of_proposal"], slow["share_of_round"]) == (20.0, 10.0, 0.5, 0.125)
    assert all(row["head_ms"] == 0.0 for row in rows[:-1])
    pytest.importorskip("matplotlib", reason="needs the package matplotlib (extra `plots`)")
    plot(rows, options, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_sizes", (8, 4), r"block_sizes is \(8, 4\); allowed: one or more ascending integers of at least 1"),
        ("vocabularies", (60_000,), r"vocabularies is \(60000,\); allowed: up to 49152, the target's own"),
        ("repetitions", 0, "repetitions is 0; at least 1 is needed"),
    ],
)
def test_options_that_make_no_sense_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        LatencyOptions(**{field: value})
