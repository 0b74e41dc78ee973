"""The demo: a real instruct model answers prompts, plainly and with a drafter, and the two are compared.

    python -m experiments.demo                       # three minutes at most on 2 cores; writes out/demo.json and out/demo.png
    python -m experiments.demo --prompt "Why is the sky blue?" --temperature 1

Plain decoding runs in the dtype and padding that a short measurement finds fastest. The speculative side drafts a block every
round and verifies as many drafts as confidence and the measured cost of a round say. Both are timed round by round with the same
loop, on the same prompts, without printing; compilation and prefill are not part of tokens per second.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.text import Text

from dspark_jax.decode import DecodeState, RoundStats
from dspark_jax.tokenizers import Tokenizer
from experiments.demo_report import Answered, check_line, report_json, rich_table, write_picture
from experiments.demo_rounds import Kind, first_difference, record, round_kinds
from experiments.demo_setup import DemoOptions, Job, Prepared, jobs_of, prefilled, prepare, stage, warm_up
from experiments.profile_steps import device_text
from experiments.result_files import write_json

STYLES = {Kind.FIRST: "dim", Kind.ACCEPTED: "green", Kind.CORRECTION: "bold underline red", Kind.BONUS: "bold cyan"}
MARKS = {Kind.FIRST: "{}", Kind.ACCEPTED: "{}", Kind.CORRECTION: "\u2039{}\u203a", Kind.BONUS: "\u00ab{}\u00bb"}
"""Where there are no colours."""


class Streamer:
    """Shows the tokens of one answer as they come, each in the colour of its kind."""

    def __init__(self, console: Console, tokenizer: Tokenizer, first_id: int) -> None:
        self._console = console
        self._stream = tokenizer.stream(skip_special=True)
        self._push(first_id, Kind.FIRST)

    def __call__(self, stats: RoundStats) -> None:
        """Show a round."""
        for token, kind in round_kinds(stats):
            self._push(token, kind)

    def close(self) -> None:
        """End the text."""
        self._console.print(Text(self._stream.rest, style="dim"))

    def _push(self, token: int, kind: Kind) -> None:
        self._stream, piece = self._stream.push([token])
        if piece:
            self._console.print(styled(piece, kind, self._console), end="", soft_wrap=True)


def styled(piece: str, kind: Kind, console: Console) -> Text:
    """A piece of text in the style of its kind, or in its marks where the console has no colours."""
    return Text(piece, style=STYLES[kind]) if console.color_system else Text(MARKS[kind].format(piece))


def answer(
    job: Job,
    prompt: Sequence[int],
    prepared: Prepared,
    fresh: Callable[[], tuple[DecodeState, DecodeState]],
    console: Console,
) -> Answered:
    """Answer a prompt plainly, then speculatively while the text streams."""
    plain_state, state = fresh()
    plain = record(prepared.plain, prepared.plain_params, plain_state)
    console.print(Text(f"\n[{job.domain}, temperature {job.temperature:g}] {' '.join(job.text.split())}", style="bold"), soft_wrap=True)
    streamer = Streamer(console, prepared.tokenizer, plain.ids[0])
    speculative = record(prepared.speculative, prepared.params, state, streamer)
    streamer.close()
    difference = None
    if job.temperature == 0:
        target = prepared.speculative.target
        difference = first_difference(target, prepared.params, prompt, plain.ids, speculative.ids, prepared.max_len)
    answered = Answered(job.domain, job.temperature, plain, speculative, difference)
    rates = [each.decoded / sum(each.seconds) if each.seconds else 0.0 for each in (plain, speculative)]
    rounds = len(speculative.rounds)
    console.print(
        f"  {len(speculative.ids)} tokens in {rounds} rounds; {rates[0]:.1f} tokens/s plain, {rates[1]:.1f} speculative"
        + (f"; parts from plain decoding at token {difference.position}" if difference else ""),
        style="dim",
        highlight=False,
    )
    return answered


def run(options: DemoOptions, console: Console, began: float | None = None) -> dict[str, Any]:
    """The whole demo; returns what `demo.json` holds.

    Args:
      began: `time.monotonic()` at the start of the program, from which `time_limit` counts.

    Raises:
      ValueError: for bad input; see `prepare`.
    """
    began = time.monotonic() if began is None else began
    console.print(device_text(), style="bold", highlight=False)
    return compare(options, prepare(options, jobs_of(options), console), console, began)


def compare(options: DemoOptions, prepared: Prepared, console: Console, began: float) -> dict[str, Any]:
    """Answer the prompts in both ways and report."""
    jobs, ladder = prepared.jobs, prepared.speculative.buckets(1)
    states = prefilled(prepared, options)
    with stage(console, "compiling the prefill, and running it on the prompts"):
        fresh = next(states)
    sizes = ", ".join(map(str, ladder))
    with stage(console, f"compiling plain decoding ({prepared.plain_choice.tokens} token) and rounds of {sizes} tokens"):
        warm_up(prepared, fresh)
    setup = time.monotonic() - began
    for note in prepared.notes:
        console.print(f"  {note}", style="yellow")
    legend = Text("  ").append_text(Text(" | ").join(styled(kind.value, kind, console) for kind in Kind))
    console.print(legend, soft_wrap=True)

    answered: list[Answered] = []
    longest = 0.0
    for index, job in enumerate(jobs):
        if index:
            fresh = next(states)
        begin = time.monotonic()
        if answered and begin - began + longest > options.time_limit:
            console.print(f"  {len(jobs) - index} prompts are left out: the time limit of {options.time_limit:g} s is near", style="yellow")
            break
        answered.append(answer(job, prepared.prompts[index], prepared, fresh, console))
        longest = max(longest, time.monotonic() - begin)

    report = report_json(
        answered,
        prepared.profile,
        ladder,
        prepared.speculative.block_size,
        device=device_text(),
        dtype=prepared.plain_choice.dtype,
        target=options.target,
        max_new_tokens=options.budget,
        plain={"tokens": prepared.plain_choice.tokens, "measured_seconds": prepared.plain_choice.seconds},
        continuation=prepared.continuation,
        prompts_left_out=len(jobs) - len(answered),
        setup_seconds=setup,
        total_seconds=time.monotonic() - began,
    )
    console.print()
    console.print(rich_table(report))
    show_times(report, console)
    console.print(check_line(report), style="bold green" if report["greedy_identical"] is not False else "bold red", highlight=False)
    write_json(options.out / "demo.json", report)
    picture = write_picture(report, options.out)
    console.print(f"written: {options.out / 'demo.json'} and {picture}; {time.monotonic() - began:.0f} s in all", style="dim")
    return report


def show_times(report: dict[str, Any], console: Console) -> None:
    """Where the time goes, in two lines."""
    times = report["time"]
    target = ", ".join(f"{milliseconds:.1f} on {bucket}" for bucket, milliseconds in times["target_ms"].items())
    rounds = ", ".join(
        f"{times['round_ms'][bucket]:.1f} on {bucket} ({count} rounds)" for bucket, count in times["rounds"].items() if count
    )
    console.print(f"measured at the start, ms: draft {times['draft_ms']:.1f}; target {target} tokens", style="dim", highlight=False)
    plain = times["plain_step_ms"] or 0.0
    console.print(f"timed, median ms: plain step {plain:.1f}; whole round {rounds} tokens", style="dim", highlight=False)


def main() -> int:
    """Read the command line and run; bad input ends with a line that says what is wrong."""
    began = time.monotonic()
    # A file or a pipe has no width of its own; the table needs more than the 80 columns that rich assumes there.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        options = tyro.cli(DemoOptions)
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", str((options.out / ".jax_cache").resolve()))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        run(options, console, began)
    except (ValueError, ImportError) as error:
        console.print(Text(str(error), style="bold red"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
