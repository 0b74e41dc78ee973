"""The real models' dimensions and what a round costs their drafters, from abstract arrays alone."""

import math

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from dspark_jax.tensor_files import flatten
from experiments.drafter_costs import CostOptions, cost_rows, print_costs, work_of
from experiments.model_presets import MODEL_PRESETS

BILLIONS = {"qwen3_4b": 4.022, "qwen3_8b": 8.191, "qwen3_14b": 14.768, "gemma4_12b": 11.907}
"""Parameters: the Qwen3 figures are those of the released checkpoints; Gemma 4 12B's card says 11.95 with the image and audio embedders."""


def _count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_target_has_the_parameters_of_the_released_one(name):
    preset = MODEL_PRESETS[name]()
    assert round(_count(preset.target.abstract_params()) / 1e9, 3) == BILLIONS[name]
    spec = preset.target.spec
    assert preset.taps == tuple(sorted(set(preset.taps))) and preset.taps[-1] <= spec.num_layers - 2
    assert preset.mask_token_id < spec.vocab_size


@pytest.mark.parametrize(
    ("name", "width", "queries", "inner"),
    [("qwen3_4b", 2560, 4096, 9728), ("qwen3_8b", 4096, 4096, 12288), ("qwen3_14b", 5120, 5120, 17408)],
)
def test_drafters_of_qwen3_have_the_shapes_of_the_released_checkpoints(name, width, queries, inner):
    preset = MODEL_PRESETS[name]()
    shapes = {key: leaf.shape for key, leaf in flatten(preset.dspark().abstract_params()).items()}
    assert shapes["fc.weight"] == (width, 5 * width)
    assert shapes["layers_4.self_attn.q_proj.weight"] == (queries, width)
    assert shapes["layers_0.self_attn.k_proj.weight"] == shapes["layers_0.self_attn.v_proj.weight"] == (1024, width)
    assert shapes["layers_0.mlp.down_proj.weight"] == (width, inner)
    assert shapes["markov_head.markov_w2.weight"] == (151_936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, width + 256)
    eagle = {key: leaf.shape for key, leaf in flatten(preset.eagle3().abstract_params()).items()}
    assert eagle["layers_0.self_attn.q_proj.weight"] == (queries, 2 * width)
    assert eagle["layers_0.self_attn.k_proj.weight"] == (1024, 2 * width)
    assert "layers_1.self_attn.q_proj.weight" not in eagle


def test_drafters_of_gemma_4_are_built_of_full_attention_layers():
    preset = MODEL_PRESETS["gemma4_12b"]()
    shapes = {key: leaf.shape for key, leaf in flatten(preset.dspark().abstract_params()).items()}
    assert shapes["layers_0.self_attn.q_proj.weight"] == (16 * 512, 3840)
    assert shapes["layers_0.self_attn.k_proj.weight"] == (512, 3840)
    assert "layers_0.self_attn.v_proj.weight" not in shapes and shapes["layers_0.layer_scalar"] == (1,)


def test_products_are_counted_as_often_as_they_run():
    a, b = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 7), jnp.float32)
    once = work_of(lambda x, y: x @ y, a, b)
    assert (once.flops, once.bytes) == (2 * 3 * 5 * 7, 2 * (15 + 35 + 21))

    def looped(x, y):
        return jax.lax.scan(lambda carry, _: (carry, jax.jit(jnp.dot)(x, y)), 0, length=4)

    assert work_of(looped, a, b) == once.times(4)
    assert work_of(lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: jnp.zeros((3, 7))), a, b) == once


def test_the_table_shows_what_the_paper_argues(tmp_path):
    """A parallel backbone reads its layers once for all drafts; a chain reads layer and head once for each."""
    rows = {row["drafter"]: row for row in cost_rows(MODEL_PRESETS["qwen3_4b"](), 1, 64)}
    dspark, dflash, eagle = rows["DSpark"], rows["DFlash"], rows["Eagle3"]
    w2 = 151_936 * 256
    assert dspark["parameters"] - dflash["parameters"] == 2 * w2 + 2560 + 256 + 1
    assert 0.9 < (dspark["bytes"] - dflash["bytes"]) / (7 * 2 * w2) < 1.1, "W2 is read once a draft"
    assert eagle["bytes"] > 2.5 * dspark["bytes"] and eagle["parameters"] < dspark["parameters"]
    assert rows["target, plain step"]["byte_share"] == 1.0
    console = Console(width=140, record=True, file=(tmp_path / "log").open("w"))
    print_costs(CostOptions(presets=("qwen3_4b",), context=64, out=tmp_path / "costs.csv"), console)
    assert "DSpark, RNN head" in console.export_text()
    assert len((tmp_path / "costs.csv").read_text().splitlines()) == 8
    with pytest.raises(ValueError, match="presets holds 'gpt5'; known: qwen3_4b"):
        CostOptions(presets=("gpt5",))
