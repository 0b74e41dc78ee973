"""What `protocols.Drafter` promises, held against every drafter that lies in `drafters/`, with one set of tests for all."""

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

from dspark_jax import drafters
from dspark_jax.calibrate import ConstantSurvival, RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, step
from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.draft_scores import score_logits, score_of
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.exactness import DraftLaw, law_of_rounds
from dspark_jax.layers import GEMMA4_STYLE
from dspark_jax.moe import MoEConfig
from dspark_jax.prefill import start
from dspark_jax.protocols import Committed, FlatTokens, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.schedule import ConfidenceThreshold, FixedLength
from dspark_jax.targets.dense import DenseConfig, DenseTarget

CLOSE: Any = {"atol": 2e-5, "rtol": 2e-4}
VOCAB, WIDTH, LAYERS, LENGTH = 31, 16, 4, 14
SIZES: Any = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
BLOCK: Any = SIZES | {"mask_token_id": 2, "taps": (0, 2), "num_target_layers": LAYERS, "num_layers": 2, "block_size": 3}
GEMMA: Any = {"style": GEMMA4_STYLE, "k_eq_v": True, "rotated_share": 0.25, "num_kv_heads": 1}
CHAIN: Any = SIZES | {"num_target_layers": LAYERS, "block_size": 3}


def _dspark(**changes: Any) -> DSparkDrafter:
    return DSparkDrafter(DSparkConfig(**BLOCK | {"markov_rank": 4} | changes))


DRAFTERS: dict[str, Any] = {
    "dspark_vanilla": _dspark(),
    "dspark_gated": _dspark(markov_head_type="gated"),
    "dspark_rnn": _dspark(markov_head_type="rnn"),
    "dspark_confidence_without_markov": _dspark(confidence_with_markov=False),
    "dspark_without_confidence": _dspark(confidence_head=False),
    "dspark_entropy": _dspark(confidence_head=False, confidence_score="entropy"),
    "dspark_confidence_alone": _dspark(markov_rank=0, confidence_with_markov=False),
    "dspark_draft_vocabulary": _dspark(draft_vocab_size=20),
    "dspark_gemma4": _dspark(**GEMMA),
    "dspark_anchor_plus_masks": _dspark(layout="anchor_plus_masks"),
    "dspark_deepseek_v4": _dspark(num_layers=3, window=4, streams=3, experts=MoEConfig(num_experts=4, top_k=2, intermediate_size=12)),
    "dflash": DFlashDrafter(DFlashConfig(**BLOCK)),
    "dflash_largest": DFlashDrafter(DFlashConfig(**BLOCK, confidence_score="largest")),
    "dflash_anchor_plus_masks": DFlashDrafter(DFlashConfig(**BLOCK, layout="anchor_plus_masks")),
    "dflash_draft_vocabulary": DFlashDrafter(DFlashConfig(**BLOCK, draft_vocab_size=20)),
    "eagle3": Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0, 1, 2))),
    "eagle3_gemma4": Eagle3Drafter(Eagle3Config(**CHAIN | GEMMA, taps=(0, 1, 2))),
    "eagle3_draft_vocabulary": Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0, 2), draft_vocab_size=20)),
    "eagle3_entropy": Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0, 2), draft_vocab_size=20, confidence_score="entropy")),
    "mtp": MTPDrafter(MTPConfig(**CHAIN)),
    "mtp_confidence_head": MTPDrafter(MTPConfig(**CHAIN, confidence_head=True)),
    "mtp_1": MTPDrafter(MTPConfig(**CHAIN | {"block_size": 1})),
}


def test_every_drafter_that_exists_is_under_contract():
    found = set()
    for module in pkgutil.iter_modules(drafters.__path__, "dspark_jax.drafters."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if hasattr(member, "propose") and member.__module__ == module.name:
                found.add(member)
    concrete = {kind for kind in found if not any(issubclass(other, kind) and other is not kind for other in found)}
    assert concrete == {type(drafter) for drafter in DRAFTERS.values()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter with random parameters, and a target that has read a text."""

    drafter: Any
    params: Any
    target: DenseTarget
    target_params: Any
    draft_ids: Any
    ids: Any
    hidden: Any
    features: Any

    @functools.cached_property
    def head(self):
        """The head that the drafter predicts through."""
        return self.target.head(self.target_params).restrict(self.draft_ids)

    def survival(self):
        """What its confidence says, or that all drafts survive."""
        if getattr(self.drafter.config, "confidence_head", False) or score_of(self.drafter):
            return RawSurvival()
        return ConstantSurvival((1.0,) * self.drafter.block_size)


def _random(model, seed):
    """Parameters under which neither attention nor routing is flat."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(target, taps, params, ids):
    """The target's hidden states and features of whole texts."""
    rows, width = ids.shape
    tokens = FlatTokens.grid(ids, jnp.zeros((rows,), jnp.int32), jnp.full((rows,), width, jnp.int32))
    hidden, features, _ = target.forward(params, None, tokens, taps)
    return hidden.reshape(rows, width, -1), features.reshape(rows, width, features.shape[-1])


def _case(drafter, vocab_size=VOCAB, length=LENGTH):
    target = DenseTarget(DenseConfig(**SIZES | {"vocab_size": vocab_size}, num_layers=LAYERS, qk_norm=True))
    target_params = _random(target, 1)
    rng = np.random.default_rng(2)
    ids = jnp.asarray(rng.integers(0, vocab_size, (1, length)), jnp.int32)
    hidden, features = _read(target, drafter.taps, target_params, ids)
    size = drafter.config.draft_vocab_size
    draft_ids = None if size is None else jnp.asarray(np.sort(rng.choice(vocab_size, size, replace=False)), jnp.int32)
    return Case(drafter, _random(drafter, 3), target, target_params, draft_ids, ids, hidden, features)


CORE = ("dspark_vanilla", "dspark_rnn", "dspark_deepseek_v4", "dflash", "eagle3_entropy", "mtp_confidence_head")
"""One of each kind goes through the contract in every run, the variants in `make test-all`."""


def _marked(names):
    return [pytest.param(name, marks=[] if name in CORE else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=_marked(DRAFTERS))
def case(request):
    return _case(DRAFTERS[request.param])


@functools.partial(jax.jit, static_argnums=0)
def _committed(drafter, params, head, ids, hidden, features, count):
    """The state behind `count` committed positions of every row, in one chunk; `ids` reach one further."""
    rows, width = hidden.shape[:2]
    state = drafter.init_state(rows, width + drafter.block_size + 1)
    return drafter.commit(params, head, state, Committed(ids[:, 1:], hidden, features, count))


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, head, state, anchor, temperature):
    rows = jnp.arange(anchor.shape[0], dtype=jnp.int32)
    sampling = Sampling(temperature, jnp.zeros_like(rows), jnp.ones_like(temperature))
    return drafter.propose(params, head, state, anchor, Noise.of_round(7, rows, jnp.zeros_like(rows)), sampling)


@functools.partial(jax.jit, static_argnums=0)
def _sites(drafter, params, head, batch):
    """Prediction sites and their logits; a score stands where a head's confidence would."""
    sites = drafter.prediction_sites(params, head, batch)
    logits, score = drafter.site_logits(params, head, sites.hidden, sites.latent), score_of(drafter)
    return sites if score is None else dataclasses.replace(sites, confidence_logits=score_logits(logits, score)), logits


def _at_anchor(values, sites, rows, anchors, block_size):
    """[rows, G, ...] of the sites behind one anchor per row."""
    place = np.asarray(sites.anchor).reshape(rows, -1)
    steps = np.asarray(sites.step).reshape(rows, -1)
    values = np.asarray(values).reshape(rows, place.shape[1], *np.shape(values)[1:])
    picked = []
    for row, anchor in enumerate(anchors):
        (index,) = np.nonzero(place[row] == anchor)
        assert steps[row, index].tolist() == list(range(block_size))
        picked.append(values[row, index])
    return np.stack(picked)


def _proposals_behind_every_anchor(case, temperature):
    """One row per anchor: the text up to it is committed, and a block is drafted behind it."""
    anchors = np.arange(1, LENGTH - 1, dtype=np.int32)
    rows = len(anchors)

    def repeated(x):
        return jnp.broadcast_to(x, (rows, *x.shape[1:]))

    ids = repeated(jnp.pad(case.ids, ((0, 0), (0, 1))))
    state = _committed(case.drafter, case.params, case.head, ids, repeated(case.hidden), repeated(case.features), jnp.asarray(anchors))
    anchor_ids = case.ids[0, anchors]
    return anchors, _propose(case.drafter, case.params, case.head, state, anchor_ids, jnp.full((rows,), temperature, jnp.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_training_forward_is_the_decoding_forward_at_every_anchor(case, temperature):
    """[A1] [C4] [E1] The same logits, confidence and log q, the texts being continued by what was drafted.

    The target's words at and behind the anchor are garbage in training and absent in decoding: neither may matter.
    """
    drafter = case.drafter
    anchors, block = _proposals_behind_every_anchor(case, temperature)
    rows, size = len(anchors), drafter.block_size
    width = LENGTH + size
    texts = np.zeros((rows, width), np.int32)
    known = np.zeros((rows, width), bool)
    for row, anchor in enumerate(anchors):
        texts[row, : anchor + 1] = np.asarray(case.ids)[0, : anchor + 1]
        texts[row, anchor + 1 : anchor + 1 + size] = np.asarray(block.ids)[row]
        known[row, :anchor] = True

    def garbled(x):
        wide = np.broadcast_to(np.pad(np.asarray(x), ((0, 0), (0, size), (0, 0))), (rows, width, x.shape[2]))
        return jnp.asarray(np.where(known[..., None], wide, 9.0))

    batch = TrainBatch(
        ids=jnp.asarray(texts),
        loss_mask=jnp.ones((rows, width), bool),
        features=garbled(case.features),
        last_hidden=garbled(case.hidden),
        anchors=jnp.asarray(anchors)[:, None],
        keep=jnp.ones((rows, 1), bool),
    )
    sites, logits = _sites(drafter, case.params, case.head, batch)
    trained = _at_anchor(logits, sites, rows, anchors, size)
    np.testing.assert_allclose(np.asarray(block.logits), trained, **CLOSE)
    np.testing.assert_array_equal(_at_anchor(sites.label, sites, rows, anchors, size), np.asarray(block.ids))
    if sites.confidence_logits is None:
        assert block.confidence_logits is None
    else:
        confidence = _at_anchor(sites.confidence_logits, sites, rows, anchors, size)
        np.testing.assert_allclose(np.asarray(block.confidence_logits), confidence, **CLOSE)
    row_of = np.arange(VOCAB) if case.draft_ids is None else np.searchsorted(np.asarray(case.draft_ids), np.arange(VOCAB))
    drawn = row_of[np.asarray(block.ids)]
    log_q = np.asarray(jax.nn.log_softmax(jnp.asarray(trained)))
    own = np.take_along_axis(log_q, drawn[..., None], axis=2)[..., 0]
    if temperature:
        np.testing.assert_allclose(np.asarray(block.log_q), own, atol=1e-4, rtol=1e-3)
    else:
        assert np.all(np.asarray(block.log_q) == 0.0)
        np.testing.assert_array_equal(drawn, trained.argmax(-1))
    assert len(np.unique(np.asarray(block.ids), axis=0)) > 2, "the drafts depend on the text"


def test_proposals_lie_in_the_vocabulary(case):
    """[A5] [A7] And in the draft vocabulary where there is one, with a log q that is the logarithm of a probability."""
    allowed = set(range(VOCAB)) if case.draft_ids is None else set(np.asarray(case.draft_ids).tolist())
    for temperature in (0.0, 1.0, 3.0):
        _, block = _proposals_behind_every_anchor(case, temperature)
        assert set(np.asarray(block.ids).reshape(-1).tolist()) <= allowed
        assert block.ids.dtype == jnp.int32 and block.ids.shape[1] == case.drafter.block_size
        log_q = np.asarray(block.log_q)
        assert np.all(np.isfinite(log_q)) and np.all(log_q <= 0.0)


def test_sites_see_nothing_that_decoding_would_not_know(case):
    """[E1] Features from the anchor on, and tokens from the predicted one on, move no site; what lies before does."""
    drafter = case.drafter
    width, t = LENGTH, 6
    anchors = jnp.arange(1, width - 1, dtype=jnp.int32)[None]
    batch = TrainBatch(
        ids=case.ids,
        loss_mask=jnp.ones((1, width), bool),
        features=case.features,
        last_hidden=case.hidden,
        anchors=anchors,
        keep=jnp.ones(anchors.shape, bool),
    )
    sites, before = _sites(drafter, case.params, case.head, batch)
    anchor, place = np.asarray(sites.anchor), np.asarray(sites.anchor) + 1 + np.asarray(sites.step)

    def moved(**changes):
        _, after = _sites(drafter, case.params, case.head, dataclasses.replace(batch, **changes))
        return np.abs(np.asarray(after) - np.asarray(before)).max(-1)

    by_features = moved(features=case.features.at[:, t:].add(1.0), last_hidden=case.hidden.at[:, t:].add(1.0))
    assert by_features[anchor <= t].max() < 1e-5
    assert by_features[(anchor > t) & (place < width)].min() > 1e-5, "and every later anchor sees them"
    by_token = moved(ids=case.ids.at[:, t].set((case.ids[:, t] + 1) % VOCAB))
    assert by_token[place <= t].max() < 1e-5
    assert by_token[(anchor == t) & (place < width)].min() > 1e-5, "a block reads its own anchor"


@pytest.mark.parametrize("chunk", [1, 5])
def test_prefill_in_chunks_is_prefill_at_once(case, chunk):
    """[C5] Identical proposals whatever the chunks, padding included; a row that commits nothing keeps its state."""
    drafter, count = case.drafter, 10
    ids = jnp.pad(case.ids, ((0, 0), (0, 1)))
    whole = _committed(drafter, case.params, case.head, ids, case.hidden, case.features, jnp.array([count], jnp.int32))
    state = drafter.init_state(1, LENGTH + drafter.block_size + 1)
    commit = jax.jit(lambda params, head, state, committed: drafter.commit(params, head, state, committed))
    for begin in range(0, LENGTH - chunk + 1, chunk):
        cut = slice(begin, begin + chunk)
        size = jnp.array([np.clip(count - begin, 0, chunk)], jnp.int32)
        committed = Committed(ids[:, begin + 1 : begin + 1 + chunk], case.hidden[:, cut], case.features[:, cut], size)
        state = commit(case.params, case.head, state, committed)
    anchor, warm = case.ids[:, count], jnp.ones((1,), jnp.float32)
    at_once, in_chunks = (_propose(drafter, case.params, case.head, each, anchor, warm) for each in (whole, state))
    np.testing.assert_allclose(np.asarray(in_chunks.logits), np.asarray(at_once.logits), **CLOSE)
    np.testing.assert_array_equal(np.asarray(in_chunks.ids), np.asarray(at_once.ids))


def test_the_state_after_rounds_is_the_state_rebuilt_from_the_committed_text(case):
    """[C1] [C3] Rounds that accept different numbers of drafts, row by row; then one commit of each row's whole text."""
    drafter, prompts = case.drafter, [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    plan = DecodePlan(case.target, drafter, FixedLength(drafter.block_size), case.survival())
    params = DecodeParams.of(case.target, case.target_params, case.params, case.draft_ids)
    sampling = Sampling.make(3, 1.0)
    state = start(plan, params, prompts, max_new_tokens=[20, 18, 22], sampling=sampling, prefill_chunk=4, max_len=24)
    accepted = []
    for _ in range(4):
        state, stats = step(plan, params, state)
        accepted.append(np.asarray(stats.num_accepted))
    length = np.asarray(state.length)
    hidden, features = _read(case.target, drafter.taps, case.target_params, state.ids)
    ids = jnp.pad(state.ids, ((0, 0), (0, 1)))
    rebuilt = _committed(drafter, case.params, case.head, ids, hidden, features, state.length - 1)
    anchor, warm = state.ids[jnp.arange(3), state.length - 1], jnp.ones((3,), jnp.float32)
    ours, fresh = (_propose(drafter, case.params, case.head, each, anchor, warm) for each in (state.drafter_state, rebuilt))
    np.testing.assert_allclose(np.asarray(ours.logits), np.asarray(fresh.logits), **CLOSE)
    assert len(set(length.tolist())) > 1
    assert np.concatenate(accepted).max() <= drafter.block_size


LAW_CASES = [name for name in DRAFTERS if name not in ("dspark_draft_vocabulary", "dflash_draft_vocabulary")]
"""The draft vocabulary is a parameter of that test itself."""


@pytest.mark.parametrize("cut", [None, 2])
@pytest.mark.parametrize("name", _marked(LAW_CASES))
def test_rounds_with_its_drafts_have_the_targets_law(name, cut):
    """[A1] [A6] [A7] Vocabulary 3: q of every draft from the drafter's own logits, its own confidence, whole and partial vocabulary."""
    given = DRAFTERS[name]
    config = dataclasses.replace(given.config, vocab_size=3, draft_vocab_size=cut, block_size=min(2, given.block_size))
    case = _case(type(given)(config), vocab_size=3, length=4)
    drafter, prompt, size = case.drafter, tuple(np.asarray(case.ids)[0].tolist()), config.block_size
    anchor, width = len(prompt) - 1, len(prompt) + size
    blocks = np.stack(np.meshgrid(*[np.arange(3)] * size, indexing="ij"), axis=-1).reshape(-1, size)
    texts = jnp.asarray(np.concatenate([np.tile(prompt, (len(blocks), 1)), blocks], axis=1), jnp.int32)
    hidden, features = _read(case.target, drafter.taps, case.target_params, texts)
    batch = TrainBatch(
        ids=texts,
        loss_mask=jnp.ones(texts.shape, bool),
        features=features,
        last_hidden=hidden,
        anchors=jnp.full((len(blocks), 1), anchor, jnp.int32),
        keep=jnp.ones((len(blocks), 1), bool),
    )
    sites, logits = _sites(drafter, case.params, case.head, batch)
    at = functools.partial(_at_anchor, sites=sites, rows=len(blocks), anchors=[anchor] * len(blocks), block_size=size)
    q = np.zeros((len(blocks), size, 3))
    columns = np.arange(3) if case.draft_ids is None else np.asarray(case.draft_ids)
    q[:, :, columns] = np.asarray(jax.nn.softmax(jnp.asarray(at(logits)), axis=-1), np.float64)
    q /= q.sum(-1, keepdims=True)
    confidence = None if sites.confidence_logits is None else 1 / (1 + np.exp(-at(sites.confidence_logits).astype(np.float64)))
    index = {tuple(block): row for row, block in enumerate(blocks.tolist())}
    wide = np.asarray(jax.nn.softmax(case.target.head(case.target_params).logits(hidden), axis=-1), np.float64)

    def target_law(text):
        drafted = text[len(prompt) :]
        assert text[: len(prompt)] == prompt
        if len(drafted) > size:
            raise ValueError("one round is enumerated")
        row = wide[index[drafted + (0,) * (size - len(drafted))], len(text) - 1]
        return row / row.sum()

    def draft_probs(text, drafts):
        assert text == prompt
        return q[index[drafts + (0,) * (size - len(drafts))], len(drafts)]

    def survives(text, drafts, k):
        return 1.0 if confidence is None else float(confidence[index[drafts], k])

    law = DraftLaw(size, draft_probs, survives)
    assert width == texts.shape[1]
    for policy in (FixedLength(size), ConfidenceThreshold(0.5)):
        report = law_of_rounds(target_law, law, policy, prompts=(prompt,))
        assert abs(report.law.sum() - 1) < 1e-6
        assert report.deviation < 1e-6
    if cut is not None:
        assert np.any(q == 0.0)
