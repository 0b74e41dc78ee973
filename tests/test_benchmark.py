"""The benchmark: which prompts, what is counted on them, how drafters are compared, and what goes on after an interruption."""

import dataclasses
import io
import json
import math
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.data import save_token_sequences
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.evaluate import TextReading
from dspark_jax.prompt_files import Conversation, Message, read_conversations
from dspark_jax.targets.toy import ToyTarget
from dspark_jax.weights import LoadedDrafter, save_drafter
from experiments import benchmark, benchmark_sets, held_out_report
from experiments.benchmark import BenchmarkOptions, cell_settings, measure_cells
from experiments.benchmark_decode import BenchmarkCell, Contender, DecodeSettings, labelled, mesh_of
from experiments.benchmark_records import ALL, Measured
from experiments.benchmark_report import ReportOptions, comparison_rows, main_table, notes, write_report
from experiments.benchmark_sets import ChosenSet, choose, choose_sets, group_of, in_order, messages_of, read_sets
from experiments.benchmark_speed import PLAIN, SpeedSettings, Timing, timed_prompts
from experiments.bootstrap import mean_of, ratio_of_sums
from experiments.headline import HeadlineOptions, headline_table, read_results, write_headline
from experiments.held_out_report import figure_of, tables_of, walked
from experiments.record_lines import append_record, read_records
from experiments.result_tables import TextTable, marked, with_marked
from tests.answered_texts import make_sequences
from tests.conftest import ROOT
from tests.test_demo import write_tokenizer
from tests.tiny_models import TINY_DRAFTER, random_params, write_target
from tests.toy_drafter import BLOCK, VOCAB, ToyDrafter


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


# Figures with intervals


def test_a_ratio_of_sums_has_the_interval_of_its_units():
    """40 units of 10 rounds each, half of them with 2 tokens a round, half with 3: 2.5, and a standard error of 0.5 / sqrt(40)."""
    figure = ratio_of_sums([20.0, 30.0] * 20, [10.0] * 40, "units")
    low, high = figure.interval
    assert figure.value == 2.5 and figure.units == 40
    assert low == pytest.approx(2.5 - 1.96 * 0.5 / math.sqrt(40), abs=0.03) and high == pytest.approx(5.0 - low, abs=0.05)


def test_units_that_were_drawn_alike_are_compared_pair_by_pair():
    """One drafter is exactly a tenth better on every prompt: however prompts differ, the ratio is 1.1 and its interval a point."""
    rng = np.random.default_rng(0)
    rounds, emitted = rng.integers(5, 50, 30).astype(float), rng.integers(60, 300, 30).astype(float)
    one, other = ratio_of_sums(1.1 * emitted, rounds, "set"), ratio_of_sums(emitted, rounds, "set")
    assert one.interval[1] - one.interval[0] > 0.5
    assert one.over(other).value == pytest.approx(1.1) and one.over(other).interval == pytest.approx((1.1, 1.1))
    apart = ratio_of_sums(emitted, rounds, "another set")
    assert np.ptp(one.over(apart).interval) > 0.1


def test_a_mean_counts_every_figure_alike_and_nothing_has_no_interval():
    small, large = ratio_of_sums([2.0], [1.0], "a"), ratio_of_sums([400.0] * 99, [100.0] * 99, "b")
    assert mean_of([small, large]).value == 3.0
    assert math.isnan(small.interval[0]) and large.interval == (4.0, 4.0)
    nothing = ratio_of_sums([0.0, 0.0], [0.0, 0.0], "c")
    assert math.isnan(nothing.value) and math.isnan(nothing.interval[0])
    with pytest.raises(ValueError, match="above has 1 entries and below 2"):
        ratio_of_sums([1.0], [1.0, 2.0], "d")
    with pytest.raises(ValueError, match="figures is empty"):
        mean_of([])


# Prompts


def encode(messages) -> list[int]:
    """A token per word: the length of the word, as far as the vocabulary goes."""
    return [min(len(word), VOCAB - 2) for message in messages for word in message["content"].split()]


def write_sets(folder, **sets):
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in sets.items():
        lines = [json.dumps({"turns": turns if isinstance(turns, list) else [turns]}) for turns in prompts]
        (folder / f"{name.replace('_', '-')}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_prompts_are_spread_over_those_that_fit(tmp_path):
    """Ten prompts of 1 to 10 words: with at most 8 tokens two are too long; three of the others are the first, a middle and the last."""
    conversations = read_conversations([write_sets(tmp_path, riddles=["word " * n for n in range(1, 11)])])
    chosen = choose("riddles", conversations, encode, max_prompt=8, count=3)
    assert [len(prompt) for prompt in chosen.prompts] == [1, 5, 8] and (chosen.available, chosen.too_long) == (10, 2)
    assert [each.line for each in chosen.conversations] == [1, 5, 8]
    assert len(choose("riddles", conversations, encode, 8, None).prompts) == 8
    with pytest.raises(ValueError, match="max_prompt is 0; the shortest prompt of riddles has 1 tokens"):
        choose("riddles", conversations, encode, 0, 3)


def test_sets_come_in_the_papers_order_with_their_groups(tmp_path):
    folder = write_sets(tmp_path, aime24=["a"], mt_bench=[["a", "b"]], humaneval=["a"], gsm8k=["a"])
    chosen = choose_sets(folder, (), encode, 8, None, quiet())
    assert [each.name for each in chosen] == ["gsm8k", "humaneval", "mt-bench", "aime24"]
    assert [each.group for each in chosen] == ["maths", "code", "chat", "other"]
    assert [each.name for each in choose_sets(folder, ("humaneval", "gsm8k"), encode, 8, None, quiet())] == ["gsm8k", "humaneval"]
    assert in_order(["zebra", "alpaca", "aime25"]) == ["aime25", "alpaca", "zebra"] and group_of("alpaca") == "chat"


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="prompts is .*absent, which is no folder"):
        list(read_sets(tmp_path / "absent", ()))
    folder = write_sets(tmp_path / "prompts", gsm8k=["a"])
    with pytest.raises(ValueError, match=r"sets has \['alpaca'\]; .* has: gsm8k"):
        list(read_sets(folder, ("gsm8k", "alpaca")))
    with pytest.raises(ValueError, match="each set once"):
        choose_sets(folder, ("gsm8k", "gsm8k"), encode, 8, None, quiet())
    for name in ("hf:gsm8k:test", "tfds:gsm8k:test", "tfds:gsm8k::question"):
        with pytest.raises(ValueError, match=f"sets has '{name}'; allowed: .*NAME:SPLIT:FIELD"):
            list(read_sets(folder, (name,)))


def test_data_sets_of_libraries_become_sets_and_a_missing_library_is_named(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return [{"prompt": ["Who?", "Why?"]}, {"prompt": ["How?"]}]

    def data_source(name, split):
        asked.append((name, split))
        return [{"question": b"Who?"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(data_source=data_source))
    (hub, chats), (catalogue, texts) = read_sets(tmp_path, ("hf:someone/mt-bench:main:train:prompt", "tfds:gsm8k:test:question"))
    assert (hub, catalogue) == ("mt-bench", "gsm8k") and asked == [("someone/mt-bench", "main", "train"), ("gsm8k", "test")]
    assert [each.user_turns for each in chats] == [("Who?", "Why?"), ("How?",)] and texts[0].user_turns == ("Who?",)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, split: [{"prompt": " "}]))
    with pytest.raises(ValueError, match="row 1: the field is ' '; allowed: a text that is not blank"):
        list(read_sets(tmp_path, ("hf:empty:train:prompt",)))
    monkeypatch.undo()
    monkeypatch.setattr(benchmark_sets.importlib, "import_module", _not_installed)
    with pytest.raises(ImportError, match="needs the package 'datasets', which is not installed: pip install datasets"):
        list(read_sets(tmp_path, ("hf:someone/mt-bench:train:prompt",)))


def _not_installed(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_later_turn_stands_behind_the_targets_own_answers():
    chat = Conversation(
        "x", (Message("system", "s"), Message("user", "one"), Message("assistant", "theirs"), Message("user", "two")), "f", 1
    )
    assert [message["content"] for message in messages_of(chat, 0, ())] == ["s", "one"]
    assert [message["content"] for message in messages_of(chat, 1, ("ours",))] == ["s", "one", "ours", "two"]


# Decoding, on a target whose next token depends on the last one and on the parity of its position


@dataclasses.dataclass(frozen=True)
class WordTokenizer:
    """Tokens are written as numbers; a chat is its messages one after another."""

    chat_template: str | None = "numbers"
    stop_ids: tuple[int, ...] = (VOCAB - 1,)

    def encode_chat(self, messages):
        return [int(word) for message in messages for word in message["content"].split()]

    def decode(self, ids, skip_special=False):
        return " ".join(str(token) for token in ids if not (skip_special and token in self.stop_ids))


TOKENIZER: Any = WordTokenizer()
TARGET = ToyTarget(VOCAB)
TABLE = TARGET.init(jax.random.key(0))
SETTINGS = DecodeSettings(max_new_tokens=12, max_prompt=40, batch_size=4)


def contender(label="near", spread=0.5) -> Contender:
    near = {"table": TABLE["table"] + spread * jax.random.normal(jax.random.key(1), TABLE["table"].shape)}
    return Contender.of(label, LoadedDrafter(ToyDrafter(), near, None, None), TARGET, TABLE)


def toy_set(name="gsm8k", count=5, turns=1) -> ChosenSet:
    texts = [f"{number % 3} {(number + 1) % 3}" + " 2" * (number % 2) for number in range(count)]
    conversations = tuple(Conversation(f"{name}-{n}", (Message("user", text),) * turns, name, n + 1) for n, text in enumerate(texts))
    return ChosenSet(name, conversations, tuple([int(word) for word in text.split()] for text in texts), count, 0)


def toy_cell(temperature=1.0, settings=SETTINGS, chosen=None, mesh=None, **changes) -> BenchmarkCell:
    return BenchmarkCell(TARGET, TOKENIZER, contender(**changes), chosen or toy_set(), temperature, settings, mesh)


@pytest.fixture(scope="module")
def decoded():
    """The records of one cell, five answers at temperature 1 in two batches."""
    return toy_cell().decode()


def test_every_token_behind_the_first_is_counted_once(decoded):
    """Whole rounds verify whole blocks: a round that the budget leaves fewer drafts is set apart."""
    for record in decoded:
        assert record.emitted + record.cut_emitted == record.tokens - 1
        assert record.emitted == record.rounds + sum(record.accepted)
        assert record.reached[0] == record.rounds and list(record.reached[1:]) == list(record.accepted[:-1])
    assert sum(record.rounds for record in decoded) > 5 and sum(record.cut_rounds for record in decoded) > 0


def test_figures_do_not_depend_on_the_neighbours_in_a_batch(decoded):
    """[B2] Every conversation by itself: the same rounds, the same tokens."""
    chosen = toy_set()
    for place, record in enumerate(decoded):
        here = slice(place, place + 1)
        alone = dataclasses.replace(chosen, conversations=chosen.conversations[here], prompts=chosen.prompts[here])
        assert toy_cell(chosen=alone).decode() == [record]


@pytest.mark.slow
def test_figures_do_not_depend_on_the_mesh(decoded):
    """[B3] Split over two devices: the same rounds, the same tokens."""
    assert toy_cell(mesh=mesh_of((2, 1, 1), SETTINGS.batch_size)).decode() == decoded


def test_greedy_answers_are_the_same_under_every_drafter():
    near, far = (toy_cell(0.0, label=label, spread=spread).decode() for label, spread in (("near", 0.3), ("far", 3.0)))
    assert [record.answer for record in near] == [record.answer for record in far]
    assert sum(record.rounds + record.cut_rounds for record in near) < sum(record.rounds + record.cut_rounds for record in far)


def test_turns_and_samples_are_answers_of_their_own():
    chosen = toy_set(count=2, turns=2)
    both = toy_cell(settings=dataclasses.replace(SETTINGS, samples=3), chosen=chosen)
    first = toy_cell(settings=dataclasses.replace(SETTINGS, turns="first"), chosen=chosen)
    assert (both.turns, both.samples, first.turns, toy_cell(0.0, both.settings).samples) == (2, 3, 1, 1)
    batches = []
    records = both.decode(lambda: batches.append(1))
    # Six answers to the first turn and six to the second, four at a time.
    assert len(batches) == 4 and [record.id for record in records] == ["gsm8k-0", "gsm8k-1"]
    assert all(record.tokens > once.tokens for record, once in zip(records, first.decode(), strict=True))


def test_a_conversation_that_grows_too_long_is_broken_off_and_counted():
    """Twice its 20 tokens and the answer between them are more than the 40 that a prompt may have; a second turn of one token is not."""
    texts = [("0 1 " * 10, "0 1 " * 10), ("0 1 " * 10, "0")]
    conversations = tuple(Conversation(str(n), tuple(Message("user", turn) for turn in turns), "f", n) for n, turns in enumerate(texts))
    chosen = ChosenSet("gsm8k", conversations, ([0, 1] * 10,) * 2, 2, 0)
    assert [record.broken_off for record in toy_cell(0.0, chosen=chosen).decode()] == [1, 0]


@pytest.mark.slow
def test_a_shorter_draft_length_verifies_fewer_drafts():
    records = toy_cell(settings=dataclasses.replace(SETTINGS, draft_length=1)).decode()
    assert all(record.reached[1:] == (0,) * (BLOCK - 1) for record in records)
    assert contender().length(7) == BLOCK and contender().length(2) == 2


def test_bad_settings_are_refused_with_what_is_allowed():
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (DecodeSettings, {"max_new_tokens": 1}, "max_new_tokens is 1"),
        (DecodeSettings, {"draft_length": 0}, "draft_length is 0"),
        (DecodeSettings, {"turns": "some"}, "turns is 'some'; allowed: all, first"),
        (DecodeSettings, {"samples": 65}, "samples is 65; allowed are 1 to 64"),
        (BenchmarkOptions, {"drafters": ("a=x", "a=y")}, "drafters is .*a label of its own"),
        (BenchmarkOptions, {"temperatures": (-1.0,)}, "temperatures is"),
        (BenchmarkOptions, {"prompts_per_set": 0}, "prompts_per_set is 0"),
        (BenchmarkOptions, {"shard": "2/2"}, "shard is '2/2'"),
        (SpeedSettings, {"timed_tokens": 1}, "timed_tokens is 1"),
        (held_out_report.HeldOutOptions, {"texts_per_domain": 129}, "texts_per_domain is 129; allowed are 1 to 128"),
    ]
    for options, changes, message in refused:
        with pytest.raises(ValueError, match=message):
            options(**changes)
    with pytest.raises(ValueError, match="batch_size is 5; allowed are multiples of data x fsdp = 2"):
        mesh_of((2, 1, 1), 5)
    assert labelled(("A, long=x/y", "some/where/drafter")) == {"A, long": "x/y", "drafter": "some/where/drafter"}


# Resuming


def test_finished_cells_are_not_decoded_again_and_shards_take_turns(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(BenchmarkCell, "decode", lambda self, advance: runs.append((self.contender.label, self.chosen.name)) or [])
    cells = [toy_cell(label=label, chosen=toy_set(name)) for name in ("gsm8k", "mbpp") for label in ("one", "two")]
    for shard in ("0/2", "1/2", "0/2"):
        measure_cells(cells, BenchmarkOptions(out=tmp_path, shard=shard), quiet())
    assert runs == [("one", "gsm8k"), ("one", "mbpp"), ("two", "gsm8k"), ("two", "mbpp")]
    # A torn record is measured again, and so is a cell with other prompts.
    file = tmp_path / "cells-1-of-2.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    cells[0] = toy_cell(label="one", chosen=toy_set("gsm8k", count=4))
    measure_cells(cells, BenchmarkOptions(out=tmp_path), quiet())
    assert runs[4:] == [("one", "gsm8k"), ("two", "mbpp")]
    assert len(read_records(sorted(tmp_path.glob("*.jsonl")))) == 5


def test_a_cells_key_is_that_of_what_its_figures_depend_on():
    cell = toy_cell()
    same = dataclasses.replace(cell, settings=dataclasses.replace(SETTINGS, batch_size=2))
    assert cell_settings(cell, "t") == cell_settings(same, "t")
    for other in (
        dataclasses.replace(cell, temperature=0.0),
        dataclasses.replace(cell, settings=dataclasses.replace(SETTINGS, seed=1)),
        dataclasses.replace(cell, chosen=toy_set(turns=2)),
        toy_cell(spread=0.6),
    ):
        assert cell_settings(cell, "t") != cell_settings(other, "t")


# The report, on made-up rows


def prompt_row(id, emitted, rounds, answer="same"):
    accepted = [emitted - rounds, 0]
    return {
        **{"id": id, "emitted": emitted, "rounds": rounds, "cut_rounds": 1, "cut_emitted": 1, "tokens": emitted + 2},
        **{"reached": [rounds, accepted[0]], "accepted": accepted, "broken_off": 0, "answer": answer},
    }


def cell_row(drafter, name, temperature, prompts, **decoding):
    settings = {"target": "t", "decoding": {"max_new_tokens": 8, "max_prompt": 9, "turns": "all", **decoding}}
    about = {"drafter": drafter, "set": name, "temperature": temperature, "settings": settings, "device": "cpu: toy"}
    counts = {"available": 9, "too_long": 1, "samples": 1, "draft_length": 2}
    return {"key": f"{drafter} {name} {temperature} {len(prompts)}", **about, **counts, "prompts": prompts}


def write_measured(folder):
    """Two drafters on GSM8K, MATH500, MBPP, MT-Bench and AIME24 at temperature 0; one of them also at 1 on GSM8K."""
    for name, factor in (("gsm8k", 1), ("math500", 2), ("mbpp", 1), ("mt-bench", 1), ("aime24", 1)):
        for drafter, gain in (("better", 15), ("worse", 10)):
            prompts = [prompt_row(f"p{n}", gain * factor * (1 + n % 3), 10 * (1 + n % 3)) for n in range(6)]
            append_record(folder / "cells.jsonl", cell_row(drafter, name, 0.0, prompts))
    append_record(folder / "cells-1-of-2.jsonl", cell_row("better", "gsm8k", 1.0, [prompt_row("p0", 12, 10, answer="other")]))
    for drafter in ("better", "worse"):
        about = {"parameters": 3_000_000, "draft_vocabulary": 50, "proposal_gflop": 0.25, "proposal_bfloat16_mb": 3.5}
        append_record(folder / "drafters.jsonl", {"key": drafter, "drafter": drafter, **about})
    for number, group in enumerate(("maths", "maths", "code", "chat")):
        taken = {PLAIN: {"tokens": 20, "seconds": 1.0}, "better": {"tokens": 20, "seconds": 0.5}, "worse": {"tokens": 20, "seconds": 0.8}}
        about = {"group": group, "set": "gsm8k", "id": f"p{number}", "temperature": 0.0, "draft_length": 2, "taken": taken}
        append_record(folder / "speed.jsonl", {"key": str(number), **about})
    return folder


def test_averages_are_those_of_sets_and_then_of_groups(tmp_path):
    """1.5 on three groups' sets but for MATH500 with 3: maths (1.5 + 3) / 2, and (2.25 + 1.5 + 1.5) / 3 over all; AIME24 counts nowhere."""
    measured = Measured.read(write_measured(tmp_path))
    length = [measured.accepted_length("better", where, 0.0) for where in ("math500", "maths", "code", "chat", ALL, "aime24")]
    assert [figure.value for figure in length if figure] == pytest.approx([3.0, 2.25, 1.5, 1.5, 1.75, 1.5])
    assert measured.accepted_length("worse", "gsm8k", 1.0) is None
    # A mean over fewer sets than were measured would be another mean.
    assert measured.accepted_length("better", "maths", 1.0) is None and measured.accepted_length("better", ALL, 1.0) is None
    assert [figure.value for figure in measured.conditional_acceptance("better", "code", 0.0)] == pytest.approx([0.5, 0.0])


def test_ratios_are_taken_over_prompts_that_both_answered(tmp_path):
    folder = write_measured(tmp_path)
    append_record(folder / "cells.jsonl", cell_row("worse", "mbpp", 0.0, [prompt_row("p0", 10, 10), prompt_row("new", 90, 10)]))
    measured = Measured.read(folder)
    ratio = measured.ratio("better", "worse", "mbpp", 0.0)
    assert ratio is not None and ratio.units == 1 and ratio.value == pytest.approx(1.5)
    rows = {(row["drafter"], row["domain"]): row for row in comparison_rows(measured) if row["temperature"] == 0.0}
    assert rows["better", "maths"]["ratio"] == pytest.approx(1.5) and rows["better", "maths"]["ratio_low"] == pytest.approx(1.5)
    assert rows["worse", "chat"]["ratio"] == pytest.approx(1 / 1.5, abs=1e-4) and rows["worse", "chat"]["prompts"] == 6


def test_speed_is_over_plain_decoding_on_the_same_prompts(tmp_path):
    folder = write_measured(tmp_path)
    measured = Measured.read(folder)
    ratio, speed = measured.speed_ratio("better", ALL, 0.0), measured.speed("worse", "maths", 0.0)
    assert ratio is not None and ratio.value == pytest.approx(2.0) and speed is not None and speed.value == pytest.approx(25.0)
    assert measured.speed("better", ALL, 1.0) is None
    # Another list of drafters was timed in another run: the last one counts.
    about = {"group": "chat", "set": "gsm8k", "id": "p", "temperature": 0.0, "draft_length": 2}
    append_record(folder / "speed.jsonl", {"key": "new", **about, "taken": {PLAIN: {"tokens": 20, "seconds": 2.0}}})
    assert len(Measured.read(folder).timed) == 1


def test_cells_of_different_settings_are_not_put_into_one_table(tmp_path):
    append_record(write_measured(tmp_path) / "cells.jsonl", cell_row("better", "alpaca", 0.0, [prompt_row("p0", 9, 3)], max_new_tokens=64))
    with pytest.raises(ValueError, match="cells of different settings"):
        Measured.read(tmp_path)
    with pytest.raises(ValueError, match="measured is .*empty; allowed is a folder with cells"):
        Measured.read(tmp_path / "empty")


def test_the_report_has_the_papers_layout_and_the_page_keeps_its_words(tmp_path):
    folder, page = write_measured(tmp_path / "measured"), tmp_path / "page.md"
    page.write_text("Words before.\n\n<!-- benchmark -->\nold\n<!-- /benchmark -->\n\nWords behind.\n")
    options = ReportOptions(folder, ("better/worse",), tmp_path / "results.csv", page)
    measured = write_report(options, quiet())
    table = main_table(measured, 0.0)
    assert table.header[1:5] == ("GSM8K", "MATH500", "AIME25", "maths, average") and table.header[-2:] == ("AIME24", "all groups")
    assert [row[0] for row in table.rows] == ["better", "worse"]
    assert table.rows[0][1:5] == ("1.50", "3.00", "-", "2.25 (2.25 to 2.25)")
    text = page.read_text()
    assert text.startswith("Words before.\n\n<!-- benchmark -->\n\n**Accepted length at temperature 0**") and text.endswith(
        "Words behind.\n"
    )
    assert "old" not in text and "better over worse, temperature 0 | 1.500 (1.500 to 1.500)" in text
    assert "Not there: AIME25, HumanEval, LiveCodeBench, Alpaca, Arena-Hard v2." in text
    assert measured.same_greedy_answers() == (30, 30) and "30 of 30 conversations" in notes(measured)
    rows = read_results(options.csv)
    found = {(row["drafter"], row["domain"], row["temperature"]): row for row in rows}
    assert float(found["better", "all", "0.0"]["accepted_length"]) == 1.75 and found["worse", "all", "1.0"]["accepted_length"] == ""
    assert found["better", "maths", "0.0"]["over_plain"] == "2.0" and found["better", "maths", "0.0"]["parameters"] == "3000000"
    assert {path.name for path in folder.iterdir()} >= {"sets.csv", "acceptance.csv", "acceptance.png", "comparisons.csv"}
    assert found["better", "maths", "0.0"]["sets"] == "2" and found["better", "all", "0.0"]["sets"] == "4"
    others = tmp_path / "others.csv"
    others.write_bytes(options.csv.read_bytes())
    write_report(dataclasses.replace(options, page=None, also=(others,)), quiet())
    assert read_results(options.csv) == rows + rows
    with pytest.raises(ValueError, match="also is .*absent.csv; allowed are existing CSV files"):
        write_report(dataclasses.replace(options, page=None, also=(tmp_path / "absent.csv",)), quiet())
    with pytest.raises(ValueError, match="pairs has 'better/best'"):
        write_report(dataclasses.replace(options, pairs=("better/best",)), quiet())


def test_a_part_of_a_page_is_found_by_its_markers_or_refused():
    page = with_marked("a <!-- x --> b <!-- /x --> c", "x", "| 1 |", "page.md")
    assert page == "a <!-- x -->\n\n| 1 |\n\n<!-- /x --> c" and marked(page, "x", "page.md") == "| 1 |"
    for text in ("no markers", page + page, "<!-- x --> <!-- x --> <!-- /x -->"):
        with pytest.raises(ValueError, match="page.md has .* between <!-- x -->"):
            marked(text, "x", "page.md")
    table = TextTable("t", ("", "a|b"), (("row", "1"),))
    assert table.markdown(with_title=False) == "|  | a\\|b |\n| --- | ---: |\n| row | 1 |"


def test_the_headline_is_written_from_the_results_and_checked(tmp_path):
    readme, results = tmp_path / "README.md", tmp_path / "results.csv"
    folder = write_measured(tmp_path / "measured")
    write_report(ReportOptions(folder, (), results, None), quiet())
    with results.open("a") as file:
        file.write(
            results.read_text().splitlines()[1].replace("better", "elsewhere").replace("benchmark prompts", "held-out answers") + "\n"
        )
    readme.write_text("# Title\n<!-- headline -->\n<!-- /headline -->\nEnd\n")
    options = HeadlineOptions(results, readme)
    write_headline(options, quiet())
    write_headline(dataclasses.replace(options, check=True), quiet())
    assert "| better | 0 | 2.25 | 1.50 | 1.50 | 1.75 | 2.00 |" in readme.read_text()
    assert readme.read_text().endswith("End\n") and "elsewhere" not in readme.read_text()
    readme.write_text(readme.read_text().replace("1.75", "1.99"))
    with pytest.raises(ValueError, match="whose headline is not that of"):
        write_headline(dataclasses.replace(options, check=True), quiet())
    with pytest.raises(ValueError, match="results is .*absent.csv; allowed"):
        read_results(tmp_path / "absent.csv")
    results.write_text("drafter,domain\na,b\n")
    with pytest.raises(ValueError, match="without temperature, texts, accepted_length"):
        read_results(results)


def test_the_headline_of_the_readme_is_that_of_the_committed_results():
    options = HeadlineOptions(ROOT / "experiments" / "results" / "results.csv", ROOT / "README.md", check=True)
    if "<!-- headline -->" not in options.readme.read_text(encoding="utf-8"):
        pytest.skip("the README has no headline yet")
    write_headline(options, quiet())
    assert len(headline_table(read_results(options.results)).rows) >= 2


def test_the_committed_page_is_that_of_the_committed_measurements(tmp_path):
    results = ROOT / "experiments" / "results"
    if not (results / "benchmark" / "cells.jsonl").is_file():
        pytest.skip("nothing has been measured yet")
    page = tmp_path / "results.md"
    page.write_text((results / "results.md").read_text(encoding="utf-8"), encoding="utf-8")
    copy = tmp_path / "benchmark"
    copy.mkdir()
    for file in (results / "benchmark").glob("*.jsonl"):
        (copy / file.name).write_bytes(file.read_bytes())
    also = (results / "rivals" / "results.csv",)
    write_report(ReportOptions(copy, (), tmp_path / "results.csv", page, also), quiet())
    assert (tmp_path / "results.csv").read_text() == (results / "results.csv").read_text()
    assert page.read_text(encoding="utf-8") == (results / "results.md").read_text(encoding="utf-8")


# Speed


def test_timed_prompts_are_the_shortest_of_every_group_set_by_set():
    sets = [toy_set("gsm8k", 4), toy_set("math500", 4), toy_set("mt-bench", 1), toy_set("aime24", 4)]
    chosen = timed_prompts(sets, 3)
    assert [(each.group, each.set, len(each.prompt)) for each in chosen] == [
        ("maths", "gsm8k", 2),
        ("maths", "math500", 2),
        ("maths", "gsm8k", 2),
        ("chat", "mt-bench", 2),
    ]
    assert timed_prompts(sets, 0) == []


@pytest.mark.slow
def test_plain_decoding_and_all_drafters_answer_the_same_prompt_in_one_run():
    sets = [toy_set()]
    timing = Timing.of(TARGET, TOKENIZER, (contender("near", 0.3), contender("far", 3.0)), SpeedSettings(1, 10), timed_prompts(sets, 1))
    taken = timing.measure(sets[0].prompts[0], 0.0, turn=1)
    assert list(taken) == [PLAIN, "near", "far"] and timing.max_len == 64
    assert all(each["as_plain"] and each["tokens"] == taken[PLAIN]["tokens"] for each in taken.values())
    assert taken["near"]["rounds"] <= taken["far"]["rounds"] <= taken[PLAIN]["rounds"] == taken[PLAIN]["tokens"]


# Recorded answers


def held_out_records(gains):
    """Twelve texts of every domain and temperature; drafter i gets `gains[i]` tokens of 10 rounds, and more on later texts."""
    return [
        {
            **{"key": f"{drafter}{domain}{temperature}{row}", "drafter": drafter, "domain": domain, "temperature": temperature, "row": row},
            **{part: {"rounds": 10, "emitted": gain + row} for part in held_out_report.PARTS},
        }
        for drafter, gain in gains.items()
        for domain in ("maths", "code", "chat")
        for temperature in (0, 1)
        for row in range(12)
    ]


def test_recorded_answers_are_compared_text_by_text():
    records = held_out_records({"a": 20, "b": 10})
    whole = next(iter(held_out_report.PARTS))
    a, b = (figure_of(records, drafter, "all", 1, whole) for drafter in ("a", "b"))
    assert a is not None and b is not None and (a.value, b.value) == pytest.approx((2.55, 1.55))
    lengths, ratios = tables_of(records)
    assert len(lengths.rows) == 8 and len(ratios.rows) == 4 and ratios.rows[0][1] == "a over b"
    rows = held_out_report.rows_of(records)
    assert len(rows) == 32 and rows[-1]["first_over_this"] == pytest.approx(2.55 / 1.55, abs=1e-3)
    assert rows[-1]["first_over_this_low"] < rows[-1]["first_over_this"] < rows[-1]["first_over_this_high"]
    assert figure_of(records[:12], "a", "all", 0, whole) is None


def test_walks_of_a_text_are_summed_over_their_seeds():
    """At temperature 0 one walk, at 1 eight; the first tokens hold a part of the rounds."""
    kept = np.random.default_rng(0).random((200, 3)) < 0.6
    reading = TextReading(0, 10, kept[None], np.full((1, 200, 3), 0.5, np.float32), None)
    greedy, sampled = (walked(reading, temperature, 3) for temperature in (0, 1))
    for sums, walks in ((greedy, 1), (sampled, 8)):
        assert sums["whole answers"]["emitted"] + sums["whole answers"]["cut_emitted"] == 200 * walks
        assert 0 < sums["first 128 tokens"]["rounds"] < sums["whole answers"]["rounds"]


# Everything together


@pytest.mark.slow
def test_the_whole_benchmark_on_a_tiny_target(tmp_path, capsys):
    """Two drafters, three sets, two temperatures, timed; the second run does nothing but the report."""
    write_target(tmp_path / "target", max_position_embeddings=512)
    write_tokenizer(tmp_path / "target")
    drafter = DSparkDrafter(DSparkConfig(block_size=2, **TINY_DRAFTER))
    for seed in (1, 2):
        save_drafter(tmp_path / f"drafter{seed}", drafter, random_params(drafter, seed=seed))
    prompts = write_sets(tmp_path / "prompts", gsm8k=["w3 w4", "w5"], mbpp=["w6", "w7 w8"], mt_bench=[["w9", "w10"], "w2 " * 90])
    options = BenchmarkOptions(
        prompts=prompts,
        drafters=(f"one={tmp_path / 'drafter1'}", f"two={tmp_path / 'drafter2'}"),
        target=str(tmp_path / "target"),
        decoding=DecodeSettings(max_new_tokens=8, max_prompt=64, batch_size=2),
        speed=SpeedSettings(timed_prompts=1, timed_tokens=6, timed_length=1),
        out=tmp_path / "out",
    )
    measured = benchmark.run(options, quiet())
    assert len(measured.cells) == 12 and measured.same_greedy_answers() == (5, 5)
    assert {cell["too_long"] for (_, name, _), cell in measured.cells.items() if name == "mt-bench"} == {1}
    assert len(measured.timed) == 6 and all(each["as_plain"] for record in measured.timed[::2] for each in record["taken"].values())
    assert set(measured.drafters) == {"one", "two"} and measured.drafters["one"]["kind"] == "DSpark"
    sizes = {path.name: path.stat().st_size for path in options.out.iterdir()}
    benchmark.run(options, quiet())
    assert {path.name: path.stat().st_size for path in options.out.iterdir()} == sizes


@pytest.mark.slow
def test_recorded_answers_of_a_tiny_target_are_read_once(tmp_path):
    """Two texts of every domain and temperature, two drafters; a run with one text fewer each reads nothing anew."""
    write_target(tmp_path / "target", max_position_embeddings=512)
    drafter = DSparkDrafter(DSparkConfig(block_size=2, **TINY_DRAFTER))
    for seed in (1, 2):
        save_drafter(tmp_path / f"drafter{seed}", drafter, random_params(drafter, seed=seed))
    texts = make_sequences([24] * 12, seed=3)
    cells = [np.repeat(np.arange(3, dtype=np.int8), 4), np.tile(np.asarray([0, 0, 2, 2], np.int8), 3)]
    tokens = (texts.tokens % 60 + 2).astype(np.uint16)
    texts = dataclasses.replace(texts, tokens=tokens, domain=cells[0], temperature=cells[1], heldout=np.ones(12, np.int8))
    save_token_sequences(tmp_path / "texts.npz", texts)
    page = tmp_path / "page.md"
    page.write_text("<!-- held-out -->\n<!-- /held-out -->\n")
    options = held_out_report.HeldOutOptions(
        drafters=tuple(f"{name}={tmp_path / folder}" for name, folder in (("one", "drafter1"), ("two", "drafter2"))),
        target=str(tmp_path / "target"),
        texts=(tmp_path / "texts.npz",),
        texts_per_domain=2,
        out=tmp_path / "out",
        page=page,
    )
    assert len(held_out_report.run(options, quiet())) == 24
    assert "| whole answers, temperature 0 | one |" in page.read_text() and "one over two" in page.read_text()
    size = (options.out / "readings.jsonl").stat().st_size
    assert len(held_out_report.run(dataclasses.replace(options, texts_per_domain=1), quiet())) == 12
    assert (options.out / "readings.jsonl").stat().st_size == size
