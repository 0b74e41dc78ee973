"""Decoding with the kernels of every backend that runs here: the tokens of plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.targets.toy import ToyTarget
from tests.tiny_models import random_params
from tests.toy_rounds import BLOCK, TARGET

TEMPERATURES = (0.0, 1.0, 0.7, 1.0)
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def _answers(backend, head="vanilla", top_p=1.0, draft_vocab_size=None):
    """What each request got, with as many drafts verified as there are."""
    config = DSparkConfig(**BLOCK, markov_rank=4, markov_head_type=head, draft_vocab_size=draft_vocab_size)
    drafter = DSparkDrafter(config, backend=backend)
    plan = DecodePlan(TARGET, drafter, FixedLength(config.block_size), RawSurvival(), backend=backend)
    target_params = TARGET.init(jax.random.key(0))
    draft_ids = None if draft_vocab_size is None else jnp.arange(draft_vocab_size, dtype=jnp.int32) * 2
    params = DecodeParams.of(TARGET, target_params, random_params(drafter, 1), draft_ids)
    sampling = Sampling.make(len(PROMPTS), TEMPERATURES, top_p=top_p)
    state = start(plan, params, PROMPTS, max_new_tokens=24, max_len=40, sampling=sampling)
    state, tally = generate(plan, params, state)
    return answers(state), int(np.asarray(tally.accepted).sum())


KERNELS = ("interpret", "interpret_triton")


@pytest.mark.parametrize("backend", [*KERNELS, pytest.param("simulate_tpu", marks=pytest.mark.slow)])
def test_tokens_do_not_depend_on_who_computes(backend):
    """Greedy and sampled requests in one batch, all streams, drafts kept and rejected."""
    expected, accepted = _answers("xla")
    assert accepted > 0 and _answers(backend) == (expected, accepted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("options", [{"head": "rnn"}, {"head": "gated"}, {"top_p": 0.8}, {"draft_vocab_size": 6}], ids=str)
def test_nor_do_they_with_other_heads_filters_and_draft_vocabularies(backend, options):
    assert _answers(backend, **options) == _answers("xla", **options)


def test_block_verification_has_no_kernels():
    plan = DecodePlan(ToyTarget(4), DSparkDrafter(DSparkConfig(**BLOCK)), FixedLength(1), RawSurvival(), verifier="block")
    with pytest.raises(ValueError, match="backend is 'interpret' with verifier 'block'; allowed are auto and xla"):
        dataclasses.replace(plan, backend="interpret")
