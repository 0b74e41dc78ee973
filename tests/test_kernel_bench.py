"""The benchmark of the kernels, its baselines, and what is told of compilers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from experiments.kernel_report import ReportOptions, kernels_in, moved_bytes, vmem_used
from experiments.kernel_tables import TableOptions, comparison_table, filled, measured_table, register_table, tpu_table
from pallas_kernels import bench, noise, parity, plain
from pallas_kernels.arg_specs import SPECS, Spec
from pallas_kernels.noise import Stream


def test_floors_are_those_of_the_shapes():
    """128 requests, 7 drafts, V = 151,936, rank 256: U in float32 and W2 in bfloat16 seven times over are 1.09 GB."""
    spec = Spec(151_936, 128, 7, 256, "bfloat16")
    u, w2, row = 7 * 128 * 151_936 * 4, 151_936 * 256 * 2, 128 * 151_936
    assert bench.markov_floor(spec).bytes == u + 7 * w2
    assert bench.markov_floor(spec, keeps_w2=True, returns_logits=True).bytes == 2 * u + w2
    assert bench.rejection_floor(spec).bytes == row * (8 * 2 + 2 + 4)
    assert bench.roofline().count("\n") == 2 * len(SPECS) + 1


def test_the_baselines_follow_the_law_that_they_are_held_against():
    """What is compared for speed draws from the same distribution: 20,000 rounds of one draft, and what replaces it."""
    num, width = 20_000, 12
    rng = np.random.default_rng(0)
    target, draft = jnp.asarray(rng.normal(size=(2, width)), jnp.float32), jnp.asarray(rng.normal(size=width), jnp.float32)
    requests = jnp.arange(num, dtype=jnp.int32)
    key, warm = noise.round_key(0, requests, jnp.zeros_like(requests)), jnp.ones(num)
    drafts = jnp.broadcast_to(draft, (num, 1, width))
    ids, log_q, _ = jax.jit(plain.draw, static_argnums=3)(drafts[:, 0], warm, key, Stream.DRAFT_ID, jnp.zeros(num, jnp.int32))
    np.testing.assert_allclose(np.asarray(log_q), np.asarray(jax.nn.log_softmax(draft)[ids]), atol=1e-5)
    rows = jnp.tile(target, (num, 1))
    found = jax.jit(plain.rejection_sample)(rows, drafts, ids[:, None], jnp.ones(num, jnp.int32), key, warm)
    first = np.where(np.asarray(found.num_accepted) == 1, np.asarray(ids), np.asarray(found.next_id))
    expected = num * np.asarray(jax.nn.softmax(target[0]))
    assert (((np.bincount(first, minlength=width) - expected) ** 2) / expected).sum() < chi2.isf(1e-5, width - 1)


@pytest.mark.slow
def test_the_benchmark_runs_and_says_how_much_faster(tmp_path):
    assert bench.main(["--gib", "0.1", "--seconds", "0.01", "--out", str(tmp_path / "kernels.json")]) == 0
    content = json.loads((tmp_path / "kernels.json").read_text())
    assert {row["op"] for row in content["specs"]} == {"markov_block", "rejection_sample"}
    assert all(row["seconds"] > 0 and row["ratio"] > 0 and row["compiler_bytes"] > 0 for row in content["specs"])
    assert all(each["times_faster"] > 1 for each in content["comparisons"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["interpret", "interpret_triton"])
def test_parity_is_a_command(backend, capsys):
    assert parity.main(["--backend", backend, "--small", "--most-rows", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(spec.num_rows == 1 for spec in SPECS) and all("verdicts: 1" in line for line in lines)


def test_reports_of_compilers_are_read():
    with pytest.raises(ValueError, match="tpu is empty and cuda is False"):
        ReportOptions()
    text = jax.jit(lambda x: x + 1).lower(jnp.zeros(1024)).compile().as_text() or ""
    assert moved_bytes(text) == 2 * 4096


def test_registers_and_spills_are_read_off_the_assembler(tmp_path):
    """Of our kernels alone; an assembler that says nothing of them is an error."""
    (tmp_path / "a.ptx").write_text(".visible .entry markov_sums(\n")
    (tmp_path / "b.ptx").write_text(".visible .entry loop_fusion(\n")
    said = "ptxas info    : Used 72 registers, used 1 barriers\\n    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads"
    assembler = tmp_path / "ptxas"
    assembler.write_text(f"#!/bin/sh\nprintf '{said}\\n' >&2\n")
    assembler.chmod(0o755)
    assert kernels_in(tmp_path, str(assembler)) == [{"kernel": "markov_sums", "registers": 72, "spilled_bytes": 12}]
    assembler.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(ValueError, match="ptxas says nothing of registers or spills of markov_sums"):
        kernels_in(tmp_path, str(assembler))


def test_the_page_of_the_kernels_shows_the_committed_figures():
    """Its tables are those that the script makes of the committed files."""
    options = TableOptions()
    measured, compiled = (json.loads(path.read_text(encoding="utf-8")) for path in (options.measured, options.compiled))
    page = options.page.read_text(encoding="utf-8")
    tables = {"comparisons": comparison_table(measured), "measured": measured_table(measured), "tpu": tpu_table(compiled)}
    assert filled(page, tables | {"registers": register_table(compiled), "roofline": bench.roofline()}) == page
    assert f"plain JAX on a CPU is {measured['comparisons'][0]['times_faster']:.0f}" in (options.page.parents[2] / "README.md").read_text()
    with pytest.raises(ValueError, match="page has 0 marks 'tpu'"):
        filled("nothing", {"tpu": "x"})


def test_fast_memory_is_read_off_the_program():
    line = '  %row_stats.1 = (f32[8,1]) custom-call(), custom_call_target="tpu_custom_call", "used_scoped_memory_configs":[{"size":"77"}]'
    assert vmem_used(f"{line}\n{line.replace('77', '88')}\nother") == {"row_stats": 88}
