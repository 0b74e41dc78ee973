"""Families of cost curves: their files, measuring them, and predicting them from compiled programs."""

import dataclasses
import importlib.util
import io
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.step_curve import CurveWarning, StepCurve
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.weights import save_drafter
from experiments import measure_curves, predict_steps, step_timing
from experiments.aot_work import Compiled, Compiler, Pair, compile_all, num_compilations, topology_device, unrolled
from experiments.drafter_costs import Work
from experiments.hlo_traffic import main_memory_bytes
from experiments.measure_curves import CurveOptions
from experiments.predict_steps import CHIPS, Chip, PredictOptions
from experiments.step_curves import CurveFamily, RoundCosts, buckets_of, load_curves, read_family, write_family
from tests.tiny_models import random_params, write_target

BLOCK = 2
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the package libtpu (extra `aot`)")

FAMILY = CurveFamily(
    name="two",
    source="measured",
    device={"platform": "cpu", "versions": {"jax": "0.10.2"}},
    target="tiny",
    drafter="small",
    block_size=BLOCK,
    notes=("A note.", "Another."),
    curves=(
        RoundCosts(1, StepCurve((1, 2, 3), (0.1, 0.2, 0.3), 0.05, 128, ((320, (0.2, 0.3, 0.4)),)), StepCurve((1,), (0.08,), 0.001), 0.003),
        RoundCosts(2, StepCurve((2, 4, 6), (0.2, 0.3, 0.5), 0.07), StepCurve((2,), (0.15,), 0.002), 0.006),
    ),
)


def drafter_of(width: int, layers: int, vocab_size: int, block_size: int = BLOCK, draft_vocab_size: int | None = None) -> DSparkDrafter:
    return DSparkDrafter(
        DSparkConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=48,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            block_size=block_size,
            mask_token_id=2,
            taps=(0,),
            num_target_layers=layers,
            markov_rank=4,
            draft_vocab_size=draft_vocab_size,
        )
    )


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_family_comes_back_as_it_was_written(tmp_path):
    path = write_family(tmp_path, FAMILY)
    assert path == tmp_path / "two.json"
    assert read_family(path) == FAMILY
    assert load_curves(path) == {1: FAMILY.curves[0], 2: FAMILY.curves[1]}
    assert list(json.loads(path.read_text())["curves"][0]) == [
        *("rows", "tokens", "context", "seconds_per_step", "longer", "draft_seconds", "undrafted", "commit_seconds")
    ]


def test_reading_a_record_does_not_warn_of_what_it_records(tmp_path):
    with pytest.warns(CurveWarning):
        flat = StepCurve((1, 2), (0.1, 0.1))
    path = write_family(tmp_path, dataclasses.replace(FAMILY, curves=(RoundCosts(1, flat, StepCurve((1,), (0.1,)), 0.0),)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_curves(path)[1].curve == flat


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.pop("target"), "target is missing"),
        (lambda content: content.update(colour=1), "colour in .* is unknown"),
        (lambda content: content.update(source="guessed"), "source is 'guessed'; allowed: measured, predicted"),
        (lambda content: content.update(block_size="7"), "block_size is '7'"),
        (lambda content: content.update(curves={}), "curves is {}"),
        (lambda content: content.update(curves=[]), r"curves has rows \[\]"),
        (lambda content: content["curves"].reverse(), r"curves has rows \[2, 1\]"),
        (lambda content: content["curves"].append(3), "curves holds 3"),
        (lambda content: content["curves"][1].pop("undrafted"), "undrafted is missing"),
        (lambda content: content["curves"][1]["undrafted"].update(tokens=[3]), r"undrafted has tokens \(3,\)"),
        (lambda content: content["curves"][1].update(commit_seconds=-1), "commit_seconds is -1"),
        (lambda content: content["curves"][1].update(rows=0), "rows is 0"),
        (lambda content: content["curves"][1].update(rows=3), "tokens begins with 2; a round of rows 3"),
        (lambda content: content["curves"][1].update(seconds_per_step=[0.1]), "seconds_per_step has 1 values.* at rows 2"),
        (lambda content: content["curves"][0].update(speed=1), "speed is no field of a cost curve"),
    ],
)
def test_a_damaged_file_is_refused_with_the_field(edit, message, tmp_path):
    """[F1] A missing or meaningless table is an error."""
    path = write_family(tmp_path, FAMILY)
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_family(path)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="path is .*nothing.json; allowed are existing files"):
        read_family(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match="text.json, which is no JSON"):
        read_family(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list; allowed is an object with name"):
        read_family(tmp_path / "list.json")


def test_buckets_reach_from_nothing_verified_to_everything():
    assert buckets_of(1, 7) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert buckets_of(2, 7) == (2, 3, 4, 6, 8, 12, 16)
    assert buckets_of(4, 7) == (4, 5, 6, 8, 12, 16, 24, 32)
    assert buckets_of(512, 7) == (512, 640, 768, 1024, 1536, 2048, 3072, 4096)
    assert buckets_of(8, 2) == (8, 10, 12, 16, 24)


def test_a_round_of_many_requests_is_laid_out_as_decoding_does_it():
    tokens = step_timing.batch_tokens(rows=3, num_tokens=8, block_size=7, context=10)
    assert tokens.row.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert tokens.slot.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert tokens.position.tolist() == [9, 10, 11, 9, 10, 11, 9, 10]
    assert tokens.queries_per_row == 8 and not tokens.is_grid
    for num_tokens in (2, 25):
        with pytest.raises(ValueError, match=f"num_tokens is {num_tokens}; allowed are 3 to 24"):
            step_timing.batch_tokens(3, num_tokens, 7, 10)


def test_what_was_timed_long_enough_is_timed_no_more():
    runs = []

    def run(size: int, state: int) -> int:
        runs.append(size)
        return state + 1

    seconds = step_timing.interleaved(run, 0, (1, 2), repetitions=5, enough_seconds=0.0)
    assert runs == [1, 2] * 3
    assert set(seconds) == {1, 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A family measured on a tiny target of two layers, which share a cache; from 3 tokens on one of them counts for both."""
    folder = tmp_path_factory.mktemp("curves")
    target, _ = write_target(folder / "target")
    drafter = drafter_of(target.config.hidden_size, target.config.num_layers, target.config.vocab_size, block_size=1)
    save_drafter(folder / "small", drafter, random_params(drafter))
    options = CurveOptions(
        name="tiny",
        target=str(folder / "target"),
        drafter=folder / "small",
        out=folder,
        rows=(2,),
        contexts=(8, 24),
        repetitions=1,
        all_layers_up_to=2,
        some_layers=1,
        cache_gib=1e-6,
        note="A test.",
    )
    return options, measure_curves.run(options, quiet())


def test_measuring_fills_every_bucket_and_context(measured):
    options, family = measured
    assert read_family(options.out / "tiny.json") == family
    (costs,) = family.curves
    assert (costs.rows, costs.curve.tokens, costs.curve.context) == (2, (2, 3, 4), 8)
    assert [at for at, _ in costs.curve.longer] == [24]
    assert 0 < costs.commit_seconds and 0 < costs.curve.draft_seconds
    assert costs.undrafted.tokens == (2,) and [at for at, _ in costs.undrafted.longer] == [24]
    assert costs.undrafted.draft_seconds == pytest.approx(costs.commit_seconds / 2, rel=1e-3)
    assert family.notes[0] == "A test." and family.device["platform"] == "cpu"
    assert any("72 for 8, 88 for 24" in note for note in family.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "rows is"),
        ({"rows": (2, 1)}, "ascending"),
        ({"contexts": (0,)}, "contexts is"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"some_layers": 0}, "some_layers is 0"),
        ({"all_layers_up_to": -1}, "all_layers_up_to is -1"),
        ({"cache_gib": 0.0}, "cache_gib is 0"),
    ],
)
def test_bad_options_of_the_measurement_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CurveOptions(**changes)


PROGRAM = """HloModule jit_f

%gather_in (p.0: f32[100,10], p.1: s32[4]) -> f32[4,10] {
  %p.0 = f32[100,10]{1,0} parameter(0)
  %p.1 = s32[4]{0} parameter(1)
  ROOT %g = f32[4,10]{1,0} gather(%p.0, %p.1), offset_dims={1}
}

%scatter_in (p.2: bf16[64,128], p.3: bf16[2,128]) -> bf16[64,128] {
  %p.2 = bf16[64,128]{1,0} parameter(0)
  %p.3 = bf16[2,128]{1,0} parameter(1)
  ROOT %s = bf16[64,128]{1,0} dynamic-update-slice(%p.2, %p.3)
}

ENTRY %main (a.1: f32[8,128], t.1: f32[100,10], i.1: s32[4], c.1: bf16[64,128], n.1: bf16[2,128]) -> (f32[8,128], f32[4,10]) {
  %a.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %t.1 = f32[100,10]{1,0} parameter(1)
  %i.1 = s32[4]{0:T(128)} parameter(2)
  %c.1 = bf16[64,128]{1,0} parameter(3)
  %n.1 = bf16[2,128]{1,0} parameter(4)
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a.1)
  %done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %onchip = f32[8,128]{1,0:T(8,128)S(1)} fusion(%done), kind=kLoop, calls=%unknown
  %out = f32[8,100]{1,0:T(8,128)} fusion(%onchip, %done), kind=kOutput, calls=%unknown
  %rows = f32[4,10]{1,0} fusion(%t.1, %i.1), kind=kCustom, calls=%gather_in
  %cache = bf16[64,128]{1,0} fusion(%c.1, %n.1), kind=kLoop, calls=%scatter_in
  ROOT %tuple = (f32[8,100]{1,0:T(8,128)}, f32[4,10]{1,0}) tuple(%out, %rows)
}
"""


def test_bytes_are_counted_where_they_cross_the_memory_bus():
    """A prefetch once, nothing on the chip, results in whole tiles; of a table the rows asked for, of a cache the update."""
    prefetch, written = 8 * 128 * 4, 8 * 128 * 4
    rows = 3 * 4 * 10 * 4  # of the table, as many as the result has, to the result, and no more than that of the ids
    update = 2 * 2 * 128 * 2
    assert main_memory_bytes(PROGRAM) == prefetch + written + rows + update


def test_an_array_that_is_counted_elsewhere_counts_as_nothing():
    assert main_memory_bytes(PROGRAM) - main_memory_bytes(PROGRAM, lambda shape: shape == [100, 10]) == 4 * 10 * 4
    assert main_memory_bytes(PROGRAM) - main_memory_bytes(PROGRAM, lambda shape: shape == [8, 128]) == 8 * 128 * 4


def test_a_kernel_moves_what_it_says_itself():
    """It may read single rows of an operand: jax writes a kernel's own estimate into the program."""
    estimate = '%kernel = f32[8,128]{1,0:T(8,128)} custom-call(%done), backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"77"}}'
    program = PROGRAM.replace("  ROOT", f"  {estimate}\n  ROOT")
    assert program != PROGRAM and main_memory_bytes(program) == main_memory_bytes(PROGRAM) + 77


def test_a_program_that_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="program has a while loop"):
        main_memory_bytes(PROGRAM.replace("fusion(%done)", "while(%done)"))
    with pytest.raises(ValueError, match="program has no ENTRY"):
        main_memory_bytes("HloModule nothing")


def test_an_unrolled_function_gives_the_same_and_has_no_loop():
    def function(x, extra):
        return jax.lax.scan(lambda carry, each: (carry * each, {"sum": carry + extra["by"]}), jnp.float32(1), x)

    args = (jnp.arange(1.0, 5.0), {"by": jnp.float32(2)})
    same = jax.jit(unrolled(function))
    jax.tree.map(np.testing.assert_allclose, same(*args), function(*args))
    assert "while" not in (same.lower(*args).compile().as_text() or "while")


CHIP = Chip("none", flops_per_second=1000.0, bytes_per_second=100.0)
HALF = dataclasses.replace(CHIP, flops_per_second=100.0)
FOUND = Compiled(
    layer={(64, rows, each): Work(100 * rows * each, 50 + 10 * rows) for rows in (1, 4) for each in (1, 3)},
    plain_layer={(64, rows): Work(50 * rows, 20) for rows in (1, 4)},
    head={1: Work(10, 40), 12: Work(120, 40)},
    propose={1: Work(0, 200), 4: Work(0, 500)},
    commit={1: Work(0, 30), 4: Work(0, 60)},
    ratios={"layer": [(1.0, 1.0, 1.0), (1.5, 2.0, 3.0)], "head": [], "propose": [], "commit": []},
)


def test_a_program_takes_the_longer_of_computing_and_moving():
    assert CHIP.seconds(Work(500, 80)) == 0.8
    assert CHIP.seconds(Work(2000, 80)) == 2.0


def test_predicted_seconds_are_those_of_the_interpolated_work():
    """Two layers of 100 operations a token and 50 + 10 R bytes, a head of 10 operations a token and 40 bytes, and the launch."""
    options = PredictOptions(rows=(1, 2, 4), contexts=(64,), launch_seconds=0.25)
    costs = predict_steps.round_costs(FOUND, HALF, options, rows=2, num_layers=2, block_size=BLOCK)
    assert costs.curve.tokens == (2, 3, 4, 6)
    assert costs.curve.seconds_per_step == pytest.approx([0.25 + 2 * tokens + max(0.4, 0.1 * tokens) for tokens in (2, 3, 4, 6)])
    assert (costs.curve.draft_seconds, costs.commit_seconds) == pytest.approx((3.0 + 0.4, 0.4))
    assert costs.undrafted.tokens == (2,) and costs.undrafted.draft_seconds == pytest.approx(0.4 / 3, rel=1e-4)
    assert costs.undrafted.seconds_per_step == pytest.approx([0.25 + 2 * 1.0 + 0.4])


def test_a_prediction_says_how_it_came_about():
    target = DenseTarget(DenseConfig(64, 32, 48, 2, 4, 2, 8))
    pair = Pair("tiny", "small", target, drafter_of(32, 2, 64))
    family = predict_steps.family_of("none", pair, CHIP, FOUND, PredictOptions(rows=(1, 2, 4), contexts=(64,)))
    assert (family.source, family.block_size, [costs.rows for costs in family.curves]) == ("predicted", BLOCK, [1, 2, 4])
    assert any("layer 1.00 to 2.00" in note for note in family.notes)


def test_one_request_keeps_a_compilation_of_its_own():
    assert PredictOptions().corners == (1, 8, 64, 128, 512)
    assert PredictOptions(rows=(1, 2, 4)).corners == (1, 4)


def compiled_for(device) -> Compiled:
    target = DenseTarget(DenseConfig(64, 32, 48, 2, 4, 2, 8))
    compiler = Compiler(Pair("tiny", "small", target, drafter_of(32, 2, 64, draft_vocab_size=48), 48), device, jnp.float32)
    calls = []
    found = compile_all(compiler, (2,), (8,), lambda: calls.append(1))
    assert len(calls) == num_compilations((2,), (8,), BLOCK)
    return found


@pytest.mark.parametrize("topology", [None, pytest.param("v5e:2x2", marks=needs_libtpu)])
def test_compiled_programs_do_the_work_that_was_traced(topology):
    """On the CPU, and ahead of time for a chip that is not there: operations within a tenth, no weight and no cache left out."""
    found = compiled_for(jax.devices("cpu")[0] if topology is None else topology_device(topology))
    assert set(found.layer) == {(8, 2, 1), (8, 2, 3)} and set(found.head) == {2, 6}
    for kind, ratios in found.ratios.items():
        for flops, moved, with_copies in ratios:
            assert flops > 0.9, kind
            assert 0.9 < moved <= with_copies * 1.01, kind


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_a_missing_compiler_is_named():
    with pytest.raises(ValueError, match="libtpu is not installed"):
        topology_device(CHIPS["v5e"].topology)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt"}, "model is 'gpt'; allowed: smollm2, qwen3_4b"),
        ({"chips": ("v1",)}, "chips holds 'v1'; allowed: v5e, v5p, v6e"),
        ({"rows": (0,)}, "rows is"),
        ({"contexts": ()}, "contexts is"),
        ({"launch_seconds": -1.0}, "launch_seconds is -1"),
    ],
)
def test_bad_options_of_the_prediction_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PredictOptions(**changes)
