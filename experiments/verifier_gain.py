"""What judging a block jointly gains over judging its drafts one by one, on answers that the target and its drafter write themselves.

    python -m experiments.verifier_gain                # about 5 minutes on 2 cores, experiments/results/verifier_gain/

Every round is measured before it is run: the chance that at least k drafts are kept follows from p and q along the drafts up to k,
for both verifiers, and its sum over k is what a round accepts in the mean, at every verified length. Both are thus compared on the
same block behind the same text, and nothing of the luck of acceptance is in the figures. Held-out prompts are answered twice, once
with each verifier, because a verifier also decides where the next round begins; the rounds of both answers are pooled. The drafts
that the real rounds accept are counted as well: their mean has to lie within its error of the expectation.

Verified lengths below the block size are those of the same rounds: the block's first drafts alone. Rounds that end in a stop token
are counted in full. Intervals (95 %) are bootstrapped over prompts.
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dspark_jax.block_verify import joint_weights
from dspark_jax.data import DOMAINS, TokenSequences, load_token_sequences
from dspark_jax.decode import VERIFIERS, DecodeParams, DecodePlan, DecodeState, step
from dspark_jax.model_files import require
from dspark_jax.prefill import start
from dspark_jax.protocols import flatten_rounds
from dspark_jax.sampling import Sampling, logit_floor
from dspark_jax.schedule import FixedLength
from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.typing import Array, Float
from dspark_jax.weights import load_drafter, load_target
from experiments.command_line import run_command
from experiments.profile_steps import RELEASED_DRAFTER, describe_device
from experiments.release_readings import CARD_POOL, cell_rows
from experiments.result_files import save_figure, write_csv, write_json
from pallas_kernels.rejection_sample import accept_prob
from pallas_kernels.two_level_draw import log_normaliser, log_prob_of

RESAMPLES = 2000
EVERYTHING = "all"
MAX_STANDARD_ERRORS = 3.0
"""Real rounds agree with the expectation when they are no further from it."""


@dataclasses.dataclass(frozen=True)
class GainOptions:
    """Command line.

    Attributes:
      texts: answered texts, of which the held-out prompts are taken.
      out: folder of the CSV file, the JSON file and the plot.
      temperatures: each is measured for itself.
      prompts_per_domain: prompts of each of the three domains.
      rounds: of each answer, its first ones.
      greedy_rounds: rounds at temperature 0, where both verifiers must agree exactly.
    """

    target: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    texts: Path = Path("../shared/smollm2/smollm2_onpolicy_0.npz")
    out: Path = Path("experiments/results/verifier_gain")
    temperatures: tuple[float, ...] = (1.0, 0.6)
    prompts_per_domain: int = 8
    rounds: int = 20
    greedy_rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < temperature < float("inf") for temperature in self.temperatures):
            raise ValueError(f"temperatures is {self.temperatures}; allowed are finite positive numbers (0 is `greedy_rounds`)")
        if not 2 <= self.prompts_per_domain <= CARD_POOL:
            raise ValueError(f"prompts_per_domain is {self.prompts_per_domain}; allowed are 2 to {CARD_POOL}")
        for name in ("rounds", "greedy_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Walk:
    """The rounds of all prompts under one verifier: K rounds, R prompts.

    Attributes:
      active: [K, R]; the prompt's answer had not ended before the round.
      expected: [K, R, G] by verifier: accepted drafts to be expected of the drafted block, at verified lengths 1..G.
      accepted: [K, R], what the round really accepted, all G drafts verified.
    """

    active: np.ndarray
    expected: Mapping[str, np.ndarray]
    accepted: np.ndarray

    def sums(self, verifier: str) -> np.ndarray:
        """[R, G], over the rounds of each prompt."""
        return np.where(self.active[..., None], self.expected[verifier], 0.0).sum(axis=0)

    @property
    def rounds(self) -> np.ndarray:
        """[R]"""
        return self.active.sum(axis=0)


@functools.partial(jax.jit, static_argnums=0)
def expected_accepted(plan: DecodePlan, params: DecodeParams, state: DecodeState) -> dict[str, Float[Array, "R G"]]:
    """Accepted drafts to be expected of the coming round, by verifier, at verified lengths 1..G.

    Draft k and all before it are kept with the product of min(1, p / q) token by token, and with w_k jointly: both from the drafts
    up to k alone, so that on every block the joint sum is at least as large.
    """
    if plan.drafter is None:
        raise ValueError("drafter is None; a plan with one is needed")
    num_rows, block_size = state.length.shape[0], plan.block_size
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    anchor = state.ids[rows, state.length - 1]
    noise = state.noise
    block = plan.drafter.propose(params.drafter, params.draft_head, state.drafter_state, anchor, noise, state.sampling)
    whole = jnp.full((num_rows,), block_size, jnp.int32)
    tokens, _ = flatten_rounds(anchor, block.ids, state.length - 1, whole, jnp.ones((num_rows,), bool), num_rows * (block_size + 1))
    hidden, _, _ = plan.target.forward(params.target, state.target_cache, tokens, ())
    logits, sampling = params.head.logits(hidden), state.sampling.take(tokens.row)
    floor = logit_floor(logits, sampling)
    normaliser = log_normaliser(logits, floor, sampling.temperature)
    # The last row of each request gives the bonus token and judges nothing.
    judged = jnp.concatenate([block.ids, anchor[:, None]], axis=1).reshape(-1)
    log_p = log_prob_of(logits, judged, floor, sampling.temperature, normaliser).reshape(num_rows, block_size + 1)[:, :-1]
    by_token = jnp.cumprod(accept_prob(log_p, block.log_q), axis=1)
    by_block = joint_weights(log_p - block.log_q)[:, 1:]
    return {"token": jnp.cumsum(by_token, axis=1), "block": jnp.cumsum(by_block, axis=1)}


def walk(
    plan: DecodePlan,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    num_rounds: int,
    *,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    max_len: int | None = None,
    progress: Progress | None = None,
) -> Walk:
    """The first `num_rounds` rounds of the answers to `prompts`, each measured and then run as the plan says.

    Args:
      plan: verifies whole blocks (`FixedLength(G)`).
      max_len: positions of the caches; the longest prompt with room for the rounds where absent.
    """
    # Room for whole blocks throughout: no round is shortened by the budget.
    budget = (num_rounds + 1) * (plan.block_size + 1)
    sampling = Sampling.make(len(prompts), temperature)
    # One program prefills and measures for both verifiers.
    common = dataclasses.replace(plan, verifier="token")
    state = start(common, params, prompts, max_new_tokens=budget, sampling=sampling, stop_ids=stop_ids, seed=seed, max_len=max_len)
    task = None if progress is None else progress.add_task(f"temperature {temperature:g}, verified by {plan.verifier}", total=num_rounds)
    expected, active, accepted = [], [], []
    for _ in range(num_rounds):
        expected.append(jax.device_get(expected_accepted(common, params, state)))
        state, stats = step(plan, params, state)
        active.append(np.asarray(stats.active))
        accepted.append(np.asarray(stats.num_accepted))
        if progress is not None and task is not None:
            progress.advance(task)
    by_verifier = {name: np.stack([each[name] for each in expected]).astype(np.float64) for name in VERIFIERS}
    return Walk(np.stack(active), by_verifier, np.stack(accepted))


def gain_rows(walks: Sequence[Walk], prompts: np.ndarray, seed: int = 0) -> list[dict[str, Any]]:
    """For verified lengths 1..G the accepted lengths of both verifiers and their ratio, over the rounds of some prompts in all walks.

    Args:
      prompts: their indices; the intervals come from drawing as many of them anew, all walks of a prompt together.
    """
    rounds = np.sum([each.rounds[prompts] for each in walks], axis=0)
    emitted = {name: rounds[:, None] + np.sum([each.sums(name)[prompts] for each in walks], axis=0) for name in VERIFIERS}
    drawn = np.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))

    def figures(chosen: np.ndarray) -> dict[str, np.ndarray]:
        lengths = {name: emitted[name][chosen].sum(axis=-2) / rounds[chosen].sum(axis=-1)[..., None] for name in VERIFIERS}
        return {**lengths, "ratio": lengths["block"] / lengths["token"]}

    measured = figures(np.arange(len(prompts)))
    low, high = ({name: np.percentile(each, at, axis=0) for name, each in figures(drawn).items()} for at in (2.5, 97.5))
    return [
        {
            "verified": place + 1,
            **{
                name + suffix: round(float(of[name][place]), 4)
                for name in measured
                for suffix, of in (("", measured), ("_low", low), ("_high", high))
            },
            "rounds": int(rounds.sum()),
            "prompts": len(prompts),
        }
        for place in range(emitted["token"].shape[1])
    ]


def agreement(taken: Walk, verifier: str) -> dict[str, Any]:
    """The accepted length of the real rounds of a walk beside the expectation of the verifier that ran them.

    What a round accepts beyond the expectation has mean 0 whatever came before it: the standard error of the mean difference is that
    of independent rounds.
    """
    expected = taken.expected[verifier][..., -1][taken.active]
    difference = taken.accepted[taken.active] - expected
    error = float(np.sqrt(np.sum(difference**2)) / len(difference))
    mean = float(difference.mean())
    return {
        "rounds": len(difference),
        "accepted_length": 1 + float(taken.accepted[taken.active].mean()),
        "expected": 1 + float(expected.mean()),
        "standard_error": error,
        "agrees": bool(abs(mean) <= MAX_STANDARD_ERRORS * error),
    }


def heldout_prompts(sequences: TokenSequences, per_domain: int) -> tuple[list[list[int]], np.ndarray]:
    """Prompts of all domains, spread evenly over the held-out ones, and the domain of each."""
    prompts, domains = [], []
    for domain, name in enumerate(DOMAINS):
        rows = cell_rows(sequences, domain, 1)[:per_domain]
        if len(rows) < per_domain:
            raise ValueError(f"prompts_per_domain is {per_domain}; the texts have {len(rows)} held-out ones of {name} at temperature 1")
        prompts += [sequences.tokens[sequences.offsets[row] :][: sequences.answer_start[row]].tolist() for row in rows]
        domains += [domain] * per_domain
    return prompts, np.asarray(domains)


def plot_gain(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accepted length of both verifiers and the gain, by verified length; a column of panels per temperature."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = require("matplotlib.figure", "plots", "the plot").Figure(figsize=(5.2 * len(temperatures), 7.2), layout="constrained")
    for (above, below), temperature in zip(figure.subplots(2, len(temperatures), squeeze=False).T, temperatures, strict=True):
        for place, (colour, domain) in enumerate(zip(("C0", "C1", "C2", "black"), (*DOMAINS, EVERYTHING), strict=True)):
            cell = [row for row in rows if row["temperature"] == temperature and row["domain"] == domain]
            verified = [row["verified"] for row in cell]
            above.plot(verified, [row["block"] for row in cell], "o-", color=colour, markersize=3, label=domain)
            above.plot(verified, [row["token"] for row in cell], ":", color=colour)
            gain, low, high = (100 * (np.asarray([row[f"ratio{suffix}"] for row in cell]) - 1) for suffix in ("", "_low", "_high"))
            beside = np.asarray(verified) + 0.06 * (place - 1.5)
            below.errorbar(beside, gain, (gain - low, high - gain), color=colour, marker="o", markersize=3, capsize=2)
        above.set(title=f"temperature {temperature:g}", xlabel="verified drafts", ylabel="tokens per round")
        above.legend(title="line: by block, dots: by token", fontsize=8, title_fontsize=8)
        below.axhline(0, color="grey", linewidth=0.5)
        below.set(xlabel="verified drafts", ylabel="gain in accepted length, % (95 %)")
    save_figure(figure, path)


def measure(options: GainOptions, console: Console) -> dict[str, Any]:
    """Answer, compare, and write the files.

    Raises:
      ValueError: models or texts that are missing or do not fit each other.
      RuntimeError: the verifiers differ at temperature 0.
    """
    target, target_params = load_target(options.target)
    loaded = load_drafter(options.drafter, target.spec)
    prompts, domains = heldout_prompts(load_token_sequences(options.texts, target.spec.vocab_size), options.prompts_per_domain)
    block_size = loaded.drafter.block_size
    params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
    token = DecodePlan(target, loaded.drafter, FixedLength(block_size), loaded.survival_model())
    plans = {"token": token, "block": dataclasses.replace(token, verifier="block")}
    max_len = max(map(len, prompts)) + (max(options.rounds, options.greedy_rounds) + 1) * (block_size + 1)
    groups = {**{name: np.flatnonzero(domains == domain) for domain, name in enumerate(DOMAINS)}, EVERYTHING: np.arange(len(domains))}
    rows, checks = [], []
    with Progress(console=console) as progress:
        settings: dict[str, Any] = {
            "stop_ids": load_tokenizer(options.target).stop_ids,
            "seed": options.seed,
            "max_len": max_len,
            "progress": progress,
        }
        greedy = walk(token, params, prompts, 0.0, options.greedy_rounds, **settings)
        if not np.array_equal(greedy.expected["token"], greedy.expected["block"]):
            raise RuntimeError("the verifiers differ at temperature 0, where both keep the drafts that argmax would have written")
        for temperature in options.temperatures:
            walks = {name: walk(plan, params, prompts, temperature, options.rounds, **settings) for name, plan in plans.items()}
            checks += [{"temperature": temperature, "verifier": name, **agreement(each, name)} for name, each in walks.items()]
            for domain, chosen in groups.items():
                found = gain_rows(list(walks.values()), chosen, options.seed)
                rows += [{"temperature": temperature, "domain": domain, **row} for row in found]
    show(rows, checks, block_size, console)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "device": describe_device(),
        "target": options.target,
        "drafter": options.drafter.name,
        "prompts_per_domain": options.prompts_per_domain,
        "rounds_per_answer": options.rounds,
        "seed": options.seed,
        "whole_blocks": [row for row in rows if row["verified"] == block_size],
        "real_rounds": checks,
        "greedy": {
            "rounds": int(greedy.rounds.sum()),
            "accepted_length": 1 + float(greedy.expected["token"][..., -1][greedy.active].mean()),
        },
    }
    write_csv(options.out / "verifier_gain.csv", rows)
    write_json(options.out / "verifier_gain.json", content)
    plot_gain(rows, options.out / "verifier_gain.png")
    return content


def show(rows: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]], block_size: int, console: Console) -> None:
    """Whole blocks and the check, as tables."""
    table = Table(
        "temperature", "domain", "by token", "by block", "ratio", "95 %", title=f"accepted length, all {block_size} drafts verified"
    )
    for row in rows:
        if row["verified"] == block_size:
            interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
            figures = (f"{row[name]:.3f}" for name in ("token", "block", "ratio"))
            table.add_row(f"{row['temperature']:g}", row["domain"], *figures, interval)
    console.print(table)
    table = Table("temperature", "verified by", "real", "expected", "standard error", "agrees", title="accepted length of the real rounds")
    for check in checks:
        figures = (f"{check[name]:.3f}" for name in ("accepted_length", "expected", "standard_error"))
        table.add_row(f"{check['temperature']:g}", check["verifier"], *figures, "yes" if check["agrees"] else "[bold red]no")
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_command(GainOptions, measure))
