"""What `protocols.Target` promises, held against every target that lies in `targets/`, with one set of tests for all."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import targets
from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate
from dspark_jax.moe import MoEConfig
from dspark_jax.prefill import start
from dspark_jax.protocols import DraftBlock, FlatTokens
from dspark_jax.schedule import FixedLength
from dspark_jax.targets.deepseek_v4 import DeepSeekV4Config, DeepSeekV4Target
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.targets.gemma_layers import FULL, GEMMA3_STYLE, SLIDING, AttentionKind, GemmaConfig
from dspark_jax.targets.toy import ToyTarget

CLOSE: Any = {"atol": 2e-5, "rtol": 2e-4}
VOCAB, ROWS, LENGTH, WRITES = 5, 3, 14, 5
SIZES: Any = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4}
LATENT: Any = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=12)

TARGETS: dict[str, Any] = {
    "toy": ToyTarget(VOCAB, spread=3.0),
    "dense": DenseTarget(DenseConfig(**SIZES, num_layers=2, num_kv_heads=2, head_dim=8, qk_norm=True)),
    "gemma": GemmaTarget(
        GemmaConfig(
            **SIZES,
            layer_types=(SLIDING, FULL),
            style=GEMMA3_STYLE,
            full=AttentionKind(2, 8, 1e6),
            sliding=AttentionKind(2, 8, 1e4, window=3),
        )
    ),
    "deepseek_v4": DeepSeekV4Target(DeepSeekV4Config(**SIZES, **LATENT, num_layers=2, experts=EXPERTS, sliding_window=3)),
}
CORE = ("toy",)
"""Goes through the contract in every run; the others, which have tests of their own there, in `make test-all`."""


def test_every_target_that_exists_is_under_contract():
    found = set()
    for module in pkgutil.iter_modules(targets.__path__, "dspark_jax.targets."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if hasattr(member, "roll_back") and member.__module__ == module.name:
                found.add(member)
    assert found == {type(target) for target in TARGETS.values()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A target with random parameters, three texts, and what it says of them in one pass without a cache."""

    target: Any
    params: Any
    taps: tuple[int, ...]
    texts: np.ndarray
    hidden: np.ndarray
    features: np.ndarray


@functools.partial(jax.jit, static_argnums=(0, 4))
def _forward(target, params, cache, tokens, taps):
    return target.forward(params, cache, tokens, taps)


def _grid(ids, begin: Any = 0, count: Any = None):
    ids = jnp.asarray(ids, jnp.int32)
    rows = jnp.zeros((ids.shape[0],), jnp.int32)
    return FlatTokens.grid(ids, rows + begin, rows + (ids.shape[1] if count is None else count))


def case_of(target):
    """Texts of `ROWS` x `LENGTH` tokens."""
    params = jax.jit(target.init)(jax.random.key(0))
    if hasattr(target, "abstract_params"):
        # Larger than those of a fresh model, so that no attention is flat.
        params = jax.tree.map(lambda leaf: leaf if leaf.ndim < 2 else leaf * (0.4 / jnp.std(leaf)), params)
    taps = (0, -1) if target.spec.num_layers == 1 else (1, -1, 0)
    texts = np.random.default_rng(1).integers(0, target.spec.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    hidden, features, cache = _forward(target, params, None, _grid(texts), taps)
    assert cache is None
    return Case(target, params, taps, texts, *(np.asarray(x).reshape(ROWS, LENGTH, -1) for x in (hidden, features)))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name in CORE else pytest.mark.slow) for name in TARGETS])
def case(request):
    return case_of(TARGETS[request.param])


def test_shapes_are_those_of_the_spec(case):
    spec, head = case.target.spec, case.target.head(case.params)
    assert case.hidden.shape == (ROWS, LENGTH, spec.width) and case.features.shape == (ROWS, LENGTH, len(case.taps) * spec.width)
    assert head.embedding.shape == head.lm_head.shape == (spec.vocab_size, spec.width)
    logits = head.logits(jnp.asarray(case.hidden[0]))
    assert logits.dtype == jnp.float32 and np.all(np.isfinite(np.asarray(logits)))
    assert hash(case.target) == hash(dataclasses.replace(case.target)), "a static argument of jit"


def test_a_token_sees_what_stands_before_it_and_itself(case):
    place = 6
    changed = case.texts.copy()
    changed[:, place] = (changed[:, place] + 1) % case.target.spec.vocab_size
    hidden, features, _ = _forward(case.target, case.params, None, _grid(changed), case.taps)
    moved = np.abs(np.asarray(hidden).reshape(case.hidden.shape) - case.hidden).max(-1)
    assert moved[:, :place].max() < 1e-5 < moved[:, place].min()
    assert np.abs(np.asarray(features).reshape(case.features.shape) - case.features)[:, :place].max() < 1e-5


def test_taps_come_side_by_side_in_the_order_asked_for(case):
    """[D1]"""
    width = case.target.spec.width
    backwards = case.taps[::-1]
    _, features, _ = _forward(case.target, case.params, None, _grid(case.texts), backwards)
    columns = np.split(case.features, len(case.taps), axis=-1)[::-1]
    np.testing.assert_allclose(np.asarray(features).reshape(ROWS, LENGTH, -1), np.concatenate(columns, axis=-1), **CLOSE)
    assert _forward(case.target, case.params, None, _grid(case.texts), ())[1].shape == (ROWS * LENGTH, 0) and width == columns[0].shape[-1]


def test_passes_over_a_cache_are_the_pass_over_the_whole_text(case):
    """[B1] [C2] Chunks of 1 to 5 tokens; of some the last ones are wrong, are forgotten and written anew."""
    cache = case.target.init_cache(ROWS, LENGTH, writes_per_pass=WRITES)
    wrong = (case.texts + 1) % case.target.spec.vocab_size
    position = 0
    for count, kept in ((5, 5), (1, 1), (4, 1), (5, 2), (5, 5)):
        inside = np.minimum(position + np.arange(WRITES), LENGTH - 1)
        chunk = np.where(np.arange(WRITES) < kept, case.texts[:, inside], wrong[:, inside])
        hidden, features, cache = _forward(case.target, case.params, cache, _grid(chunk, position, count), case.taps)
        for ours, whole in ((hidden, case.hidden), (features, case.features)):
            np.testing.assert_allclose(np.asarray(ours).reshape(ROWS, WRITES, -1)[:, :kept], whole[:, position : position + kept], **CLOSE)
        position += kept
        cache = case.target.roll_back(cache, jnp.full((ROWS,), position, jnp.int32))
        assert np.asarray(cache.length).tolist() == [position] * ROWS
    assert position == LENGTH


def test_flat_tokens_of_several_requests_are_each_request_alone(case):
    """[B2] [C3] Other cached lengths and token counts, in any order, among padding, which leaves no trace."""
    lengths, counts, bucket = np.array([5, 0, 3]), np.array([4, 1, 2]), 10
    cache = case.target.init_cache(ROWS, LENGTH, writes_per_pass=WRITES)
    _, _, cache = _forward(case.target, case.params, cache, _grid(case.texts[:, :WRITES], 0, jnp.asarray(lengths, jnp.int32)), case.taps)
    flat = [(row, slot) for row, count in enumerate(counts) for slot in range(count)]
    order = np.random.default_rng(2).permutation(bucket)
    row, slot = np.array(flat + (bucket - len(flat)) * [(2, 4)], np.int32)[order].T
    position, real = (lengths[row] + slot).astype(np.int32), order < len(flat)
    ids = np.where(real, case.texts[row, position], 0).astype(np.int32)
    tokens = FlatTokens(*(jnp.asarray(x) for x in (ids, row, slot, position, real)), queries_per_row=WRITES)
    hidden, features, cache = _forward(case.target, case.params, cache, tokens, case.taps)
    np.testing.assert_allclose(np.asarray(hidden)[real], case.hidden[row, position][real], **CLOSE)
    np.testing.assert_allclose(np.asarray(features)[real], case.features[row, position][real], **CLOSE)
    assert np.asarray(cache.length).tolist() == (lengths + counts).tolist()
    begin = jnp.asarray(lengths + counts, jnp.int32)
    following = np.stack([text[place : place + WRITES] for text, place in zip(case.texts, lengths + counts, strict=True)])
    hidden, _, _ = _forward(case.target, case.params, cache, _grid(following, begin), case.taps)
    for text, (place, ours) in enumerate(zip(lengths + counts, np.asarray(hidden).reshape(ROWS, WRITES, -1), strict=True)):
        np.testing.assert_allclose(ours, case.hidden[text, place : place + WRITES], **CLOSE)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """Drafts what stands in given texts [R, T]; its state counts the positions before the anchor."""

    taps: tuple[int, ...]
    block_size: int = 3

    def init_state(self, num_rows, max_len, *, writes_per_pass=None, dtype=jnp.float32):
        return jnp.zeros((num_rows,), jnp.int32)

    def commit(self, params, head, state, committed):
        return state + committed.count

    def propose(self, params, head, state, anchor, noise, sampling):
        texts = params["texts"]
        place = jnp.minimum(state[:, None] + 1 + jnp.arange(self.block_size, dtype=jnp.int32), texts.shape[1] - 1)
        certain = jnp.zeros(place.shape, jnp.float32)
        return DraftBlock(jnp.take_along_axis(texts, place, axis=1), certain, certain, certain, None, None)


@pytest.mark.slow
def test_greedy_text_is_that_of_plain_decoding_where_some_drafts_are_wrong(case):
    """[A8] [B1] [C3] Every third token of the plain text is drafted wrongly; prompts of three lengths, read in chunks of two."""
    prompts: Any = {"prompts": [[1, 2, 3], [4], [0, 4]], "max_new_tokens": [10, 9, 8], "prefill_chunk": 2}
    plain = DecodePlan(case.target)
    params = DecodeParams.of(case.target, case.params)
    state, plainly = generate(plain, params, start(plain, params, **prompts))
    texts = np.asarray(state.ids)
    drafted = np.where(np.arange(texts.shape[1]) % 3 == 2, (texts + 1) % VOCAB, texts)
    drafter: Any = _Recorded(case.taps)
    plan = DecodePlan(case.target, drafter, FixedLength(3), ConstantSurvival((1.0, 1.0, 1.0)))
    params = DecodeParams.of(case.target, case.params, {"texts": jnp.asarray(drafted)})
    again, tally = generate(plan, params, start(plan, params, **prompts))
    assert answers(again) == answers(state)
    rounds = [int(np.sum(each.rounds) + np.sum(each.cut_rounds)) for each in (plainly, tally)]
    assert rounds[0] == 10 + 9 + 8 - 3 and 1 < rounds[0] / rounds[1] <= 3
