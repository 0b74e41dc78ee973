"""The report of what would run on TPUs that are not here: what is read off compiled programs, the rows, and the real thing."""

import dataclasses
import importlib.util
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from experiments import aot_report
from experiments.aot_page import curves_of, page_of
from experiments.aot_programs import RoundSize, decoding_round, live_bytes, models, topology_mesh, training_step
from experiments.aot_report import AotOptions, Case, cases_of, extended, failed_row, row_of
from experiments.hlo_collectives import collective_bytes, estimated_cycles
from experiments.hlo_traffic import main_memory_bytes
from experiments.model_presets import MODEL_PRESETS
from experiments.written_out import written_out

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the package libtpu (extra `aot`)")

PROGRAM = """
HloModule m, is_scheduled=true

%advance (p.1: bf16[64,8]) -> bf16[64,128] {
  ROOT %all-gather.2 = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=7, replica_groups=[1,16]<=[16], dimensions={1}
}

%within (t.1: (s32[], f32[100])) -> pred[] {
  %limit = s32[]{:T(128)} constant(8)
  %at = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%pass (t.2: (s32[], f32[100])) -> (s32[], f32[100]) {
  %two = s32[]{:T(128)} constant(2)
  %now = s32[]{:T(128)} get-tuple-element(%t.2), index=0
  %next = s32[]{:T(128)} add(%now, %two)
  %own = f32[100]{0} get-tuple-element(%t.2), index=1
  %sum = f32[100]{0} all-reduce(%own), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %work = f32[100]{0} fusion(%sum), kind=kLoop, calls=%unknown, backend_config={"estimated_cycles":"11"}
  ROOT %out = (s32[], f32[100]) tuple(%next, %work)
}

%cheap (c.1: f32[10]) -> f32[10] {
  ROOT %same = f32[10]{0} copy(%c.1)
}

%dear (d.1: f32[10]) -> f32[10] {
  ROOT %sent = f32[10]{0} all-to-all(%d.1), replica_groups=mesh['a'=2,'b'=8], device_ids=([2,8]T(1,0)) {'b'}, dimensions={0}
}

ENTRY %main (a.1: bf16[64,8]) -> f32[10] {
  %a.1 = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %first = bf16[64,128]{1,0} fusion(%a.1), kind=kCustom, calls=%advance, backend_config={"estimated_cycles":"100"}
  %second = bf16[64,128]{1,0} fusion(%first), kind=kCustom, calls=%advance, backend_config={"estimated_cycles":"200"}
  %loop = (s32[], f32[100]) while(%init), condition=%within, body=%pass
  %step = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
  ROOT %end = f32[10]{0} conditional(%which, %y, %y), branch_computations={%cheap, %dear}
}
"""


def test_what_chips_send_is_read_off_the_program():
    """A gather that two kernels advance counts once, a sum in a loop as often as the loop is passed, of two branches the dearer."""
    assert collective_bytes(PROGRAM) == {
        "all-gather": 64 * 128 * 2 * 15 // 16,
        "all-reduce": 4 * (2 * 100 * 4 * 3 // 4),
        "all-to-all": 10 * 4 * 7 // 8,
        "collective-permute": 5 * 4,
    }


def test_cycles_are_summed_over_kernels_and_passes():
    assert estimated_cycles(PROGRAM) == 100 + 200 + 4 * 11


def test_a_loop_of_unknown_length_is_refused_where_something_in_it_counts():
    unknown = PROGRAM.replace("direction=LT", "direction=EQ")
    with pytest.raises(ValueError, match="program has a loop that does not count up to a constant"):
        collective_bytes(unknown)
    assert estimated_cycles(unknown.replace('"estimated_cycles":"11"', "")) == 300
    with pytest.raises(ValueError, match="program has no ENTRY"):
        collective_bytes("HloModule nothing")


def test_what_xla_sends_over_eight_devices_is_counted():
    """A product whose summed axis is split over all devices ends in a sum over them."""
    mesh = make_mesh(fsdp=8)
    split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    args = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split), jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=split)
    whole = jax.NamedSharding(mesh, jax.P())
    program = jax.jit(lambda x, y: x @ y.T, out_shardings=whole).lower(*args).compile().as_text() or ""
    assert collective_bytes(program) == {"all-reduce": 2 * 16 * 32 * 4 * 7 // 8}


NOTHING = jnp.zeros(3)


def _branches_and_loops(x):
    chosen = jax.lax.cond(jnp.all(NOTHING == 0), lambda x: 2 * x, lambda x: jnp.sort(x), x)
    carry, rows = jax.lax.scan(lambda carry, row: (carry + row, carry * row), jnp.float32(0), x, reverse=True)
    places = jax.jit(jnp.searchsorted)(jnp.cumsum(x), jnp.arange(3.0)).astype(jnp.float32)
    return {"chosen": chosen, "rows": rows + places}, carry


def test_a_function_that_is_written_out_gives_the_same_without_loops_and_branches():
    x = jnp.asarray([3.0, 1.0, 2.0])
    plain = written_out(_branches_and_loops, make_mesh(data=8), jax.ShapeDtypeStruct(x.shape, x.dtype))
    jax.tree.map(np.testing.assert_allclose, plain(x), _branches_and_loops(x))
    text = jax.jit(plain).lower(x).as_text()
    assert not any(f"stablehlo.{operation}" in text for operation in ("while", "case", "sort"))


def test_parameters_and_live_caches_are_what_a_round_must_read():
    target, drafter = models(MODEL_PRESETS["qwen3_4b"]())
    one, two = (live_bytes(target, drafter, RoundSize(rows=64, context=context, bucket=512)) for context in (1024, 2048))
    per_token = 2 * 8 * 128 * 2 * (36 + 5)
    assert two - one == 64 * 1024 * per_token
    parameters = (one - 64 * 1024 * per_token) / 2
    assert round(parameters / 1e9, 2) == round(4.022 + 0.616, 2)


def test_numbers_of_few_layers_lie_on_a_line():
    few = [{"arguments": 30.0, "only": 0.0, "compile_seconds": 1.0}, {"arguments": 50.0, "compile_seconds": 2.0, "sent by all-gather": 8.0}]
    assert extended(few, (2, 4), 36) == {"arguments": 370.0, "only": 0.0, "sent by all-gather": 136.0, "compile_seconds": 3.0}


TRAINING, DECODING = Case("v5e:4x4", "qwen3_4b", "training"), Case("v5e:4x4", "qwen3_4b", "decoding", 8)
NUMBERS = {
    "operations": 197e12,
    "arguments": 9e9,
    "temporaries": 6e9,
    "results": 0.0,
    "code": 5e8,
    "cycles": 3e9,
    "sent by all-gather": 50e9,
    "compile_seconds": 1.0,
}


def test_a_row_says_what_fits_and_how_long_it_takes():
    row = row_of(TRAINING, AotOptions(), NUMBERS, (36,))
    assert (row["bytes_per_chip"], row["fits"], row["slice"]) == (15_500_000_000, True, "v5e-16")
    assert row["seconds"]["computing"] == 1.0 and row["seconds"]["interconnect"] == 0.25
    assert row["seconds"]["compiler"] == pytest.approx(3e9 / 1.503e9, rel=1e-3)
    assert row["predicted_seconds"] == 1.25
    assert not row_of(TRAINING, AotOptions(), NUMBERS | {"temporaries": 7e9}, (36,))["fits"]


def test_a_round_is_held_against_its_parameters_and_live_caches():
    moved = {"live_bytes": 1e9, "main_memory": 1.25e9, "cost_analysis": 4e9, "operations": 1e9, "sent by all-gather": 0.0}
    row = row_of(DECODING, AotOptions(), NUMBERS | moved, (2, 4))
    assert (row["accessed_over_live"], row["cost_analysis_over_live"]) == (1.25, 4.0)
    assert row["predicted_seconds"] == pytest.approx(1.25e9 / 819e9, rel=1e-3)
    assert row["settings"] == {"requests": 64, "context": 4096, "bucket": 512}


def test_a_program_that_does_not_fit_has_a_row_too():
    said = "the total memory required for HLO temporaries (105.53G) exceeds available HBM (15.75G)."
    row = failed_row(TRAINING, AotOptions(), said)
    assert not row["fits"] and row["bytes_per_chip"] == round(105.53 * 2**30)


def test_page_and_curves_are_made_of_the_rows():
    moved = {"live_bytes": 1e9, "main_memory": 1.25e9, "cost_analysis": 4e9, "operations": 1e9, "sent by all-gather": 0.0}
    cases = [dataclasses.replace(DECODING, tokens=tokens) for tokens in (8, 1)]
    rows = {case.key: row_of(case, AotOptions(), NUMBERS | moved, (2, 4)) for case in cases}
    curve = curves_of(list(rows.values()))["v5e:4x4", "qwen3_4b"]
    assert curve.tokens == (64, 512) and curve.context == 4096
    rows |= {TRAINING.key: failed_row(TRAINING, AotOptions(), "")}
    page = page_of({"jax": "0", "rows": rows})
    assert "| v5e-16 | Qwen3-4B | 512 |" in page and "64, 512" in page and "| no |" in page


def test_quick_reports_have_the_ends_of_the_ladder():
    cases = cases_of(AotOptions(topologies=("v6e:4x4",), models=("qwen3_8b",), quick=True))
    assert [case.key for case in cases] == [*("v6e:4x4/qwen3_8b/training", "v6e:4x4/qwen3_8b/decoding/8", "v6e:4x4/qwen3_8b/decoding/1")]


def test_what_is_there_is_not_compiled_again(tmp_path, monkeypatch):
    asked = []

    def numbers(case, options, num_layers):
        asked.append((case.key, num_layers))
        return NUMBERS | {"cycles": float(num_layers or 0)}

    monkeypatch.setattr(aot_report, "compiled_numbers", numbers)
    options = AotOptions(topologies=("v5e:4x4",), programs=("training",), out=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    aot_report.run(dataclasses.replace(options, models=("qwen3_4b",)), console)
    aot_report.run(dataclasses.replace(options, quick=True), console)
    assert asked == [("v5e:4x4/qwen3_4b/training", None), ("v5e:4x4/qwen3_8b/training", 2), ("v5e:4x4/qwen3_8b/training", 4)]
    rows = json.loads((tmp_path / "aot.json").read_text())["rows"]
    assert [row["compiled_layers"] for row in rows.values()] == [[36], [2, 4]]
    assert "Qwen3-8B" in (tmp_path / "aot.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topologies": ("v5e:8x8",)}, "topologies holds 'v5e:8x8'; allowed: v5e:4x4, v5p:2x2x2, v6e:4x4"),
        ({"models": ("gpt",)}, "models holds 'gpt'; allowed: qwen3_4b, qwen3_8b"),
        ({"programs": ("prefill",)}, "programs holds 'prefill'; allowed: training, decoding"),
        ({"rows": 0}, "rows is 0"),
        ({"context": 0}, "context is 0"),
        ({"tokens_per_request": (4, 2)}, "tokens_per_request is"),
        ({"tokens_per_request": (9,)}, "tokens_per_request is"),
    ],
)
def test_bad_options_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        AotOptions(**changes)


SIZES: Any = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
TARGET = DenseTarget(DenseConfig(**SIZES, num_layers=2, qk_norm=True, tie_word_embeddings=True))
DRAFTER = DSparkDrafter(
    DSparkConfig(**SIZES, mask_token_id=2, taps=(0,), num_target_layers=2, num_layers=1, block_size=2, markov_rank=128), backend="xla"
)


@pytest.mark.slow
@needs_libtpu
def test_small_models_train_and_decode_on_a_slice_that_is_not_here():
    """Both programs compile for 16 chips with parameters split over all of them, and a round moves no parameter between chips."""
    step = training_step(TARGET, DRAFTER, topology_mesh("v5e:4x4", fsdp=16)).compile()
    assert step.memory_analysis().alias_size_in_bytes > 0 and sum(collective_bytes(step.as_text()).values()) > 0
    mesh, size = topology_mesh("v5e:4x4", fsdp=2, tensor=8), RoundSize(rows=16, context=192, bucket=48)
    text = decoding_round(TARGET, DRAFTER, mesh, size).compile().as_text()
    live = live_bytes(TARGET, DRAFTER, size) / mesh.size
    assert live < main_memory_bytes(text)
    assert "all-gather" not in collective_bytes(text) or collective_bytes(text)["all-gather"] < live
