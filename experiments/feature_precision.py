"""What it costs in accepted length to store features in fewer bits.

    python -m experiments.feature_precision      # results/feature_precision.json; some 10 minutes of one core

The released drafter of SmolLM2, on its training texts. Two questions, both answered on held-out texts, at drawn anchors:

 - reading: the drafter as it is, with features that went through a dtype, or held against a target whose hidden states did;
 - training: the drafter trained a little further from caches in each dtype, with the same texts, anchors and seeds, and then judged on
   exact features. Steps are few and small for the sake of a CPU, so what is looked at is the difference from the float32 run of the same
   seed, which none of the noise that both share is in.
"""

import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.batches import TokenBatch, TokenBatches
from dspark_jax.data import TokenSequences, load_token_sequences
from dspark_jax.feature_cache import FeatureCache
from dspark_jax.feature_samples import anchored_batch, features_of
from dspark_jax.feature_writer import CacheConfig, stored, write_feature_cache
from dspark_jax.losses import DraftLossConfig, LossTerms, draft_loss
from dspark_jax.protocols import TargetHead, TrainBatch
from dspark_jax.train import OptimizerConfig, TrainConfig, TrainState, init_train_state, train_step_on_features
from dspark_jax.typing import Array, Params
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.command_line import run_command
from experiments.held_out import held_out_batches, held_out_texts, spread
from experiments.presets import SMOLLM2_TEXTS
from experiments.result_files import write_json
from experiments.stored_features import features_origin

RESULTS = Path(__file__).resolve().parent / "results" / "feature_precision.json"
MIN_ANSWER = 14
"""Answer tokens that a text has within the length it is cut to."""

Storage = tuple[str, str]
"""Dtypes of the features and of the last hidden states."""

EXACT: Storage = ("float32", "float32")
HALF, QUARTER = "bfloat16", "float8_e4m3fn"
READINGS: tuple[Storage, ...] = ((HALF, "float32"), (QUARTER, "float32"), ("float32", HALF), ("float32", QUARTER))
TRAININGS: tuple[Storage, ...] = (EXACT, (HALF, HALF), (QUARTER, HALF), (QUARTER, QUARTER))
GROUP = 2
"""Held-out texts in a group, between which differences vary."""


@dataclasses.dataclass(frozen=True)
class PrecisionOptions:
    """What is compared, and on how much.

    Attributes:
      data: .npz files of answered texts, held-out ones of both temperatures among them.
      target: folder, GGUF file or name of the target.
      drafter: folder or name of the drafter.
      texts: that are trained on.
      held_out: texts that are judged on, one half of each temperature.
      held_out_anchors: blocks drawn in each of them.
      length: tokens that texts are cut to.
      steps: of each training.
      batch_size: texts a step.
      num_anchors: blocks drawn in each text of a step.
      learning_rate: at the end of the warm-up.
      seeds: of anchors and order of the texts; one training each, from every cache.
      work: folder of the caches, which are kept.
      out: file of the results.
    """

    data: tuple[Path, ...] = SMOLLM2_TEXTS
    target: str = "smollm2"
    drafter: str = "smollm2_dspark"
    texts: int = 64
    held_out: int = 32
    held_out_anchors: int = 32
    length: int = 256
    steps: int = 40
    batch_size: int = 4
    num_anchors: int = 8
    learning_rate: float = 1e-4
    seeds: tuple[int, ...] = (0, 1)
    work: Path = Path("out/feature_precision")
    out: Path = RESULTS

    def __post_init__(self) -> None:
        if self.held_out < 4 * GROUP:
            raise ValueError(f"held_out is {self.held_out}; allowed: at least {4 * GROUP}, two groups of each temperature")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}; allowed: one or more, each once")

    @property
    def config(self) -> TrainConfig:
        """Of the training step."""
        optimizer = OptimizerConfig(self.steps, learning_rate=self.learning_rate, warmup_ratio=0.1)
        return TrainConfig(optimizer, DraftLossConfig(chunk=1024), self.num_anchors)


# Rounding is a program of its own: in one with what reads the numbers, XLA may leave out that they were narrow for a while.
_narrow = jax.jit(stored, static_argnums=(0, 2))


def through(values: Array, taps: int, dtype: str) -> Array:
    """Hidden states [B, S, taps x D] as they come back, in float32, from a cache that stores them in `dtype`."""
    said = _narrow("x", values.reshape(*values.shape[:2], taps, -1), dtype)
    whole = said["x"].astype(jnp.float32)
    return (whole * said["x_scale"][..., None] if "x_scale" in said else whole).reshape(values.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTexts:
    """Texts and the float32 cache of their features."""

    texts: TokenSequences
    cache: FeatureCache

    def batch(self, batch: TokenBatch, storage: Storage, rng: Any, num_anchors: int) -> TrainBatch:
        """A batch with features and hidden states that went through `storage`, anchors drawn."""
        exact = anchored_batch(features_of(self.cache.read_texts(batch.rows), batch), rng, num_anchors)
        features = through(exact.features, len(self.cache.origin.taps), storage[0])
        return dataclasses.replace(exact, features=features, last_hidden=through(exact.last_hidden, 1, storage[1]))


@functools.partial(jax.jit, static_argnums=0)
def _terms(drafter: Any, params: Params, head: TargetHead, batch: TrainBatch, draft_ids: Any) -> LossTerms:
    return draft_loss(drafter, params, head.restrict(draft_ids), head, batch, DraftLossConfig(chunk=1024))[1]


def accepted(
    given: LoadedDrafter, params: Params, head: TargetHead, held_out: StoredTexts, storage: Storage, anchors: int, greedy: bool
) -> np.ndarray:
    """Accepted tokens and blocks of every group of held-out texts, [groups, 2]; anchors are the same for all drafters and dtypes."""
    groups = []
    for number, batch in enumerate(held_out_batches(held_out.texts, held_out.cache.manifest.max_length, GROUP)):
        rows = held_out.batch(batch, storage, jax.random.fold_in(jax.random.key(0), number), anchors)
        terms = _terms(given.drafter, params, head, rows, given.draft_ids)
        length = terms.greedy_accepted_length if greedy else terms.accepted_length
        groups.append((float(length), float(terms.blocks)))
    return np.asarray(groups)


def compared(have: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Accepted length, its difference from another reading of the same groups, and that difference's standard error over the groups."""
    length, other = (float(groups[:, 0].sum() / groups[:, 1].sum()) for groups in (have, exact))
    differences = (have[:, 0] - exact[:, 0]) / exact[:, 1]
    error = float(np.std(differences, ddof=1) / np.sqrt(len(differences)))
    return {"accepted_length": round(length, 4), "difference": round(length - other, 5), "standard_error": round(error, 5)}


def trained(given: LoadedDrafter, head: TargetHead, texts: StoredTexts, storage: Storage, options: PrecisionOptions, seed: int) -> Params:
    """Parameters after training from features that were stored so."""
    state: TrainState = init_train_state(jax.random.key(seed), given.params, options.config.optimizer)
    stream = TokenBatches(texts.texts, options.batch_size, (options.length,), seed, min_loss_tokens=MIN_ANSWER).stream()
    for _ in range(options.steps):
        rows = texts.batch(next(stream)[0], storage, jax.random.fold_in(state.rng, state.step), options.num_anchors)
        state, _ = train_step_on_features(given.drafter, options.config, state, head, rows, given.draft_ids)
    return state.params


def _distance(one: Params, other: Params) -> float:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return float(np.sqrt(sum(float(jnp.sum(jnp.square(a - b))) for a, b in leaves)))


def _stored_texts(options: PrecisionOptions, target: Any, target_params: Params, taps: tuple[int, ...], console: Console) -> Any:
    texts = load_token_sequences(options.data, target.spec.vocab_size)
    texts = texts.select(np.minimum(texts.answer_end, options.length) - texts.answer_start.astype(np.int64) >= MIN_ANSWER)
    chosen = {"training": spread(texts.select(texts.heldout == 0), options.texts)} | held_out_texts(texts, options.held_out)
    origin = features_origin(options.target, target, target_params, taps)
    config = CacheConfig((options.length,), batch_size=4, min_loss_tokens=MIN_ANSWER, features_dtype="float32", hidden_dtype="float32")
    for name, part in chosen.items():
        write_feature_cache(options.work / name, target, target_params, origin, part, config, console=console)
    return {name: StoredTexts(part, FeatureCache.open(options.work / name, origin, part)) for name, part in chosen.items()}


def measure(options: PrecisionOptions, console: Console) -> dict[str, Any]:
    """Both parts; the file is written after each training."""
    target, target_params = load_target(options.target)
    given = load_drafter(options.drafter, target.spec)
    texts = _stored_texts(options, target, target_params, tuple(given.drafter.taps), console)
    training, kinds, head = texts.pop("training"), list(texts), target.head(target_params)

    def judge(params: Params, storage: Storage = EXACT) -> dict[str, np.ndarray]:
        return {kind: accepted(given, params, head, texts[kind], storage, options.held_out_anchors, kind == "greedy") for kind in kinds}

    def against(have: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, Any]:
        return {kind: compared(have[kind], exact[kind]) for kind in kinds}

    def keep(part: str, storage: Storage, row: dict[str, Any]) -> None:
        content[part].append(_named(storage) | row)
        said = ", ".join(f"{kind} {row[kind]['accepted_length']:.3f} ({row[kind]['difference']:+.4f})" for kind in kinds)
        console.print(f"{part}: features {storage[0]}, hidden {storage[1]}: {said}", highlight=False)
        write_json(options.out, content)

    left_out = ("data", "work", "out")
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name not in left_out}
    counts = {name: int(part.texts.lengths.clip(max=options.length).sum()) for name, part in {"training": training, **texts}.items()}
    content: dict[str, Any] = {"options": fields, "data": [path.name for path in options.data], "tokens": counts}
    content |= {"reading": [], "training": []}
    exact = judge(given.params)
    keep("reading", EXACT, against(exact, exact))
    for storage in READINGS:
        keep("reading", storage, against(judge(given.params, storage), exact))
    for seed in options.seeds:
        reference, want = given.params, exact
        for storage in TRAININGS:
            params = trained(given, head, training, storage, options, seed)
            found = judge(params)
            if storage == EXACT:
                reference, want = params, found
            changed = _distance(params, reference) / _distance(reference, given.params)
            row = {"seed": seed, "share_of_update_changed": round(changed, 4), "gain": against(found, exact)}
            keep("training", storage, row | against(found, want))
    content["over_seeds"] = [_named(storage) | _over_seeds(content["training"], storage, kinds) for storage in TRAININGS]
    write_json(options.out, content)
    return content


def _named(storage: Storage) -> dict[str, str]:
    return dict(zip(("features", "hidden"), storage, strict=True))


def _over_seeds(rows: list[dict[str, Any]], storage: Storage, kinds: list[str]) -> dict[str, Any]:
    """Accepted length and its difference from float32: the mean of the seeds, and how far apart they are."""
    own = [row for row in rows if (row["features"], row["hidden"]) == storage]
    summary = {}
    for kind in kinds:
        for name in ("accepted_length", "difference"):
            values = [row[kind][name] for row in own]
            summary[f"{kind}_{name}"] = {"mean": round(statistics.mean(values), 5), "range": round(max(values) - min(values), 5)}
    return summary


if __name__ == "__main__":
    sys.exit(run_command(PrecisionOptions, measure))
