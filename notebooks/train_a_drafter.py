# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a drafter, calibrate it, and decode with it
#
# **What you will learn**
#
# - how a drafter is trained on texts that its target wrote, and which numbers to watch;
# - what the sequential head is for: without it acceptance falls along the block, with it hardly;
# - how its confidence is calibrated, and what a schedule does with it;
# - that the decoded text has the target's own law, whatever the drafter.
#
# The target is so small that everything about it is known in closed form: what follows depends on the last token alone, by a table.
# So the best possible drafter is known as well. Everything is in float32, which a CPU and a GPU without bfloat16 want
# (`TrainConfig.compute_dtype` is `"bfloat16"` elsewhere). A minute and a half on two CPU cores; no download.

# %%
import os
import shutil
import subprocess
import sys

REPOSITORY = "set the address of the repository here"  # read on Colab alone, where nothing is installed yet
SCALE = os.environ.get("DSPARK_NOTEBOOK_SCALE", "normal")  # "tiny" has the sizes of the tests: so few steps that little is learned

if "google.colab" in sys.modules:
    if not os.path.isdir("dspark"):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "dspark"], check=True)
    package = "dspark[plots,cuda]" if shutil.which("nvidia-smi") else "dspark[plots]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--editable", package], check=True)
    sys.path.insert(0, "dspark")

# %%
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from dspark_jax.batches import TokenBatch
from dspark_jax.calibrate import RawSurvival, TemperatureScaled, prefix_confidence
from dspark_jax.calibration_fit import GRID, fit_sequential_temperatures
from dspark_jax.calibration_metrics import METRICS, reliability, score
from dspark_jax.decode import DecodeParams, DecodePlan, generate
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.evaluate import WalkRule, confidence_rounds, read_texts
from dspark_jax.losses import DraftLossConfig
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength, SurvivalThreshold
from dspark_jax.targets.toy import ToyTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step

STEPS, TEXTS, LENGTH = (12, 32, 24) if SCALE == "tiny" else (400, 256, 64)
console = Console(width=110)

# %% [markdown]
# ## The target and its texts
#
# A table of logits, one row per last token. Some rows leave little choice and some leave much. Its texts are sampled at temperature 1 with
# the decoding loop itself: a plan without a drafter is plain decoding.

# %%
VOCAB, MASK = 32, 31  # the last id stands in the empty places of a block; no text has it
target = ToyTarget(VOCAB)
rng = np.random.default_rng(0)
logits = rng.normal(size=(VOCAB, VOCAB)) * rng.uniform(0.5, 4.0, size=(VOCAB, 1))
logits[:, MASK] = -30.0
target_params = {"table": jnp.asarray([logits, logits], jnp.float32)}  # it could differ for even and odd positions; here it does not

plain = DecodePlan(target)


def written(seed: int) -> np.ndarray:
    """Texts [TEXTS, LENGTH] that the target wrote behind a first token drawn at random."""
    prompts = [[int(token)] for token in np.random.default_rng(seed).integers(0, MASK, TEXTS)]
    params = DecodeParams.of(target, target_params)
    state = start(plain, params, prompts, max_new_tokens=LENGTH - 1, sampling=Sampling.make(TEXTS, 1.0), seed=seed)
    return np.asarray(generate(plain, params, state)[0].ids)


training, held_out = written(1), written(2)
loss_mask = np.broadcast_to(np.arange(LENGTH) >= 1, training.shape)  # everything but the prompt was written by the target
print("a text:", " ".join(map(str, training[0])))

# %% [markdown]
# ## Two drafters
#
# Both draft five tokens from one pass of the same small backbone, and both have a confidence head. `DSpark` also has a sequential head,
# which adds a bias to the logits of each token that depends on the token drawn before it (a product of two thin matrices of rank 4).
# The other one draws its five tokens independently of each other.

# %%
G = 5
config = DSparkConfig(
    vocab_size=VOCAB,
    hidden_size=VOCAB,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_layers=1,
    block_size=G,
    mask_token_id=MASK,
    taps=(-1,),
    num_target_layers=1,
    markov_rank=4,
)
drafters = {
    "DSpark": DSparkDrafter(config),
    "without a sequential head": DSparkDrafter(dataclasses.replace(config, markov_rank=0, confidence_with_markov=False)),
}
for name, drafter in drafters.items():
    parameters = sum(leaf.size for leaf in jax.tree.leaves(drafter.abstract_params()))
    print(f"{name}: {parameters} parameters")

# %% [markdown]
# ## Train
#
# A step draws anchors at random in every text, lets the drafter predict the block behind each, and compares with what the target
# says there: 0.1 cross-entropy with the text + 0.9 L1 distance to the target's distribution + 1.0 binary cross-entropy of the
# confidence, positions weighted by exp(-k / 4). The target runs inside the step; nothing is stored.

# %%
training_config = TrainConfig(
    optimizer=OptimizerConfig(total_steps=STEPS, learning_rate=0.01),
    loss=DraftLossConfig(ce=0.1, l1=0.9, confidence=1.0),
    num_anchors=8,
    compute_dtype="float32",
)
trained, curves = {}, {}
for name, drafter in drafters.items():
    state = init_train_state(jax.random.key(0), jax.jit(drafter.init)(jax.random.key(1)), training_config.optimizer)
    metrics = []
    for number in range(STEPS):
        rows = np.random.default_rng(number).choice(TEXTS, 32, replace=False)
        batch = jnp.asarray(training[rows]), jnp.asarray(loss_mask[rows])
        state, found = train_step(target, drafter, training_config, state, target_params, *batch)
        metrics.append(found)
    trained[name], curves[name] = state.params, jax.device_get(metrics)
    print(f"{name}: estimated accepted length {np.mean([each['accepted_length'] for each in curves[name][-20:]]):.2f}")

# %% [markdown]
# `accepted_length` is the estimate of tokens per round at temperature 1. `accept_rate` has one number per position of the block: the
# chance 1 - TV that a draft is accepted given that those before it were. The grey line is what exact knowledge of the target gives
# a drafter that draws all tokens at once: even from the true distribution of the third token, given the anchor alone, the third draft
# seldom fits the second. That is the gap which the sequential head closes. (Drafters stay below the line at first, because so small a
# backbone does not learn the whole table, and may end a little above it: the marginals are not what is accepted most.)

# %%
P = np.exp(logits - logits.max(axis=1, keepdims=True))
P /= P.sum(axis=1, keepdims=True)
share = np.linalg.matrix_power(P, 200)[0]  # how often each token is the anchor
at_once, previous = [], np.eye(VOCAB)
for _ in range(G):
    following = previous @ P  # of token k, given the anchor
    overlap = np.minimum(P[None], following[:, None]).sum(axis=2)  # 1 - TV, by anchor and by the token before
    at_once.append(float(share @ (previous * overlap).sum(axis=1)))
    previous = following

figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for name, metrics in curves.items():
    left.plot(range(1, STEPS + 1), [each["accepted_length"] for each in metrics], label=name)
    rates = np.mean([each["accept_rate"] for each in metrics[-20:]], axis=0)
    right.plot(range(1, G + 1), rates, "o-", label=name)
right.plot(range(1, G + 1), at_once, color="grey", linestyle="--", label="all at once, from exact marginals")
left.set(xlabel="optimizer step", ylabel="accepted length (tokens per round)", ylim=(1, G + 1))
right.set(xlabel="position of the draft in its block", ylabel="accept rate 1 - TV", ylim=(0, 1), xticks=range(1, G + 1))
left.legend()
right.legend()
pyplot.show()

# %% [markdown]
# ## Calibrate
#
# On texts that were not trained on, walk the rounds that decoding would have made, and note for each draft its confidence and whether it
# and all before it were accepted. Sequential temperature scaling divides each confidence logit by a temperature of its position, fitted
# from left to right so that the products, the survivals, are right: on one half of the texts here, and judged on the other. ECE and
# Brier score are errors of the predicted survival, 0 is best; AUC says how well it ranks, 1 is best and 0.5 is chance. Here the raw
# confidence is about right as it is, and two thousand rounds cannot tell the two apart; `experiments/results/calibration` has a real case.

# %%
drafter, params = drafters["DSpark"], trained["DSpark"]


def rounds_of(texts: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Confidence logits and prefix labels of the rounds along texts, [K, G] each."""
    batch = TokenBatch(texts, np.array(loss_mask[: len(texts)]), np.arange(len(texts)))
    readings = read_texts(target, drafter, target_params, params, [batch], sites_at_once=len(texts) * G * 8)
    confidence, labels, _ = confidence_rounds(readings, WalkRule(temperature=1, draft_length=G))
    return jnp.asarray(confidence), jnp.asarray(labels)


half = TEXTS // 2
confidence, labels = rounds_of(held_out[:half])
temperatures, _ = fit_sequential_temperatures(confidence, labels, jnp.asarray(GRID, jnp.float32))
survival_model = TemperatureScaled(tuple(round(float(each), 2) for each in temperatures))
print(f"temperatures {survival_model.temperatures}, from {len(labels)} rounds")

confidence, labels = rounds_of(held_out[half:])
predicted = jnp.stack([prefix_confidence(confidence), prefix_confidence(confidence / temperatures)])
table = Table("metric", "model", *(f"draft {k + 1}" for k in range(G)), title=f"{len(labels)} rounds of other texts")
for metric, by_model in zip(METRICS, np.asarray(score(predicted, labels)), strict=True):
    for name, values in zip(("raw", "calibrated"), by_model, strict=True):
        table.add_row(metric, name, *(f"{value:.3f}" for value in values))
console.print(table)

figure, axes = pyplot.subplots(figsize=(4.2, 4), layout="constrained")
axes.plot([0, 1], [0, 1], color="grey", linestyle="--")
for name, each in zip(("raw", "calibrated"), predicted, strict=True):
    diagram = reliability(each, labels)
    enough = diagram.rounds[2] >= 30  # of fewer rounds a share says little
    axes.plot(diagram.predicted[2][enough], diagram.observed[2][enough], "o-", label=name)
axes.set(xlabel="predicted survival of draft 3 (share of rounds)", ylabel="observed survival of draft 3 (share of rounds)")
axes.legend()
pyplot.show()

# %% [markdown]
# ## Decode
#
# The same prompts with four plans, at temperature 1. `SurvivalThreshold(0.5)` verifies the drafts whose survival is at least one half, so
# that fewer tokens are checked in vain. What a checked token costs, and so which threshold is right, is the subject of the
# notebook `scheduler_explorer`.

# %%
plans = {
    "plain": (plain, None),
    "without a sequential head, all verified": (
        DecodePlan(target, drafters["without a sequential head"], FixedLength(G), RawSurvival()),
        trained["without a sequential head"],
    ),
    "DSpark, all verified": (DecodePlan(target, drafter, FixedLength(G), survival_model), params),
    "DSpark, survival at least 0.5": (DecodePlan(target, drafter, SurvivalThreshold(0.5), survival_model), params),
}
table = Table("plan", "accepted length", "drafts verified per round", "tokens checked per token written")
texts = {}
for name, (plan, own) in plans.items():
    everything = DecodeParams.of(target, target_params, own)
    prompts = [[int(text[0])] for text in held_out]
    state = start(plan, everything, prompts, max_new_tokens=LENGTH - 1, sampling=Sampling.make(TEXTS, 1.0), seed=3)
    state, tally = generate(plan, everything, state)
    texts[name] = np.asarray(state.ids)
    verified, rounds = int(tally.verified.sum()), int((tally.rounds + tally.cut_rounds).sum())
    checked = (verified + rounds) / int((tally.emitted + tally.cut_emitted).sum())
    accepted_length = int(tally.emitted.sum()) / int(tally.rounds.sum())  # rounds that the budget cut short are left out
    table.add_row(name, f"{accepted_length:.2f}", f"{verified / rounds:.2f}", f"{checked:.2f}")
console.print(table)

# %% [markdown]
# ## The same law
#
# What the four plans wrote behind the most frequent token, against the target's own table. The texts differ, because their random numbers
# do; the law does not. (`dspark_jax.exactness` proves it by enumeration; counts can only fail to refute it.)

# %%
token = int(np.bincount(held_out.reshape(-1), minlength=VOCAB).argmax())
likely = np.argsort(-P[token])[:10]
figure, axes = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
axes.bar(np.arange(10) - 0.4, P[token, likely], width=0.16, color="grey", label="the target's table")
for number, (name, text) in enumerate(texts.items()):
    following = text[:, 1:][text[:, :-1] == token]
    counts = np.bincount(following, minlength=VOCAB) / len(following)
    axes.bar(np.arange(10) - 0.24 + 0.16 * number, counts[likely], width=0.16, label=f"{name} ({len(following)} times)")
    print(f"{name}: total variation distance to the table {0.5 * np.abs(counts - P[token]).sum():.3f} of {len(following)} draws")
axes.set(xlabel=f"token behind token {token}", ylabel="share", xticks=range(10), xticklabels=map(str, likely))
axes.legend(fontsize="small")
pyplot.show()

# %% [markdown]
# ## With a real target
#
# The same steps, with checkpoints, held-out texts and several devices, from a shell; the README says more:
#
# ```
# python -m experiments.run texts                                                   # SmolLM2 answers prompts
# python -m experiments.run train smollm2_dspark --data out/smollm2_texts/texts.npz # a GPU: minutes; a CPU: add --stop-step 33
# ```
