"""Several drafters on the same recorded held-out answers, domain by domain: accepted length with intervals over texts, and their ratios.

    python -m experiments.held_out_report --drafters DSpark=smollm2_dspark OURS=out/run/drafter

Every drafter is run at every position of an answer, and rounds are walked along it (`dspark_jax.evaluate`): all are judged on the same
tokens. Greedy answers of a small model fall into loops, which are easy to draft, so the first 128 tokens of every answer stand beside
the whole ones. A text that a drafter has read is kept in `readings.jsonl` and is not read again; with the whole vocabulary a text takes
some seconds on 2 cores.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.data import DOMAINS, TokenSequences, load_token_sequences
from dspark_jax.evaluate import TextReading
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.benchmark_decode import labelled
from experiments.bootstrap import Figure, mean_of, ratio_of_sums
from experiments.command_line import run_command
from experiments.presets import SMOLLM2_TEXTS
from experiments.profile_steps import device_text
from experiments.record_lines import append_record, key_of, read_records
from experiments.release_readings import CARD_POOL, WALKS, cell_rows, read_rows, walk_answer
from experiments.result_files import write_csv
from experiments.result_tables import TextTable, columns, with_interval, write_marked
from experiments.sweep import commit_id

MARKER = "held-out"
READINGS = "readings.jsonl"
ALL = "all"

PARTS: Mapping[str, int | None] = {"whole answers": None, "first 128 tokens": 128}


@dataclasses.dataclass(frozen=True)
class HeldOutOptions:
    """Command line.

    Attributes:
      drafters: folders or names; "LABEL=FOLDER" gives one another name in the tables. The first is compared with each of the others.
      target: name, folder or GGUF file.
      texts: answers that the target wrote, with held-out ones.
      texts_per_domain: of each temperature, spread evenly over the held-out ones.
      draft_length: drafts of a round; None: the whole block of each drafter.
      out: folder of the readings and the CSV files.
      page: file with the markers `<!-- held-out -->`; None: no page.
    """

    drafters: tuple[str, ...] = ("smollm2_dspark",)
    target: str = "smollm2"
    texts: tuple[Path, ...] = SMOLLM2_TEXTS
    texts_per_domain: int = 16
    draft_length: int | None = None
    out: Path = Path("out/held_out")
    page: Path | None = None

    def __post_init__(self) -> None:
        labelled(self.drafters)
        if not 1 <= self.texts_per_domain <= CARD_POOL:
            raise ValueError(f"texts_per_domain is {self.texts_per_domain}; allowed are 1 to {CARD_POOL}")
        if self.draft_length is not None and self.draft_length < 1:
            raise ValueError(f"draft_length is {self.draft_length}; allowed are positive integers, or None for whole blocks")


def walked(reading: TextReading, temperature: int, draft_length: int) -> dict[str, dict[str, int]]:
    """Sums over the walks along one text, for each of `PARTS`."""
    fields = ("rounds", "emitted", "cut_rounds", "cut_emitted")
    totals = {part: walk_answer(reading, temperature, draft_length, first_tokens) for part, first_tokens in PARTS.items()}
    return {part: {field: getattr(total, field) for field in fields} for part, total in totals.items()}


def read_drafter(
    label: str, loaded: LoadedDrafter, models: tuple[Any, Any], sequences: TokenSequences, options: HeldOutOptions, progress: Progress
) -> Iterator[dict[str, Any]]:
    """The records of one drafter on all its texts, those that were there already first."""
    target, target_params = models
    length = min(options.draft_length or loaded.drafter.block_size, loaded.drafter.block_size)
    fingerprint = drafter_fingerprint(loaded.drafter, loaded.params, loaded.draft_ids)
    there = {record["key"]: record for record in read_records([options.out / READINGS])}
    for domain, name in enumerate(DOMAINS):
        for temperature in WALKS:
            rows = cell_rows(sequences, domain, temperature)[: options.texts_per_domain]
            files = [path.name for path in options.texts]
            asked = {"target": options.target, "drafter": fingerprint, "length": length, "temperature": temperature, "texts": files}
            keys = {int(row): key_of({**asked, "row": int(row)}) for row in rows}
            yield from ({**there[key], "drafter": label} for key in keys.values() if key in there)
            missing = np.asarray([row for row in rows if keys[int(row)] not in there], np.int64)
            readings = read_rows(target, target_params, loaded, sequences, missing)
            for reading in progress.track(readings, total=len(missing), description=f"{label}, {name}, temperature {temperature}"):
                about = {"drafter": label, "domain": name, "temperature": temperature, "row": reading.row, "draft_length": length}
                where = {"device": device_text(), "commit": commit_id()}
                record = {"key": keys[reading.row], **about, **walked(reading, temperature, length), **where}
                append_record(options.out / READINGS, record)
                yield record


def figure_of(records: Sequence[Mapping[str, Any]], drafter: str, domain: str, temperature: int, part: str) -> Figure | None:
    """Accepted length over the whole rounds of a domain's texts, or the mean over the domains; None where nothing was read."""
    if domain == ALL:
        figures = [figure_of(records, drafter, name, temperature, part) for name in DOMAINS]
        there = [figure for figure in figures if figure is not None]
        return mean_of(there) if len(there) == len(DOMAINS) else None
    chosen = {
        record["row"]: record[part]
        for record in records
        if (record["drafter"], record["domain"], record["temperature"]) == (drafter, domain, temperature)
    }
    if not chosen:
        return None
    texts = [chosen[row] for row in sorted(chosen)]
    return ratio_of_sums([text["emitted"] for text in texts], [text["rounds"] for text in texts], domain)


def parts_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parts of answers that records have sums of."""
    return list(dict.fromkeys(name for record in records for name, value in record.items() if isinstance(value, Mapping)))


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per drafter, domain, temperature and part; with its ratio to the first drafter's, text by text, behind it."""
    labels = list(dict.fromkeys(record["drafter"] for record in records))
    rows = []
    for drafter in labels:
        for part in parts_of(records):
            for domain in (*DOMAINS, ALL):
                for temperature in WALKS:
                    figure = figure_of(records, drafter, domain, temperature, part)
                    first = figure_of(records, labels[0], domain, temperature, part)
                    if figure is None or first is None:
                        continue
                    about = {"drafter": drafter, "part": part, "domain": domain, "temperature": temperature, "texts": figure.units}
                    ratio = columns(first.over(figure) if drafter != labels[0] else None, "first_over_this")
                    rows.append({**about, **columns(figure, "accepted_length"), **ratio})
    return rows


def tables_of(records: Sequence[Mapping[str, Any]]) -> list[TextTable]:
    """Accepted lengths, then the first drafter over each of the others."""
    labels = list(dict.fromkeys(record["drafter"] for record in records))
    domains = (*DOMAINS, ALL)

    def figure(drafter: str, domain: str, temperature: int, part: str) -> Figure | None:
        return figure_of(records, drafter, domain, temperature, part)

    lengths, ratios = [], []
    for part in parts_of(records):
        for temperature in WALKS:
            about = f"{part}, temperature {temperature}"
            for drafter in labels:
                lengths.append((about, drafter, *(with_interval(figure(drafter, domain, temperature, part)) for domain in domains)))
            for other in labels[1:]:
                pairs = [(figure(labels[0], domain, temperature, part), figure(other, domain, temperature, part)) for domain in domains]
                shown = [with_interval(one.over(two) if one and two else None, 3) for one, two in pairs]
                ratios.append((about, f"{labels[0]} over {other}", *shown))
    tables = [TextTable("Accepted length on recorded held-out answers", ("", "drafter", *domains), tuple(lengths))]
    if ratios:
        tables.append(TextTable("Ratios on the same texts (95 % interval over texts)", ("", "pair", *domains), tuple(ratios)))
    return tables


def run(options: HeldOutOptions, console: Console) -> list[dict[str, Any]]:
    """Read what is missing, print the tables and write the files.

    Raises:
      ValueError: models or texts are missing or do not fit each other, or the page has not its markers.
    """
    with console.status(f"loading {options.target}"):
        target, target_params = load_target(options.target)
        sequences = load_token_sequences(options.texts, target.spec.vocab_size)
    records = []
    for label, folder in labelled(options.drafters).items():
        loaded = load_drafter(folder, target.spec)
        with Progress(console=console, transient=True) as progress:
            records += read_drafter(label, loaded, (target, target_params), sequences, options, progress)
    tables = tables_of(records)
    for table in tables:
        console.print(table.rich())
    write_csv(options.out / "held_out.csv", rows_of(records))
    if options.page is not None:
        texts = f"{options.texts_per_domain} texts of each domain and temperature at most; {device_text()}."
        write_marked(options.page, MARKER, "\n\n".join([*(table.markdown() for table in tables), texts]))
    return records


if __name__ == "__main__":
    sys.exit(run_command(HeldOutOptions, run))
