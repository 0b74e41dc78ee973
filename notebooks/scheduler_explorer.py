# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scheduler explorer: how many drafts to verify, at which load
#
# **What you will learn**
#
# - why a draft is worth checking at one load and not at another, with the whole calculation: survival against the price of one more token;
# - what Algorithm 1, forecast stop, and capacity with top-K choose for the same requests, and how far each is from the best in hindsight;
# - how thresholds, verified lengths and throughput move with the number of requests, and where it is better not to draft at all.
#
# No model runs here. Survival comes from recorded rounds of the released drafter on SmolLM2, or is made up from the acceptance that the
# paper reports for Qwen3-8B; costs are measured (CPU), predicted by a compiler (TPU v5e) or by formula (H200). With `ipywidgets` the
# load moves with a slider; without, a grid of loads is drawn. A minute and a half on two CPU cores.

# %%
import os
import shutil
import subprocess
import sys

REPOSITORY = "set the address of the repository here"  # read on Colab alone, where nothing is installed yet
SCALE = os.environ.get("DSPARK_NOTEBOOK_SCALE", "normal")  # "tiny" has the sizes of the tests: two loads, few rounds, one device

if "google.colab" in sys.modules:
    if not os.path.isdir("dspark"):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "dspark"], check=True)
    package = "dspark[plots,cuda]" if shutil.which("nvidia-smi") else "dspark[plots]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--editable", package], check=True)
    sys.path.insert(0, "dspark")

# %%
import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from dspark_jax.calibrate import RawSurvival, survival_from_dict
from dspark_jax.schedule import CapacityTopK, ForecastStop, best_prefix, select_prefix
from dspark_jax.weights import RELEASED_DRAFTERS, SURVIVAL_FILE
from experiments.made_up_acceptance import conditional_acceptance, make_up, paper_setting
from experiments.measure_curves import FOLDER
from experiments.model_presets import qwen3_8b
from experiments.recorded_rounds import RECORDED, load_recorded
from experiments.replay import CurveArrays, table_of
from experiments.roofline_curves import H200, dspark_costs, roofline_family
from experiments.step_curves import load_curves

TINY = SCALE == "tiny"
console = Console(width=110)

# %% [markdown]
# ## Survival: what a draft is worth
#
# Draft *k* of a block gives a token only if it and all drafts before it are accepted. The chance of that is its survival *a_k*, known (as
# a calibrated prediction) before the draft is verified. Expected tokens of a round: one of each request for certain, plus the sum of the
# survivals of what is verified. Blocks differ a lot, and that is what a schedule lives from.

# %%
stored = json.loads((RELEASED_DRAFTERS["smollm2_dspark"] / SURVIVAL_FILE).read_text())
calibrated = survival_from_dict({name: value for name, value in stored.items() if name != "continuation"})
acceptances = {"SmolLM2, temperature 1 (recorded)": (load_recorded(RECORDED, 1), calibrated)}
if not TINY:
    acceptances["SmolLM2, temperature 0 (recorded)"] = (load_recorded(RECORDED, 0), calibrated)
    acceptances["Qwen3-8B, temperature 1 (made up from the paper's Table 1)"] = (make_up(paper_setting(7)), RawSurvival())
G = 7


@functools.cache
def survivals(acceptance: str) -> np.ndarray:
    """Survival of every block there is, [blocks, G]."""
    blocks, model = acceptances[acceptance]
    table = table_of(blocks, model, temperature=0.0 if "temperature 0" in acceptance else 1.0)
    there = np.arange(table.survival.shape[1]) < np.asarray(table.anchors)[:, None]
    return np.asarray(table.survival)[there]


figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
for name in acceptances:
    low, middle, high = np.quantile(survivals(name), [0.1, 0.5, 0.9], axis=0)
    (line,) = axes.plot(range(1, G + 1), middle, "o-", label=name)
    axes.fill_between(range(1, G + 1), low, high, color=line.get_color(), alpha=0.15)
axes.set(xlabel="position of the draft in its block", ylabel="survival: median, 10 to 90 % of blocks", ylim=(0, 1))
axes.legend(fontsize="small")
pyplot.show()

# %% [markdown]
# ## Cost: what a draft is worth it against
#
# A round on *N* tokens takes *s(N)* seconds (drafting included) and gives *T* expected tokens. One more, of survival *a*, pays exactly if
#
# $$\frac{T + a}{s(N + 1)} > \frac{T}{s(N)} \quad\Longleftrightarrow\quad a > T\,\frac{s(N + 1) - s(N)}{s(N)}.$$
#
# The right-hand side is the **threshold**: tokens of the round, times what one more token costs as a share of the round. Where the
# device waits for its weights, more tokens cost nothing and everything should be verified; where it computes all the time, a token
# costs its full share and only drafts that nearly surely survive are worth it. More requests (*R*) move a device from one to the other.

# %%
devices = {"2 CPU cores, SmolLM2 (measured)": load_curves(FOLDER / "cpu.json")}
if not TINY:
    devices["TPU v5e, SmolLM2 (predicted)"] = load_curves(FOLDER / "tpu_v5e.json")
    family = roofline_family(H200, qwen3_8b(), dspark_costs(qwen3_8b(), G))
    devices["H200, Qwen3-8B (by formula)"] = {costs.rows: costs for costs in family.curves}
LOADS = (1, 64) if TINY else (1, 8, 64, 512)

figure, panels = pyplot.subplots(1, len(devices), figsize=(4.2 * len(devices), 3.4), layout="constrained", squeeze=False)
for axes, (name, curves) in zip(panels[0], devices.items(), strict=True):
    for rows in LOADS:
        curve = curves[rows].curve
        cost = np.array([curve.seconds(tokens) for tokens in curve.tokens])
        axes.plot(np.array(curve.tokens) / rows, cost / cost[0], "o-", markersize=3, label=f"R = {rows}")
    axes.set(xlabel="tokens per request (anchor included)", ylabel="time of a round / of the smallest", title=name)
    axes.legend(fontsize="small")
pyplot.show()

# %% [markdown]
# ## Policies at one load
#
# Programs are compiled for some numbers of tokens alone, the buckets, and a round runs in the smallest one that holds it: its cost is a
# staircase, and throughput has teeth. All drafts of all requests are ranked by survival, and a policy takes a beginning of the ranking:
#
# - **Algorithm 1** goes on while throughput rises, and stops at the first draft that lowers it. Stopping there is what keeps it exact:
#   it never looks at the confidence of a draft behind the one it decides on.
# - **Forecast stop** goes from bucket to bucket of the cost curve, and judges going on by what usually follows. It gets over steps
#   at which Algorithm 1 stops.
# - **Capacity and top-K** settles the number of tokens from rounds two steps back, and fills it with the best of the current drafts.
# - **Best in hindsight** looks at all confidences. It is not exact, and only a bound here.


# %%
@functools.partial(jax.jit, static_argnames=("continuation", "constants"))
def choices(curve: CurveArrays, survival, context, continuation, constants):
    """Lengths [T, R] that each policy chooses for T rounds of R requests with the survival [T, R, G]."""
    rows = survival.shape[1]
    active, ids = jnp.ones(rows, bool), jnp.arange(rows, dtype=jnp.int32)
    contexts = jnp.full(rows, context, jnp.int32)
    rates = curve.rates(rows * (G + 1), context.astype(jnp.float32))
    forecast, capacity = ForecastStop(curve, continuation), CapacityTopK(curve, constants)  # pyright: ignore[reportArgumentType]

    def one(state, each):
        by_capacity, state = capacity.next_lengths(state, each, active, contexts, ids)
        found = {
            "Algorithm 1": select_prefix(each, active, rates, ids),
            "forecast stop": forecast.lengths(each, active, contexts, ids),
            "capacity and top-K": by_capacity,
            "best in hindsight": best_prefix(each, active, rates, ids),
        }
        return state, found

    return jax.lax.scan(one, capacity.init_state(rows, G), survival)[1]


@functools.cache
def usual(acceptance: str) -> tuple[float, ...]:
    """Usual chance of each draft given those before it, from the record."""
    return tuple(round(each, 3) for each in conditional_acceptance(acceptances[acceptance][0]))


@functools.cache
def seconds_of(device: str, rows: int, context: int) -> tuple[np.ndarray, float]:
    """Seconds of a round on 0, 1, ... tokens, and of plain decoding, which has no drafter to keep informed."""
    costs = devices[device][rows]
    plain = costs.undrafted.seconds(rows, context) - costs.undrafted.draft_seconds
    return 1 / costs.curve.steps_per_second(rows * (G + 1), context), plain


def rounds_at(device: str, acceptance: str, rows: int, context: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Sampled survival [T, R, G], and the lengths [T, R] that every policy chooses."""
    blocks, curve, continuation = survivals(acceptance), devices[device][rows].curve, usual(acceptance)
    num_rounds = max(4, (64 if TINY else 512) // rows)
    survival = blocks[np.random.default_rng(0).integers(0, len(blocks), (num_rounds, rows))]
    arrays, constants = CurveArrays.of(curve, curve.ladder), tuple(np.cumprod(continuation).tolist())
    found = choices(arrays, jnp.asarray(survival), jnp.int32(context), continuation, constants)
    return survival, {name: np.asarray(lengths) for name, lengths in found.items()}


def outcome(seconds: np.ndarray, survival: np.ndarray, lengths: np.ndarray) -> tuple[float, float, float]:
    """Expected tokens per second, mean verified drafts per request, and the lowest survival that was still verified (1 if none was)."""
    rows, verified = lengths.shape[1], np.arange(G) < lengths[:, :, None]
    tokens = rows + (survival * verified).sum(axis=(1, 2))
    lowest = np.where(verified, survival, 1.0).min(axis=(1, 2))
    return float(tokens.sum() / seconds[rows + lengths.sum(axis=1)].sum()), float(lengths.mean()), float(lowest.mean())


def show(device: str, acceptance: str, rows: int, context: int = 256) -> None:
    """One load: throughput along the ranking with what each policy chooses, and the lengths that come of it."""
    survival, found = rounds_at(device, acceptance, rows, context)
    seconds, plain = seconds_of(device, rows, context)
    ranked = -np.sort(-survival[0].reshape(-1))
    throughput = (rows + np.concatenate([[0.0], np.cumsum(ranked)])) / seconds[rows:]
    without = rows / plain
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    left.plot(np.arange(len(throughput)) / rows, throughput / without, color="black", linewidth=1)
    left.axhline(1.0, color="grey", linestyle="--", label="plain decoding")
    for number, (name, lengths) in enumerate(found.items()):
        used = int(lengths[0].sum())
        left.plot(used / rows, throughput[used] / without, "o", markersize=12 - 2 * number, fillstyle="none", label=name)
        _, mean, threshold = outcome(seconds, survival, lengths)
        counts = np.bincount(lengths.reshape(-1), minlength=G + 1) / lengths.size
        right.plot(range(G + 1), counts, "o-", markersize=4, label=f"{name}: mean {mean:.2f}, threshold {threshold:.2f}")
    left.set(xlabel="drafts verified per request, best first", ylabel="throughput / plain decoding", title=f"one round, R = {rows}")
    right.set(xlabel="drafts verified of a request", ylabel="share of requests", title=f"{len(survival)} rounds", ylim=(0, None))
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    figure.suptitle(f"{device}; {acceptance}; {context} committed tokens", fontsize="small")
    pyplot.show()


if importlib.util.find_spec("ipywidgets") and "ipykernel" in sys.modules:
    import ipywidgets  # pyright: ignore[reportMissingImports] (extra `notebooks`)

    ipywidgets.interact(
        show,
        device=list(devices),
        acceptance=list(acceptances),
        rows=ipywidgets.SelectionSlider(options=sorted(devices[next(iter(devices))]), value=8, description="requests"),
        context=ipywidgets.SelectionSlider(options=(128, 256, 512, 1024), value=256, description="context"),
    )
else:
    for rows in LOADS:
        show(next(iter(devices)), next(iter(acceptances)), rows)

# %% [markdown]
# ## Moving the load
#
# For every number of requests: the survival at which verification ends, the drafts that are verified, and tokens per second. Fixed
# lengths verify the same number for everybody. Where even the best choice lies below plain decoding (1 on the right), the drafter should
# not run; that is what `DraftPlanner` decides before each round.

# %%
CONTEXT = 256
SHOWN = ("Algorithm 1", "forecast stop", "capacity and top-K", "best in hindsight")


def sweep(device: str, acceptance: str, loads: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Per policy [loads, 3]: throughput relative to plain decoding, mean length, threshold."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for rows in loads:
        survival, chosen = rounds_at(device, acceptance, rows, CONTEXT)
        seconds, plain = seconds_of(device, rows, CONTEXT)
        for name, lengths in (chosen | {f"always {length}": np.full(survival.shape[:2], length) for length in (2, G)}).items():
            rate, mean, threshold = outcome(seconds, survival, lengths)
            found.setdefault(name, []).append((rate * plain / rows, mean, threshold))
    return {name: np.array(values) for name, values in found.items()}


loads = LOADS if TINY else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
for device in devices:
    acceptance = list(acceptances)[-1 if "Qwen3" in device else 0]
    swept = sweep(device, acceptance, loads)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    for name, values in swept.items():
        if name in SHOWN:
            left.plot(loads, values[:, 2], "o-", markersize=3)
            middle.plot(loads, values[:, 1], "o-", markersize=3)
        right.plot(loads, values[:, 0], "o-" if name in SHOWN else ":", markersize=3, label=name)
    right.axhline(1.0, color="grey", linestyle="--", label="plain decoding")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests that decode together")
    left.set(ylabel="lowest survival verified", ylim=(0, 1.05))
    middle.set(ylabel="drafts verified per request", ylim=(0, G))
    right.set(ylabel="throughput / plain decoding")
    right.legend(fontsize="x-small")
    figure.suptitle(f"{device}; {acceptance}", fontsize="small")
    pyplot.show()
    table = Table("policy", *(f"R = {rows}" for rows in LOADS), title=f"throughput / plain decoding: {device}")
    for name, values in swept.items():
        table.add_row(name, *(f"{values[loads.index(rows), 0]:.2f}" for rows in LOADS))
    console.print(table)

# %% [markdown]
# Expected tokens here take the calibrated survival at its word, and rounds are drawn independently of each other, so that what capacity
# remembers of a single request is of no help. `python -m experiments.schedule_regret` replays whole answers with their real outcomes
# instead, `python -m experiments.serving_load` measures on a running engine, and `python -m experiments.measure_curves --name NAME` takes
# the cost curve of your machine.
