# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kernel lab: drawing and judging drafts
#
# **What you will learn**
#
# - how a token is drawn from a large vocabulary with few random numbers, exactly: the two-level draw;
# - what `markov_sample` and `rejection_sample` save against the formulations one would write down first, measured on this device;
# - that the Pallas kernels for TPUs and NVIDIA GPUs give the tokens of plain JAX, in an interpreter and on any machine;
# - what these kernels become for a device that is not here.
#
# `pallas_kernels` needs jax alone. On a CPU plain JAX computes; on a TPU, or a GPU of compute capability 8.0 or more, the kernels do.
# Everything that runs here is in float32. About a minute on two CPU cores.

# %%
import os
import shutil
import subprocess
import sys

REPOSITORY = "set the address of the repository here"  # read on Colab alone, where nothing is installed yet
SCALE = os.environ.get("DSPARK_NOTEBOOK_SCALE", "normal")  # "tiny" has the sizes of the tests: a small vocabulary, few draws

if "google.colab" in sys.modules:
    if not os.path.isdir("dspark"):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "dspark"], check=True)
    package = "dspark[plots,cuda]" if shutil.which("nvidia-smi") else "dspark[plots]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--editable", package], check=True)
    sys.path.insert(0, "dspark")

# %%
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from pallas_kernels import plain
from pallas_kernels.arg_specs import Spec, markov_arguments
from pallas_kernels.bench import judged_by, markov_floor, medians, rejection_floor
from pallas_kernels.dispatch import AheadOfTime, choose
from pallas_kernels.markov_sample import markov_block
from pallas_kernels.noise import Stream, round_key
from pallas_kernels.parity import check
from pallas_kernels.rejection_sample import rejection_sample
from pallas_kernels.two_level_draw import TILE_SIZE, draw, log_sum_exp, tiles_of

TINY = SCALE == "tiny"
console = Console(width=110)
print(jax.devices()[0].device_kind, "| auto means:", choose("auto").kernels)

# %% [markdown]
# ## The two-level draw
#
# The usual way to draw from softmax of some logits *l* is to add a Gumbel variable to each and take the largest: one random number per id.
# The two-level draw cuts the vocabulary into tiles, picks a tile *K* by one Gumbel variable on each tile's log-sum-exp, and then an id
# inside that tile. The probabilities multiply to the same softmax:
#
# $$\frac{\sum_{j \in K} e^{l_j}}{\sum_j e^{l_j}} \cdot \frac{e^{l_i}}{\sum_{j \in K} e^{l_j}} = \frac{e^{l_i}}{\sum_j e^{l_j}}.$$
#
# Here 24 ids in tiles of 6.

# %%
V, S = 24, 6
DRAWS = 4_000 if TINY else 100_000
logits = 1.5 * jax.random.normal(jax.random.key(0), (1, V), jnp.float32)
softmax = np.asarray(jax.nn.softmax(logits[0]))

by_tile = log_sum_exp(tiles_of(logits, S))  # [1, 4]
tile = np.asarray(jax.nn.softmax(by_tile[0]))
inside = np.asarray(jax.nn.softmax(tiles_of(logits, S)[0], axis=1))
print("largest difference of tile x inside from softmax:", np.abs((tile[:, None] * inside).reshape(-1) - softmax).max())

rows = jnp.arange(DRAWS, dtype=jnp.int32)
key = round_key(0, rows, jnp.zeros(DRAWS, jnp.int32))  # as of many requests: each has random bits of its own
nothing = jnp.full(DRAWS, -jnp.inf), jnp.ones(DRAWS)  # no entry is filtered out; temperature 1
drawn = jax.jit(functools.partial(draw, tile_stream=Stream.DRAFT_TILE, id_stream=Stream.DRAFT_ID, tile_size=S))(
    jnp.broadcast_to(logits, (DRAWS, V)), *nothing, key, jnp.zeros(DRAWS, jnp.int32)
)
share = np.bincount(np.asarray(drawn.ids), minlength=V) / DRAWS
error = 3 * np.sqrt(softmax * (1 - softmax) / DRAWS)

figure, axes = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
axes.bar(range(V), share, color=[f"C{number // S}" for number in range(V)], label=f"share of {DRAWS} draws (one colour per tile)")
axes.errorbar(range(V), softmax, yerr=error, fmt="k_", markersize=12, label="softmax, three standard errors")
axes.set(xlabel="id", ylabel="probability")
axes.legend()
pyplot.show()
print(f"{int((np.abs(share - softmax) > error).sum())} of {V} ids lie more than three standard errors off")

# %% [markdown]
# With tiles of 1,024 ids, the draw from a real vocabulary makes far fewer random numbers. The log-sum-exp of all logits comes along, which
# the verifier needs for *log q*. And tiles can be walked one after another, as the kernels do: nothing of the size of the vocabulary
# is written.

# %%
for model, ids in (("SmolLM2", 49_152), ("Qwen3", 151_936), ("Gemma 4", 262_144)):
    numbers = -(-ids // TILE_SIZE) + TILE_SIZE
    print(f"{model}: {ids:,} ids, {numbers:,} random numbers a draw, {ids / numbers:.0f} times fewer")

# %% [markdown]
# ## Plain JAX against the usual formulation
#
# - `markov_block` draws a block left to right from *U_k* + *W1*[*x*] *W2*, *x* being the token drawn before. The usual formulation draws
#   by Gumbel-max over all ids.
# - `rejection_sample` judges the drafts of all requests. The usual formulation makes probabilities *p* and *q* and a residual for every
#   position, and draws from each; ours reads each row of target logits once, and forms one residual per request.
#
# Both sides in turn, medians. The floor is what must be read in any case: each operand once. Temporary memory is what the compiled program
# sets aside beside its arguments and results.

# %%
spec = Spec(vocab_size=49_152, num_rows=4, block_size=7, rank=64, dtype="float32")
spec = spec.scaled_down() if TINY else spec
arguments = jax.jit(markov_arguments, static_argnums=0)(spec)
judged, draft, floor = judged_by(spec, arguments, "auto")
usual = (judged.target_logits, draft.logits, judged.ids, judged.lengths, judged.key, judged.temperature)

pairs = {
    "markov_block": (
        (jax.jit(markov_block), tuple(arguments)),
        (jax.jit(plain.markov_block), tuple(arguments)),
        markov_floor(spec),
    ),
    "rejection_sample": (
        (jax.jit(lambda judged, draft: rejection_sample(*judged, draft=draft)), (judged, draft)),
        (jax.jit(plain.rejection_sample), usual),
        rejection_floor(spec),
    ),
}


def temporary(function, given) -> str:
    """Megabytes of temporary memory of a compiled function, where the backend says."""
    analysis = function.lower(*given).compile().memory_analysis()
    return "" if analysis is None else f"{analysis.temp_size_in_bytes / 1e6:.1f}"


table = Table("op", "ours, ms", "usual, ms", "times faster", "floor, MB", "ours sets aside, MB", "usual, MB", title=spec.name)
times = {}
for name, (ours, theirs, bound) in pairs.items():
    times[name] = medians([functools.partial(function, *given) for function, given in (ours, theirs)], 0.2 if TINY else 3.0)
    fast, slow = times[name]
    memory = f"{bound.bytes / 1e6:.1f}", temporary(*ours), temporary(*theirs)
    table.add_row(name, f"{fast * 1e3:.2f}", f"{slow * 1e3:.2f}", f"{slow / fast:.1f}", *memory)
console.print(table)

figure, axes = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
for place, label in enumerate(("ours", "usual formulation")):
    axes.barh(np.arange(len(times)) + 0.2 - 0.4 * place, [each[place] * 1e3 for each in times.values()], height=0.4, label=label)
axes.set(xlabel="time of one call (milliseconds)", ylabel="op", yticks=range(len(times)), yticklabels=list(times))
axes.legend()
pyplot.show()

# %% [markdown]
# ## The kernels, in an interpreter
#
# All backends make their random bits in the same way, from the seed, the request, its round and the place, so a kernel must give the *same
# tokens* as plain JAX, except where a draw is won by less than 1e-4 and the order of a sum decides. Pallas can interpret its kernels on
# any machine. `check` runs both ops both ways and raises where a token differs that was no near tie.

# %%
small = Spec(vocab_size=2 * TILE_SIZE + 77, num_rows=3, block_size=2, rank=16, dtype="float32")
for backend in ("interpret",) if TINY else ("interpret", "interpret_triton"):
    blocks, verdicts = check(small, backend)
    whose = {"interpret": "TPU kernels", "interpret_triton": "GPU kernels"}[backend]
    print(f"{whose}: {blocks.compared} draws and {verdicts.compared} verdicts compared, {blocks.near_ties + verdicts.near_ties} near ties")

# %% [markdown]
# ## The kernels, for a device that is not here
#
# `AheadOfTime` names kernels that are to be lowered and not to be run. What comes out is the program that the device's compiler gets: our
# kernel is one custom call in it, with the whole kernel as its argument.

# %%
lowered = Spec(vocab_size=151_936, num_rows=8, block_size=7, rank=256, dtype="bfloat16")
abstract = jax.eval_shape(functools.partial(markov_arguments, lowered))
for kernels, platform in (("mosaic_tpu", "tpu"), ("triton", "cuda")):
    traced = jax.jit(functools.partial(markov_block, backend=AheadOfTime(kernels))).trace(*abstract)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = ", ".join(sorted(set(re.findall(r"custom_call @(\w+)", text))))
    print(f"{platform}: {len(text.splitlines())} lines of StableHLO, {len(text) / 1e3:.0f} kB; custom calls: {calls}")

# %% [markdown]
# The kernels are held to plain JAX and compiled for TPU v5e, v5p, v6e and an H200; they have not been timed on any of them yet.
# `python -m pallas_kernels.bench` measures on the device at hand, `bash experiments/gpu_check.sh` runs the whole check on a GPU, and
# `experiments/results/kernels.md` has floors and figures.
