"""The engine on a target whose layers keep rings of keys: batches change their rows and slots, and every request keeps its text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.targets.gemma_layers import FULL, GEMMA3_STYLE, SLIDING, AttentionKind, GemmaConfig
from tests.tiny_models import random_params

SLOTS = (16, 40)
DRAFTER = DSparkDrafter(DSparkConfig(31, 16, 24, 4, 2, 8, 30, (0,), 2, num_layers=1, block_size=3, markov_rank=4))


@pytest.mark.slow
@pytest.mark.parametrize("window", [6, 14])
def test_rings_move_along_where_the_batch_changes_its_shape(window):
    """[B2] [C2] Rings shorter than either cache; and as long as the small one, shorter than the large one. Texts run round them twice."""
    kinds: dict[str, Any] = {"full": AttentionKind(2, 8, 1e6), "sliding": AttentionKind(2, 8, 1e4, window=window)}
    target = GemmaTarget(GemmaConfig(31, 16, 24, num_heads=4, layer_types=(SLIDING, FULL), style=GEMMA3_STYLE, **kinds))
    small = [jax.tree.map(lambda leaf: leaf * jnp.float32(0.3), random_params(model, seed)) for seed, model in enumerate((target, DRAFTER))]
    params = DecodeParams.of(target, *small)
    config = EngineConfig(row_ladder=(1, 3), slot_ladder=SLOTS, prefill_chunk=4, shrink_after=1, seed=3)
    policy, survival = FixedLength(3), RawSurvival()
    engine = Engine(target, DRAFTER, params, policy=policy, survival=survival, ladder=lambda rows: (4 * rows,), config=config)
    rng = np.random.default_rng(0)
    asked = []
    # Short ones alone, then all sizes together, then a short one that outlives them and goes back to the small shape.
    for size, budget, steps in ((3, 12, 2), (5, 34, 3), (2, 10, 0), (9, 30, 2), (1, 14, 40), (4, 12, 3), (12, 4, 0)):
        prompt = rng.integers(0, 31, size).tolist()
        handle = engine.submit(prompt, max_new_tokens=budget, temperature=4.0 * (size % 2))
        asked.append((prompt, budget, size % 2, handle))
        for _ in range(steps):
            engine.step()
    plan = DecodePlan(target, DRAFTER, policy, survival)
    for prompt, budget, warm, handle in asked:
        sampling = Sampling.make(1, 4.0 * warm)
        settings = {"sampling": sampling, "seed": 3, "request_ids": [handle.request_id], "max_len": SLOTS[-1], "prefill_chunk": 4}
        alone = answers(generate(plan, params, start(plan, params, [prompt], max_new_tokens=budget, **settings))[0])[0]
        assert list(handle.result().ids) == alone
    shapes = [(record.rows, record.slots) for record in engine.metrics.latest]
    assert {(1, 16), (3, 40)} <= set(shapes) and shapes.index((3, 40)) < len(shapes) - 1 - shapes[::-1].index((1, 16))
    rings = {cache.shape[2] for cache in jax.tree.leaves(dataclasses.asdict(engine._executor._state)) if cache.ndim == 4}  # pyright: ignore
    assert min(window + 4, SLOTS[0]) in rings
