"""Decoding rounds: the reference's traces, plain decoding's tokens, and nothing that depends on who else is in the batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate, step
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.prefill import start
from dspark_jax.protocols import FlatTokens
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import ConfidenceThreshold
from dspark_jax.weights import load_drafter, load_target
from tests.reference_checks import assert_round, assert_stochastic_trace

SLOTS = 64
THRESHOLDED = 9


@dataclasses.dataclass(frozen=True)
class ByRequest:
    """The last digit of a request's id is its number of drafts; 9 stands for a confidence threshold.

    One compiled program so serves requests of every length, beside each other.
    """

    threshold: float = 0.5

    def lengths(self, survival, active, context, request_id):
        digit = request_id % 10
        fixed = jnp.minimum(digit, survival.shape[1])
        by_confidence = ConfidenceThreshold(self.threshold).lengths(survival, active, context, request_id)
        return jnp.where(active, jnp.where(digit == THRESHOLDED, by_confidence, fixed), 0)


@dataclasses.dataclass(frozen=True)
class Models:
    """The golden target and its drafter."""

    target: Any
    target_params: Any
    drafter: DSparkDrafter
    drafter_params: Any
    params: DecodeParams


@pytest.fixture(scope="module")
def models(golden):
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    params = DecodeParams.of(target, target_params, loaded.params)
    return Models(target, target_params, loaded.drafter, loaded.params, params)


@pytest.fixture(scope="module")
def traces(golden):
    names = ("greedy", "stop", "conf_threshold", "temp1")
    return {name: dict(np.load(golden / "dspark_qwen3_vanilla" / f"decode_{name}.npz")) for name in names}


@pytest.fixture(scope="module")
def plan(models, traces):
    """The golden drafter with `ByRequest`; the threshold is the reference's."""
    policy = ByRequest(float(traces["conf_threshold"]["confidence_threshold"]))
    return DecodePlan(models.target, models.drafter, policy, RawSurvival())


def _run(plan, params, state):
    """Rounds until everybody is finished."""
    rounds = 0
    while not bool(state.finished.all()):
        before, active = np.asarray(state.length), ~np.asarray(state.finished)
        state, stats = step(plan, params, state)
        assert np.all((np.asarray(state.length) > before) == active), "[F6] every request advances, and nobody else"
        rounds += 1
        assert rounds < SLOTS
    return state


# --- the reference's traces


def test_the_references_greedy_traces_come_out_round_by_round(models, plan, traces):
    """[B1] [B2] Greedy, with a stop token, and with a confidence threshold, as three requests of one batch.

    Golden `decode_*`: anchors, drafts, confidences, verified lengths, acceptances, next tokens and what is committed.
    """
    greedy, stopped, thresholded = (traces[name] for name in ("greedy", "stop", "conf_threshold"))
    prompt = greedy["prompt_ids"][0].tolist()

    def begin(budget):
        state = start(plan, models.params, [prompt] * 3, max_new_tokens=budget, request_ids=[5, 15, THRESHOLDED], max_len=SLOTS)
        return dataclasses.replace(state, stop_ids=jnp.array([[-1], [39], [-1]], jnp.int32))

    state = begin(50)
    for index in range(len(greedy["start"])):
        before = np.asarray(state.length)
        state, device_stats = step(plan, models.params, state)
        stats = jax.tree.map(np.asarray, device_stats)
        assert_round(greedy, index, 0, before, state, stats)
        assert_round(thresholded, index, 2, before, state, stats)
        if index < len(stopped["start"]):
            assert_round(stopped, index, 1, before, state, stats)
            assert stats.cut[1] == stopped["terminated_by_stop"][index] == bool(state.finished[1])
        else:
            assert not stats.active[1] and stats.emitted[1] == 0
    finished = _run(plan, models.params, begin(int(greedy["max_new_tokens"])))
    for row, trace in enumerate((greedy, stopped, thresholded)):
        assert prompt + answers(finished)[row] == trace["output_ids"][0].tolist()


def test_the_references_stochastic_trace_follows_from_our_probabilities(models, traces):
    """Golden `decode_temp1`: both models give its logits on its prefixes, and its uniforms decide with them as they did there."""
    assert_stochastic_trace(traces["temp1"], models.target, models.target_params, models.drafter, models.drafter_params)


# --- plain decoding's tokens


def _pool(golden):
    return np.load(golden / "qwen3_target" / "forward.npz")["input_ids"]


@functools.partial(jax.jit, static_argnums=0)
def _logits(target, params, texts):
    """The target's logits everywhere, by one pass without a cache."""
    rows, width = texts.shape
    tokens = FlatTokens.grid(texts, jnp.zeros((rows,), jnp.int32), jnp.full((rows,), width, jnp.int32))
    hidden, _, _ = target.forward(params, None, tokens, ())
    return target.head(params).logits(hidden).reshape(rows, width, -1)


def _greedy_margins(models, prompts, written):
    """For three texts: the gaps between the two largest logits wherever a token was chosen; each chosen token has the largest."""
    texts = np.zeros((3, 40), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True)):
        texts[row, : len(prompt) + len(answer)] = [*prompt, *answer]
    logits = np.asarray(_logits(models.target, models.target_params, jnp.asarray(texts)))
    margins = []
    for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True)):
        chosen = logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
        assert chosen.argmax(-1).tolist() == answer
        second, best = np.sort(chosen, axis=-1)[:, -2:].T
        margins.append(best - second)
    return np.concatenate(margins)


def test_greedy_rounds_of_any_length_write_what_plain_decoding_writes(models, golden):
    """[B1] [A8] A block of 8 with 0 to 8 drafts verified, over a ladder of buckets: the target's own greedy text, token by token."""
    ids = _pool(golden)
    prompts = [ids[0, :7].tolist(), ids[1, :5].tolist(), ids[0, 9:19].tolist()]
    requests = [(prompt, 10 * number + length) for number, prompt in enumerate(prompts) for length in range(9)]
    drafter = DSparkDrafter(dataclasses.replace(models.drafter.config, block_size=8))
    speculative = DecodePlan(models.target, drafter, ByRequest(), RawSurvival(), ladder=(80, 27 * 9))
    settings: Any = {"max_new_tokens": 30, "max_len": 40}
    texts, request_ids = [list(column) for column in zip(*requests, strict=True)]
    state, tally = generate(speculative, models.params, start(speculative, models.params, texts, request_ids=request_ids, **settings))
    plain = DecodePlan(models.target)
    expected, plain_tally = generate(plain, models.params, start(plain, models.params, prompts, **settings))
    for (_, request_id), answer in zip(requests, answers(state), strict=True):
        assert answer == answers(expected)[request_id // 10], f"{request_id % 10} drafts"
        assert len(answer) == 30
    rounds = np.asarray(tally.rounds + tally.cut_rounds).reshape(3, 9)
    assert np.all(rounds[:, 0] == 29) and np.asarray(plain_tally.rounds).tolist() == [29] * 3
    assert np.all(rounds[:, 8] < 29), "some drafts are accepted"
    assert np.all(np.asarray(tally.verified).reshape(3, 9)[:, 0] == 0)
    assert _greedy_margins(models, prompts, answers(expected)).min() > 1e-3


@pytest.mark.slow
def test_bfloat16_rounds_part_from_plain_decoding_only_where_the_target_hesitates(models, plan, golden):
    """[B1] At the first token that differs the two largest logits lie within 0.15, bfloat16's grain being 0.03 at their size."""
    prompts = [_pool(golden)[0, begin : begin + 6].tolist() for begin in range(0, 18, 2)]
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (models.target_params, models.drafter_params))
    params = DecodeParams.of(models.target, *narrow)
    settings: Any = {"max_new_tokens": 30, "max_len": 40}
    ids = [10 * row + 5 for row in range(len(prompts))]
    written, _ = generate(plan, params, start(plan, params, prompts, request_ids=ids, **settings))
    plain = DecodePlan(models.target)
    expected, _ = generate(plain, params, start(plain, params, prompts, **settings))
    same = 0
    logits = np.sort(np.asarray(_logits(models.target, narrow[0], expected.ids)), axis=-1)
    for row, (ours, theirs) in enumerate(zip(answers(written), answers(expected), strict=True)):
        differ = [place for place, (left, right) in enumerate(zip(ours, theirs, strict=True)) if left != right]
        same += not differ
        if differ:
            place = len(prompts[row]) + differ[0] - 1
            assert logits[row, place, -1] - logits[row, place, -2] < 0.15
    assert same > 0


# --- batch-mates


@dataclasses.dataclass(frozen=True)
class Request:
    """What one request asks for."""

    prompt: tuple[int, ...]
    budget: int
    request_id: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: int = -1


def _answers_of(plan, params, requests):
    state = start(
        plan,
        params,
        [request.prompt for request in requests],
        max_new_tokens=[request.budget for request in requests],
        sampling=Sampling.make(
            len(requests),
            [request.temperature for request in requests],
            [request.top_k for request in requests],
            [request.top_p for request in requests],
        ),
        request_ids=[request.request_id for request in requests],
        seed=11,
        max_len=SLOTS,
        prefill_chunk=5,
    )
    state = dataclasses.replace(state, stop_ids=jnp.asarray([[request.stop] for request in requests], jnp.int32))
    return answers(_run(plan, params, state))


def test_neither_batch_mates_nor_slots_nor_padding_change_a_request(models, plan, golden):
    """[B2] [C3] Prompts of 6 to 10 tokens with their own budgets, temperatures, filters, stop tokens and numbers of drafts.

    Greedy requests and sampled ones with fixed lengths give the same tokens alone, in batches of three, and in other slots, beside
    a request that ends at once as well. No greedy decision has a margin below 1e-3.
    """
    ids = _pool(golden)
    requests = [
        Request(tuple(ids[0, :6]), 20, 5),
        Request(tuple(ids[0, 3:13]), 9, 3, temperature=1.0),
        Request(tuple(ids[1, :8]), 14, 12, temperature=0.7, top_k=20),
        Request(tuple(ids[1, 4:13]), 17, 24, temperature=1.0, top_p=0.9),
        Request(tuple(ids[0, 10:17]), 1, 31),
        Request(tuple(ids[1, 9:15]), 20, THRESHOLDED),
    ]
    requests = [dataclasses.replace(request, prompt=tuple(int(token) for token in request.prompt)) for request in requests]
    alone = [_answers_of(plan, models.params, [request])[0] for request in requests]
    greedy = [0, 4, 5]
    assert _greedy_margins(models, [requests[index].prompt for index in greedy], [alone[index] for index in greedy]).min() > 1e-3
    # A stop token in the middle of the third answer ends it there, wherever it runs.
    stop_at = alone[2][6]
    requests[2] = dataclasses.replace(requests[2], stop=stop_at)
    alone[2] = alone[2][: alone[2].index(stop_at) + 1]
    for batch in ([0, 1, 2], [3, 4, 5], [2, 5, 0], [4, 3, 1], [1, 0, 3]):
        together = _answers_of(plan, models.params, [requests[index] for index in batch])
        for index, answer in zip(batch, together, strict=True):
            assert answer == alone[index], f"request {index} in batch {batch}"
    assert [len(answer) for answer in alone] == [20, 9, len(alone[2]), 17, 1, 20]


def test_samples_of_one_prompt_differ_by_request_id_and_repeat_by_seed(models, plan, golden):
    """Several samples of one prompt have ids of their own; a seed and an id make the tokens."""
    prompt = tuple(int(token) for token in _pool(golden)[0, :6])
    requests = [Request(prompt, 12, request_id, temperature=1.0) for request_id in (3, 13, 23)]
    first, again = _answers_of(plan, models.params, requests), _answers_of(plan, models.params, requests)
    assert first == again
    assert len({tuple(answer) for answer in first}) == 3
