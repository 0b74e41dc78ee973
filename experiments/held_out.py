"""How good a drafter is on held-out texts while it trains: estimated at drawn anchors, and measured by decoding their prompts."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dspark_jax.batches import TokenBatch, TokenBatches
from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.data import TokenSequences
from dspark_jax.decode import DecodeParams, DecodePlan, generate
from dspark_jax.evaluate import AnchorEstimate, estimate_at_anchors
from dspark_jax.prefill import start
from dspark_jax.protocols import Drafter, Target
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.typing import Params

KINDS = {"greedy": 0, "sampled": 2}
"""Classes of `TokenSequences.temperature` that the two held-out figures are taken on."""

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def spread(sequences: TokenSequences, count: int) -> TokenSequences:
    """`count` sequences, or all where there are fewer, at even distances: all domains and temperatures in their shares."""
    if not len(sequences):
        raise ValueError("data has no held-out text of a temperature; both 0 and 1 are needed, as `experiments.run texts` writes them")
    count = min(count, len(sequences))
    mask = np.zeros(len(sequences), bool)
    mask[np.linspace(0, len(sequences) - 1, count).round().astype(int)] = True
    return sequences.select(mask)


def held_out_texts(texts: TokenSequences, count: int) -> dict[str, TokenSequences]:
    """`count` held-out texts, one half written at temperature 0 and one at 1.

    Raises:
      ValueError: there is none of a temperature.
    """
    return {name: spread(texts.select((texts.heldout == 1) & (texts.temperature == kind)), count // 2) for name, kind in KINDS.items()}


def held_out_batches(sequences: TokenSequences, length: int, batch_size: int) -> Iterator[TokenBatch]:
    """Every sequence once."""
    stream = TokenBatches(sequences, batch_size=batch_size, lengths=(length,), min_loss_tokens=2)
    for batch, state in stream.stream():
        yield batch
        if state["epoch"]:
            return


def estimate(
    target: Target,
    drafter: Drafter,
    target_params: Params,
    params: Params,
    texts: TokenSequences,
    length: int,
    num_anchors: int,
    seed: int,
    draft_ids: Any,
) -> AnchorEstimate:
    """`evaluate.estimate_at_anchors` over all of `texts`, padded or cut to `length`."""
    batches = held_out_batches(texts, length, min(8, len(texts)))
    return estimate_at_anchors(target, drafter, target_params, params, batches, num_anchors, seed=seed, draft_ids=draft_ids)


def measured_accepted_length(
    target: Target,
    drafter: Drafter,
    params: DecodeParams,
    texts: TokenSequences,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> float:
    """Tokens per round when the prompts of `texts` are answered and every block is verified in full.

    Rounds that a closing mark or the budget cut short do not count. 0 where no round was whole.
    """
    begins = texts.offsets[:-1]
    prompts = [texts.tokens[begin : begin + size].tolist() for begin, size in zip(begins, texts.answer_start, strict=True)]
    # An answer that came to its end has the closing mark last.
    stop_ids = np.unique(texts.tokens[begins + texts.answer_end - 1][texts.finished])
    # Fixed lengths read no survival, but a plan has one.
    plan = DecodePlan(target, drafter, FixedLength(drafter.block_size), ConstantSurvival((1.0,) * drafter.block_size))
    state = start(
        plan,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=Sampling.make(len(prompts), temperature),
        stop_ids=stop_ids.tolist(),
        seed=seed,
    )
    tally = generate(plan, params, state)[1]
    return float(np.sum(tally.emitted)) / max(float(np.sum(tally.rounds)), 1.0)
