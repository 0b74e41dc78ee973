"""Accepted length over the paper's benchmark sets, for any list of drafters, at temperature 0 and 1: the layout of its Table 1.

    python -m experiments.benchmark --prompts ../shared/prompts --drafters DSpark=smollm2_dspark OURS=out/run/drafter

Every (drafter, set, temperature) is appended to `cells.jsonl` of the folder `--out` when it is done, and passed over when the same command
runs again; `--shard i/n` gives each of several machines its part of them, and `python -m experiments.benchmark_report` puts the files
together. Behind that, a few prompts are timed with a single request: plain decoding and every drafter in one run.

Drafters are compared on the same prompts: the ratio of two accepted lengths has an interval over prompts that both answered.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.weights import load_drafter, load_target
from experiments.benchmark_decode import BenchmarkCell, Contender, DecodeSettings, encoder, labelled, mesh_of
from experiments.benchmark_records import CELLS, DRAFTERS_FILE, SPEED_FILE, Measured, cells_files
from experiments.benchmark_report import print_report, speed_table
from experiments.benchmark_sets import ChosenSet, choose_sets
from experiments.benchmark_speed import SpeedSettings, Timing, timed_prompts
from experiments.command_line import run_command
from experiments.drafter_costs import proposal_work
from experiments.profile_steps import device_text
from experiments.record_lines import append_record, key_of, read_records
from experiments.sweep import commit_id, parse_shard

COST_CONTEXT = 512
"""Committed tokens behind which a proposal's work is counted."""


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """Command line.

    Attributes:
      prompts: folder of JSONL files, a prompt with `turns` on each line; the name of a file is the name of its set.
      sets: names of files, all where empty; or data sets "tfds:FOLDER", "tfds:NAME:SPLIT:FIELD", "hf:NAME[:CONFIG]:SPLIT:FIELD".
      drafters: folders or names; "LABEL=FOLDER" gives one another name in the tables.
      target: name, folder or GGUF file.
      temperatures: of the target and the drafters.
      prompts_per_set: at even distances over the set; None: all.
      mesh: devices along data x fsdp x tensor; None: one device.
      decode: answer the prompts; without it they are only timed, and nothing but speeds is printed.
      shard: "i/n": of the cells only number i, i + n, ... (from 0), and their own file; the first shard times.
      out: folder of what is measured.
    """

    prompts: Path = Path("../shared/prompts")
    sets: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ("smollm2_dspark",)
    target: str = "smollm2"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts_per_set: int | None = None
    decoding: Annotated[DecodeSettings, tyro.conf.OmitArgPrefixes] = DecodeSettings()
    speed: Annotated[SpeedSettings, tyro.conf.OmitArgPrefixes] = SpeedSettings()
    decode: bool = True
    mesh: tuple[int, int, int] | None = None
    shard: str = "0/1"
    out: Path = Path("out/benchmark")

    def __post_init__(self) -> None:
        labelled(self.drafters)
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures is {self.temperatures}; allowed: at least one, none below 0")
        if self.prompts_per_set is not None and self.prompts_per_set < 1:
            raise ValueError(f"prompts_per_set is {self.prompts_per_set}; allowed are positive integers, or None for all")
        parse_shard(self.shard)

    @property
    def cells_file(self) -> Path:
        """Where this shard's cells go."""
        number, count = parse_shard(self.shard)
        return self.out / (f"{CELLS}.jsonl" if count == 1 else f"{CELLS}-{number}-of-{count}.jsonl")


def cell_settings(cell: BenchmarkCell, target: str) -> dict[str, Any]:
    """Everything that the tokens of a cell depend on, and so its figures."""
    decoding = dataclasses.asdict(cell.settings)
    # The same tokens come out of any batch.
    del decoding["batch_size"]
    return {
        "target": target,
        "drafter": cell.contender.fingerprint,
        "label": cell.contender.label,
        "set": cell.chosen.name,
        "prompts": key_of({"ids": [list(prompt) for prompt in cell.chosen.prompts], "turns": [*map(_said, cell.chosen.conversations)]}),
        "temperature": cell.temperature,
        "decoding": decoding,
    }


def _said(conversation: Any) -> list[str]:
    return [message.content for message in conversation.messages]


def measure_cell(cell: BenchmarkCell, target: str, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Decode a cell: the record that is kept of it."""
    settings = cell_settings(cell, target)
    begin = time.monotonic()
    records = cell.decode(advance)
    return {
        "key": key_of(settings),
        "drafter": cell.contender.label,
        "set": cell.chosen.name,
        "temperature": cell.temperature,
        "draft_length": cell.contender.length(cell.settings.draft_length),
        "available": cell.chosen.available,
        "too_long": cell.chosen.too_long,
        "samples": cell.samples,
        "settings": settings,
        "seconds": round(time.monotonic() - begin, 2),
        "device": device_text(),
        "commit": commit_id(),
        "prompts": [dataclasses.asdict(record) for record in records],
    }


def measure_cells(cells: Sequence[BenchmarkCell], options: BenchmarkOptions, console: Console) -> None:
    """Every cell that is not there yet, appended when it is done."""
    number, count = parse_shard(options.shard)
    own = cells[number::count]
    done = {record["key"] for record in read_records(cells_files(options.out))}
    waiting = [cell for cell in own if key_of(cell_settings(cell, options.target)) not in done]
    if len(waiting) < len(own):
        console.print(f"{len(own) - len(waiting)} of {len(own)} cells are there already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cells", total=len(waiting))
        for cell in waiting:
            what = f"{cell.contender.label}, {cell.chosen.name}, temperature {cell.temperature:g}"
            progress.update(task, description=what)
            record = measure_cell(cell, options.target, progress.refresh)
            append_record(options.cells_file, record)
            progress.advance(task)


def measure_speed(timing: Timing, sets: Sequence[ChosenSet], options: BenchmarkOptions, console: Console) -> None:
    """Every timed prompt at every temperature that is not there yet, all contenders together."""
    path = options.out / SPEED_FILE
    done = {record["key"] for record in read_records([path])}
    jobs = []
    for turn, prompt in enumerate(timed_prompts(sets, options.speed.timed_prompts)):
        for temperature in options.temperatures:
            who = {contender.label: contender.fingerprint for contender in timing.contenders}
            asked = dataclasses.asdict(options.speed)
            del asked["timed_prompts"]
            settings = {"prompt": prompt.prompt, "temperature": temperature, "who": who, "asked": asked, "device": device_text()}
            jobs.append((key_of(settings), turn, prompt, temperature))
    waiting = [job for job in jobs if job[0] not in done]
    if not waiting:
        return
    with console.status("compiling rounds of one request"):
        timing.warm_up(waiting[0][2].prompt, options.temperatures)
    with Progress(console=console) as progress:
        for key, turn, prompt, temperature in progress.track(waiting, description="timing"):
            taken = timing.measure(prompt.prompt, temperature, turn)
            about = {"group": prompt.group, "set": prompt.set, "id": prompt.id, "temperature": temperature}
            where = {"device": device_text(), "commit": commit_id(), "draft_length": options.speed.timed_length}
            append_record(path, {"key": key, **about, **where, "taken": taken})


def describe(contender: Contender, folder: str, target: Any) -> dict[str, Any]:
    """What a drafter is: its kind, size, and the work of one proposal."""
    loaded = contender.loaded
    work = proposal_work(loaded.drafter, contender.params.drafter, contender.params.draft_head, rows=1, context=COST_CONTEXT)
    return {
        "key": key_of({"label": contender.label, "fingerprint": contender.fingerprint}),
        "drafter": contender.label,
        "source": folder,
        "fingerprint": contender.fingerprint,
        "kind": type(loaded.drafter).__name__.removesuffix("Drafter"),
        "block_size": loaded.drafter.block_size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(loaded.params)),
        "draft_vocabulary": target.spec.vocab_size if loaded.draft_ids is None else int(loaded.draft_ids.size),
        "proposal_gflop": round(work.flops / 1e9, 4),
        "proposal_bfloat16_mb": round(work.bytes / 1e6, 2),
    }


def run(options: BenchmarkOptions, console: Console) -> Measured:
    """Measure what is missing, then print the tables of all that is there.

    Raises:
      ValueError: prompts, sets or drafters are missing, or do not fit the target or the mesh.
    """
    mesh = mesh_of(options.mesh, options.decoding.batch_size)
    with console.status(f"loading {options.target} and {len(options.drafters)} drafters"):
        target, target_params = load_target(options.target, mesh=mesh)
        tokenizer = load_tokenizer(options.target)
        folders = labelled(options.drafters)
        contenders = [
            Contender.of(label, load_drafter(folder, target.spec, mesh=mesh), target, target_params) for label, folder in folders.items()
        ]
    sets = choose_sets(options.prompts, options.sets, encoder(tokenizer), options.decoding.max_prompt, options.prompts_per_set, console)
    for chosen in sets:
        console.print(f"  {chosen.name}: {len(chosen.prompts)} of {chosen.available} prompts ({chosen.too_long} too long)", style="dim")
    if parse_shard(options.shard)[0] == 0:
        known = {record["key"] for record in read_records([options.out / DRAFTERS_FILE])}
        for contender in contenders:
            if (described := describe(contender, folders[contender.label], target))["key"] not in known:
                append_record(options.out / DRAFTERS_FILE, described)
    cells = [
        BenchmarkCell(target, tokenizer, contender, chosen, float(temperature), options.decoding, mesh)
        for chosen in sets
        for temperature in options.temperatures
        for contender in contenders
    ]
    if options.decode:
        measure_cells(cells, options, console)
    prompts = timed_prompts(sets, options.speed.timed_prompts)
    if prompts and parse_shard(options.shard)[0] == 0:
        timing = Timing.of(target, tokenizer, contenders, options.speed, prompts, options.decoding.seed)
        measure_speed(timing, sets, options, console)
    if options.decode:
        return print_report(options.out, console)
    measured = Measured.timings(options.out)
    console.print(speed_table(measured).rich())
    return measured


if __name__ == "__main__":
    sys.exit(run_command(BenchmarkOptions, run))
