"""The kernels against their reference: the same tokens, whoever computes, but for the near ties of `pallas_kernels.parity`."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch, noise
from pallas_kernels.arg_specs import SMALL, SPECS, Spec, markov_arguments, rejection_arguments
from pallas_kernels.dispatch import AheadOfTime
from pallas_kernels.markov_sample import Draft, Filter, latent_sample, markov_block, markov_sample, mosaic_tpu, with_int8_w2
from pallas_kernels.noise import Stream
from pallas_kernels.parity import compare_blocks, compare_outcomes, drafted, margins
from pallas_kernels.rejection_sample import DraftRows, RecomputedRows, rejection_sample

RACE = "RACE DETECTED"
HERE = ("interpret", "interpret_triton", "simulate_tpu")
NEVER_SMALL = [spec for spec in SPECS if spec not in SMALL]
EVERY_SPEC = [pytest.param(spec, id=spec.name) for spec in SMALL] + [
    pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for spec in NEVER_SMALL
]


def _block(arguments, backend, **options):
    return jax.jit(functools.partial(markov_block, return_logits=True, backend=backend, **options))(*arguments)


@functools.cache
def _reference(spec):
    """Arguments and the block that plain JAX makes of them."""
    arguments = markov_arguments(spec)
    return arguments, _block(arguments, "xla")


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("spec", EVERY_SPEC)
def test_a_block_is_the_reference_s(spec, backend, capfd):
    spec = spec.scaled_down()
    arguments, expected = _reference(spec)
    assert len(np.unique(np.asarray(expected.ids))) > spec.num_rows // 2
    parity = compare_blocks(_block(arguments, backend), expected, arguments)
    assert parity.near_ties <= 1 < parity.compared
    assert RACE not in capfd.readouterr().out


def test_w2_in_int8_gives_nearly_the_same_bias_in_half_the_memory():
    """One scale per rank: of a trained head the bias moves by less than a hundredth, and W2 stays on the chip of a v5p."""
    rng = np.random.default_rng(0)
    scales = jnp.asarray(rng.lognormal(0, 1, 32), jnp.float32)
    w1, w2 = (jnp.asarray(rng.normal(size=(n, 32)), jnp.float32) for n in (50, 3000))
    w2 = (w2 * scales).at[:, 3].set(0.0)
    moved, integers = with_int8_w2(w1, w2)
    assert integers.dtype == jnp.int8 and int(jnp.abs(integers).max()) == 127
    exact, near = w1 @ w2.T, moved @ integers.T.astype(jnp.float32)
    assert 0 < float(jnp.sqrt(jnp.mean((near - exact) ** 2) / jnp.mean(exact**2))) < 0.01
    base = jax.ShapeDtypeStruct((7, 128, 151_936), jnp.float32)
    asked = [
        mosaic_tpu.bytes_on_chip(base, jax.ShapeDtypeStruct((151_936, 256), dtype), 1024, keep_w2=True, return_logits=True)
        for dtype in (jnp.bfloat16, jnp.int8)
    ]
    assert asked[1] < 64 << 20 < asked[0] < 128 << 20


def test_a_different_token_is_only_let_pass_where_it_was_near():
    """A test of the test: a flipped id and a flipped verdict are caught, and a margin of nothing is let pass."""
    arguments, expected = _reference(SMALL[1].scaled_down())
    other = expected._replace(ids=expected.ids.at[1, 0].set((expected.ids[1, 0] + 1) % 100))
    with pytest.raises(AssertionError, match="another id at draft 1, where the draw was won by"):
        compare_blocks(other, expected, arguments)
    judged, draft, floors, outcome = _judged(SMALL[1].scaled_down())
    with pytest.raises(AssertionError, match="1 requests keep another number of drafts"):
        compare_outcomes(outcome._replace(num_accepted=outcome.num_accepted.at[0].add(-1)), outcome, judged, draft, floors)
    with pytest.raises(AssertionError, match="1 requests go on with another id"):
        compare_outcomes(outcome._replace(next_id=outcome.next_id.at[0].add(1)), outcome, judged, draft, floors)
    equal = jnp.zeros((1, 2000)).at[0, 7].set(90.0).at[0, 1500].set(90.0)
    streams = Stream.DRAFT_TILE, Stream.DRAFT_ID
    assert margins(equal, jnp.array([True]), arguments.key[:1], jnp.zeros(1, jnp.int32), streams)[0] == 0


def test_a_race_would_be_seen(capfd):
    """A test of the test: a copy that nobody waits for, read at once."""

    def kernel(source, out, landed, semaphore):
        copy = pltpu.make_async_copy(source, landed, semaphore)
        copy.start()
        out[:] = landed[:]
        copy.wait()

    pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())],
        interpret=dispatch.choose("simulate_tpu").interpret,
    )(jnp.zeros((8, 128))).block_until_ready()
    assert RACE in capfd.readouterr().out


@functools.cache
def _judged(spec: Spec):
    """Arguments of `rejection_sample` for drafts of the reference, the draft rows, and the outcome by plain JAX under floors, if any."""
    judged, draft, floors = drafted(spec, _reference(spec)[1])
    # So far from the drafts that of a few requests some drafts are kept and some are not.
    away = 1.5 * jax.random.normal(jax.random.key(2), judged.target_logits.shape, jnp.float32)
    judged = judged._replace(target_logits=(judged.target_logits.astype(jnp.float32) + away).astype(judged.target_logits.dtype))
    return judged, draft, floors, jax.jit(functools.partial(rejection_sample, draft=draft, floor=floors, backend="xla"))(*judged)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("spec", EVERY_SPEC)
def test_a_verdict_is_the_reference_s(spec, backend, capfd):
    judged, draft, floors, expected = _judged(spec.scaled_down())
    found = jax.jit(functools.partial(rejection_sample, draft=draft, floor=floors, backend=backend))(*judged)
    kept, offered = np.asarray(expected.num_accepted).sum(), np.asarray(judged.lengths).sum()
    assert (0 < kept < offered) or (spec.num_rows == 1 and kept < offered), "some are kept, some not"
    assert compare_outcomes(found, expected, judged, draft, floors).near_ties <= 1
    assert RACE not in capfd.readouterr().out


@pytest.mark.parametrize("backend", ["xla", *HERE])
def test_one_token_is_the_first_of_a_block(backend):
    spec = SMALL[1].scaled_down()
    arguments, block = _reference(spec)
    given = arguments.base_logits[0], arguments.w1, arguments.w2, arguments.key, 0, arguments.temperature
    one = jax.jit(functools.partial(markov_sample, return_logits=True, backend=backend))(arguments.anchor, *given)
    latent = arguments.w1[arguments.anchor]
    by_latent = jax.jit(functools.partial(latent_sample, backend=backend))(latent, given[0], *given[2:])
    assert by_latent.logits is None
    np.testing.assert_array_equal(np.asarray(one.ids), np.asarray(block.ids[0]))
    np.testing.assert_array_equal(np.asarray(by_latent.ids), np.asarray(block.ids[0]))


def test_w2_is_read_anew_or_kept_on_chip_with_the_same_tokens():
    spec = SMALL[0].scaled_down()
    arguments = markov_arguments(spec)
    kept, streamed = (_block(arguments, "interpret", keep_w2=keep) for keep in (True, False))
    np.testing.assert_array_equal(np.asarray(kept.ids), np.asarray(streamed.ids))
    np.testing.assert_array_equal(np.asarray(kept.logits), np.asarray(streamed.logits))


@pytest.mark.parametrize("backend", HERE[:2])
def test_a_draft_vocabulary_maps_back_to_w1(backend):
    spec = SMALL[0].scaled_down()
    arguments = markov_arguments(spec)
    draft_ids = jnp.arange(1, spec.vocab_size, 2, dtype=jnp.int32)
    arguments = arguments._replace(base_logits=arguments.base_logits[..., draft_ids], w2=arguments.w2[draft_ids])
    expected, found = (_block(arguments, each, draft_ids=draft_ids) for each in ("xla", backend))
    compare_blocks(found, expected, arguments)
    by_hand = markov_sample(
        draft_ids[expected.ids[0]], arguments.base_logits[1], arguments.w1, *arguments[3:5], 1, arguments.temperature, backend="xla"
    )
    np.testing.assert_array_equal(np.asarray(by_hand.ids), np.asarray(expected.ids[1]))


@pytest.mark.parametrize("backend", HERE[:2])
def test_filters_are_plain_jax_s_and_only_where_a_row_filters(backend):
    spec = SMALL[2].scaled_down()
    arguments = markov_arguments(spec)

    def block(active, backend):
        filters = Filter(jnp.bool_(active), lambda logits: jnp.where(active, jnp.sort(logits, axis=1)[:, -3], -jnp.inf))
        return _block(arguments, backend, filters=filters)

    filtered = block(True, backend)
    largest = np.sort(np.asarray(filtered.logits), axis=-1)[..., -3]
    np.testing.assert_array_equal(np.asarray(filtered.floor), largest)
    drawn = np.take_along_axis(np.asarray(filtered.logits), np.asarray(filtered.ids)[..., None], axis=-1)[..., 0]
    assert (drawn >= largest).all()
    np.testing.assert_array_equal(np.asarray(filtered.ids), np.asarray(block(True, "xla").ids))
    compare_blocks(block(False, backend), block(False, "xla"), arguments)


def _mesh():
    return Mesh(np.array(jax.devices()), ("tensor",))


@pytest.mark.parametrize("backend", ["xla", "interpret", "interpret_triton"])
def test_eight_devices_draw_what_one_does(backend):
    """The vocabulary cut over a mesh: log-sum-exp and the race of the tiles combine across devices."""
    spec = Spec(8 * 256 - 3, 4, 3, 64, "float32")
    width, tile = 8 * 256, 128
    arguments = markov_arguments(spec)
    expected = _block(arguments, "xla", tile_size=tile)
    pad = width - spec.vocab_size
    base = jnp.pad(arguments.base_logits, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)
    w1, w2 = (jnp.pad(each, ((0, pad), (0, 0))) for each in (arguments.w1, arguments.w2))
    options = {"return_logits": True, "axis_name": "tensor", "tile_size": tile, "backend": backend}
    specs = (P(), P(None, None, "tensor"), P("tensor", None), P("tensor", None), P(), P())
    everywhere: Any = P()
    out = Draft(everywhere, everywhere, everywhere, everywhere, P(None, None, "tensor"))  # pyright: ignore[reportArgumentType]
    block = jax.shard_map(functools.partial(markov_block, **options), mesh=_mesh(), in_specs=specs, out_specs=out, check_vma=False)
    found = jax.jit(block)(arguments.anchor, base, w1, w2, arguments.key, arguments.temperature)
    compare_blocks(found._replace(logits=found.logits[..., : spec.vocab_size]), expected, arguments, tile)

    judged, draft, _, _ = _judged(spec)
    whole = jax.jit(functools.partial(rejection_sample, tile_size=tile, backend="xla"))(*judged, draft=draft)

    def reject(target, logits, judged, draft):
        judged, draft = judged._replace(target_logits=target), draft._replace(logits=logits)
        return rejection_sample(*judged, draft=draft, axis_name="tensor", tile_size=tile, backend=backend)

    target = jnp.pad(judged.target_logits, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    logits = jnp.pad(draft.logits, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)
    cut = (P(None, "tensor"), P(None, None, "tensor"), P(), P())
    small = judged._replace(target_logits=jnp.zeros(())), draft._replace(logits=jnp.zeros(()))
    found = jax.jit(jax.shard_map(reject, mesh=_mesh(), in_specs=cut, out_specs=P(), check_vma=False))(target, logits, *small)
    np.testing.assert_array_equal(np.asarray(found.num_accepted), np.asarray(whole.num_accepted))
    np.testing.assert_array_equal(np.asarray(found.next_id), np.asarray(whole.next_id))


@pytest.mark.parametrize("backend", ["xla", *HERE])
def test_extreme_rows_stay_among_themselves(backend):
    """[A4] p == q is kept, disjoint supports are not; NaN and -inf rows and zero lengths disturb nobody."""
    width, block = 200, 2
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, block, width)).astype(np.float32)
    target = np.concatenate([logits, logits[:, :1]], axis=1)
    target[1, :, : width // 2], logits[1, :, width // 2 :] = -np.inf, -np.inf
    target[2] = np.nan
    target[3] = -np.inf
    ids = np.argmax(logits, axis=2).astype(np.int32)
    normaliser = np.log(np.exp(logits).sum(-1)).astype(np.float32)
    log_q = np.take_along_axis(logits, ids[:, :, None], axis=2)[:, :, 0] - normaliser
    lengths = np.array([2, 2, 2, 2, 0, 1], np.int32)
    key = noise.round_key(0, jnp.arange(6, dtype=jnp.int32), jnp.zeros(6, jnp.int32))
    rows = jnp.repeat(jnp.arange(6, dtype=jnp.int32), block + 1), jnp.arange(6, dtype=jnp.int32) * (block + 1)
    draft = DraftRows(jnp.asarray(logits), jnp.asarray(normaliser), jnp.full(ids.shape, -jnp.inf))

    def outcome(target, backend):
        given = jnp.asarray(target.reshape(-1, width)), *rows, jnp.asarray(ids), jnp.asarray(log_q), jnp.asarray(lengths), key, jnp.ones(6)
        return jax.jit(functools.partial(rejection_sample, draft=draft, backend=backend))(*given)

    found = outcome(target, backend)
    accepted, next_id = np.asarray(found.num_accepted), np.asarray(found.next_id)
    assert accepted.tolist() == [2, 0, 0, 0, 0, 1]
    assert next_id[1] >= width // 2 and ((next_id >= 0) & (next_id < width)).all()
    clean = target.copy()
    clean[2:4] = 0.0
    others = [0, 1, 4, 5]
    expected = outcome(clean, "xla")
    np.testing.assert_array_equal(accepted[others], np.asarray(expected.num_accepted)[others])
    np.testing.assert_array_equal(next_id[others], np.asarray(expected.next_id)[others])


@pytest.mark.parametrize("backend", ["xla", *HERE[:2]])
def test_excluded_and_broken_draft_logits_are_never_drawn_and_cost_nobody_the_law(backend):
    """NaN and -inf in U have no probability; a row that is all of them disturbs no other, and its draft is replaced from p itself."""
    width, tile = 300, 128
    rng = np.random.default_rng(2)
    base = rng.normal(size=(2, 5, width)).astype(np.float32)
    base[:, 0, 299], base[:, 1, :298], base[:, 2] = np.nan, -np.inf, np.nan
    zeros = jnp.zeros(5, jnp.int32)
    key, temperature = noise.round_key(0, jnp.arange(5, dtype=jnp.int32), zeros), jnp.array([1.0, 1.0, 1.0, 1.0, 0.0])
    weights = jnp.zeros((width, 8))

    def block(base, backend):
        given = zeros, jnp.asarray(base), weights, weights, key, temperature
        return jax.jit(functools.partial(markov_block, return_logits=True, tile_size=tile, backend=backend))(*given)

    found, expected = block(base, backend), block(np.where(np.isnan(base), -np.inf, base), "xla")
    ids = np.asarray(found.ids)
    assert (ids < width).all() and (ids >= 0).all() and (ids[:, 0] != 299).all() and (ids[:, 1] >= 298).all()
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(ids[:, others], np.asarray(expected.ids)[:, others])
    np.testing.assert_allclose(np.asarray(found.log_q)[:, others], np.asarray(expected.log_q)[:, others], atol=1e-5)

    target = np.full((15, width), -np.inf, np.float32)
    target[:, 7] = 0.0
    ids, log_q, normaliser, floor, logits = (each.swapaxes(0, 1) for each in found)
    rows = jnp.repeat(jnp.arange(5, dtype=jnp.int32), 3), jnp.arange(5, dtype=jnp.int32) * 3
    judged = jnp.asarray(target), *rows, ids, log_q, jnp.full(5, 2, jnp.int32), key, temperature
    draft = DraftRows(logits, normaliser, floor)
    outcome = jax.jit(functools.partial(rejection_sample, draft=draft, backend=backend))(*judged)
    assert np.asarray(outcome.next_id).tolist() == [7] * 5


@pytest.mark.slow
@pytest.mark.parametrize("backend", HERE[:2])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 49), (130, 261), (300, 333)])
def test_blocks_of_many_requests_one_draft_and_bfloat16_logits(backend, num_rows, width):
    spec = dataclasses.replace(SMALL[0], vocab_size=width, num_rows=num_rows, block_size=1, filtered=False)
    arguments = markov_arguments(spec)
    arguments = arguments._replace(base_logits=arguments.base_logits.astype(jnp.bfloat16))
    expected, found = (_block(arguments, each, tile_size=128) for each in ("xla", backend))
    compare_blocks(found, expected, arguments, 128)
    judged, draft, floors = drafted(spec, expected)
    verdict = functools.partial(rejection_sample, draft=draft, tile_size=128)
    expected, found = (jax.jit(functools.partial(verdict, backend=each))(*judged) for each in ("xla", backend))
    compare_outcomes(found, expected, judged, draft, floors, 128)


@pytest.mark.parametrize("backend", ["xla", *HERE[:2]])
def test_certain_drafts_leave_the_rest_of_the_law(backend):
    """[A3] Deterministic drafts have one-hot q: kept with p of the id, and never what replaces it."""
    width, num = 40, 4096
    logits = jnp.asarray(np.random.default_rng(1).normal(size=width), jnp.float32)
    p = np.asarray(jax.nn.softmax(logits))
    guess = int(np.argsort(p)[-2])
    requests = jnp.arange(num, dtype=jnp.int32)
    given = (
        jnp.broadcast_to(logits, (2 * num, width)),
        jnp.repeat(requests, 2),
        2 * requests,
        jnp.full((num, 1), guess, jnp.int32),
        jnp.zeros((num, 1)),
        jnp.ones(num, jnp.int32),
        noise.round_key(3, requests, jnp.zeros_like(requests)),
        jnp.ones(num),
    )
    found = jax.jit(functools.partial(rejection_sample, draft=None, backend=backend))(*given)
    kept, next_id = np.asarray(found.num_accepted) == 1, np.asarray(found.next_id)
    assert abs(kept.mean() - p[guess]) < 5 * np.sqrt(p[guess] * (1 - p[guess]) / num)
    assert (next_id[~kept] != guess).all()
    first = np.where(kept, guess, next_id)
    counts = np.bincount(first, minlength=width)
    statistic = ((counts - num * p) ** 2 / (num * p)).sum()
    assert statistic < 90, "chi-square with 39 degrees of freedom: exceeded once in 200,000 times"


def test_recomputed_draft_rows_give_the_same_verdict():
    spec = SMALL[1].scaled_down()
    arguments, _ = _reference(spec)
    judged, draft, floors, expected = _judged(spec)
    previous = jnp.concatenate([arguments.anchor[:, None], judged.ids[:, :-1]], axis=1)
    rows = RecomputedRows(arguments.base_logits.swapaxes(0, 1), arguments.w1[previous], arguments.w2, draft.log_normaliser)
    for backend in ("xla", "interpret", "interpret_triton"):
        found = jax.jit(functools.partial(rejection_sample, floor=floors, backend=backend))(*judged, draft=rows)
        np.testing.assert_array_equal(np.asarray(found.num_accepted), np.asarray(expected.num_accepted))
        np.testing.assert_array_equal(np.asarray(found.next_id), np.asarray(expected.next_id))


@pytest.mark.parametrize("epsilon", [1e-4, 1e-3, 1e-2])
def test_recomputed_logits_move_the_law_by_no_more_than_is_said(epsilon):
    """The bound of `RecomputedRows`, by enumeration: the residual subtracts q' in the place of q, acceptance knows q."""
    rng = np.random.default_rng(5)
    worst = 0.0
    for _ in range(200):
        p, logits = rng.dirichlet(np.ones(5)), rng.normal(size=5)
        q = np.exp(logits) / np.exp(logits).sum()
        wrong = q * np.exp(rng.choice([-epsilon, epsilon], size=5))
        residual = np.maximum(p - wrong, 0)
        law = np.minimum(p, q) + np.maximum(p - q, 0).sum() * residual / residual.sum()
        worst = max(worst, 0.5 * np.abs(law - p).sum())
    assert 0 < worst <= np.exp(2 * epsilon) - 1


def test_over_a_block_the_bound_adds_up():
    """Seven drafts with the residual of q' at each: the law moves by more than at one of them, and by less than seven times the bound."""
    epsilon, drafts = 1e-3, 7
    shift = 0.49 * epsilon
    p, q = np.array([0.5, 0.5]), np.array([0.5 - shift, 0.5 + shift])
    wrong = q * np.exp([epsilon, -epsilon])
    residual = np.maximum(p - wrong, 0) / np.maximum(p - wrong, 0).sum()
    step = np.minimum(p, q) + np.maximum(p - q, 0).sum() * residual
    law = functools.reduce(np.multiply.outer, [step] * drafts)
    moved = 0.5 * np.abs(law - 0.5**drafts).sum()
    assert 0.5 * np.abs(step - p).sum() < moved <= drafts * (np.exp(2 * epsilon) - 1)


@pytest.mark.parametrize("spec", EVERY_SPEC)
@pytest.mark.parametrize(("kernels", "platform"), [("mosaic_tpu", "tpu"), ("triton", "cuda")])
def test_both_ops_lower_for_devices_that_are_not_here(spec, kernels, platform):
    backend = AheadOfTime(kernels)
    arguments = jax.eval_shape(functools.partial(markov_arguments, spec))
    one = arguments.base_logits
    single = arguments._replace(base_logits=jax.ShapeDtypeStruct(one.shape[1:], one.dtype))
    for function, given in (
        (functools.partial(markov_block, backend=backend), arguments),
        (functools.partial(markov_block, return_logits=True, backend=backend), arguments),
        (lambda a, u, w1, w2, key, t: markov_sample(a, u, w1, w2, key, 3, t, backend=backend), single),
    ):
        assert "custom_call" in jax.jit(function).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    draft = jax.eval_shape(jax.jit(functools.partial(markov_block, return_logits=True, backend=backend)), *arguments)
    swapped: list[Any] = [jax.ShapeDtypeStruct((each.shape[1], each.shape[0], *each.shape[2:]), each.dtype) for each in draft]
    judged = jax.eval_shape(functools.partial(rejection_arguments, spec), swapped[4], swapped[0], swapped[1])
    floors = jax.ShapeDtypeStruct((spec.num_flat,), jnp.float32) if spec.filtered else None

    def reject(judged, rows, floors):
        return rejection_sample(*judged, draft=rows, floor=floors, backend=backend)

    text = (
        jax.jit(reject).trace(judged, DraftRows(swapped[4], swapped[2], swapped[3]), floors).lower(lowering_platforms=(platform,)).as_text()
    )
    assert text.count("custom_call") >= 2


def test_backends_that_cannot_run_here_are_refused():
    for name in ("mosaic_tpu", "triton"):
        with pytest.raises(ValueError, match=f"backend is '{name}', which needs the platform .*; jax runs on cpu here"):
            dispatch.choose(name)
    with pytest.raises(ValueError, match="backend is 'cuda'; allowed: auto, xla"):
        dispatch.choose("cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="name is 'xla'; kernels for devices are mosaic_tpu, triton"):
        AheadOfTime("xla")
    assert dispatch.choose("auto") == dispatch.Choice("xla")


@pytest.mark.parametrize(("capability", "kernels"), [("7.5", "xla"), ("8.0", "triton"), ("10.0", "triton"), ("gfx90a", "triton")])
def test_auto_is_plain_jax_on_gpus_that_are_too_old_for_the_kernels(monkeypatch, capability, kernels):
    """A T4, as free notebooks have it, is of compute capability 7.5."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert dispatch.choose("auto") == dispatch.Choice(kernels)


def test_the_fall_back_of_auto_is_logged_once(caplog):
    dispatch._automatic.cache_clear()
    with caplog.at_level("INFO", "pallas_kernels.dispatch"):
        dispatch.choose("auto")
        dispatch.choose("auto")
    assert [record.message for record in caplog.records] == ["plain JAX computes: no kernels for the platform cpu"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"w2": jnp.zeros((5, 64))}, r"w2 has shape \(5, 64\); .* allowed is \(2125, 64\)"),
        ({"anchor": jnp.zeros(3, jnp.int32)}, r"anchor has shape \(3,\); allowed is \(1,\), base_logits having 1 requests"),
        ({"w1": jnp.zeros((5, 64))}, r"w1 has 5 rows; without draft_ids it must have one for each of the 2125 columns"),
        ({"temperature": jnp.zeros(2)}, r"temperature has shape \(2,\); allowed is \(1,\)"),
        ({"temperature": 1.0}, r"temperature has shape \(\); allowed is \(1,\)"),
        ({"key": jax.random.key(0)}, r"key has shape \(\); allowed is \(1, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, complaint):
    arguments = markov_arguments(SMALL[2].scaled_down())
    with pytest.raises(ValueError, match=complaint):
        markov_block(*arguments._replace(**change))


def _verdict_on(**changes):
    """A verdict on one request with two drafts over eight ids, of which some arguments are changed."""
    given = {
        "target_logits": jnp.zeros((3, 8)),
        "row": jnp.zeros(3, jnp.int32),
        "first": jnp.zeros(1, jnp.int32),
        "ids": jnp.zeros((1, 2), jnp.int32),
        "log_q": jnp.full((1, 2), -jnp.log(8.0)),
        "lengths": jnp.full(1, 2, jnp.int32),
        "key": noise.round_key(0, jnp.zeros(1, jnp.int32), 0),
        "temperature": jnp.ones(1),
        "draft": DraftRows(jnp.zeros((1, 2, 8)), jnp.full((1, 2), jnp.log(8.0)), jnp.full((1, 2), -jnp.inf)),
    }
    return rejection_sample(**given | changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target_logits": jnp.zeros((1, 3, 8))}, r"target_logits has shape \(1, 3, 8\); allowed are two axes, \[N, V\]"),
        (
            {"row": jnp.zeros(2, jnp.int32)},
            r"row has shape \(2,\); allowed is \(3,\), ids having shape \(1, 2\) and target_logits \(3, 8\)",
        ),
        ({"temperature": 1.0}, r"temperature has shape \(\); allowed is \(1,\)"),
        ({"key": jax.random.key(0)}, r"key has shape \(\); allowed is \(1, 2\)"),
        ({"floor": jnp.zeros(1)}, r"floor has shape \(1,\); allowed is \(3,\)"),
        ({"log_q": jnp.zeros((2, 1))}, r"log_q has shape \(2, 1\); allowed is \(1, 2\)"),
        ({"draft": DraftRows(jnp.zeros((1, 2, 7)), jnp.zeros((1, 2)), jnp.zeros((1, 2)))}, r"draft.logits has shape \(1, 2, 7\)"),
        ({"draft": DraftRows(jnp.zeros((1, 2, 8)), jnp.zeros((2, 1)), jnp.zeros((1, 2)))}, r"draft.log_normaliser has shape \(2, 1\)"),
        ({"backend": "triton"}, "backend is 'triton', which needs the platform gpu"),
    ],
)
def test_a_verdict_on_what_does_not_fit_is_refused_by_field(changes, complaint):
    assert int(_verdict_on().num_accepted[0]) == 2
    with pytest.raises(ValueError, match=complaint):
        _verdict_on(**changes)
