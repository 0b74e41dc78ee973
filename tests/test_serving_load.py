"""Load for an engine, and the figures that are taken from it."""

import numpy as np
import pytest
from rich.console import Console

from dspark_jax.requests import Completion, RequestMetrics
from experiments import chat
from experiments.load_curve import LoadOptions, row_of
from experiments.load_frontier import Frontier, plot_load
from experiments.load_report import findings, read_rows
from experiments.result_files import write_csv
from experiments.serving_load import Ask, ClosedLoop, Window, serve_arrivals
from tests.scripted_slots import SCRIPT, TOKENIZER, prompt, scripted_engine


def _workload(budget=24):
    number = 0
    while True:
        yield Ask(tuple(prompt(number % 2)), budget, 0.0, seed=number)
        number += 1


def test_a_closed_loop_keeps_everybody_busy_and_counts_what_they_got():
    engine, _ = scripted_engine(SCRIPT)
    loop = ClosedLoop(engine, _workload(), users=4)
    loop.fill()
    assert engine.metrics.decoding == 4
    window = loop.window(0.05)
    assert window.emitted - window.first > window.rounds > 0 and window.verified == 3 * window.rounds and window.first > 0
    assert 0 < window.host_seconds < window.seconds
    assert not engine._in_flight, "nothing is left to run beside the next turn"
    # Everybody is in rounds, or its successor is being read.
    assert 0.5 < window.request_seconds / (4 * window.seconds) <= 1
    assert engine.metrics.finished["budget"] == len(engine.metrics.completions) > 4


def test_an_error_ends_a_measurement():
    engine, slots = scripted_engine(SCRIPT)
    slots.errors = {("read", 2): 1}
    with pytest.raises(RuntimeError, match="read of 2 failed"):
        ClosedLoop(engine, _workload(), users=4).fill()


def test_arrivals_are_all_served():
    engine, _ = scripted_engine(SCRIPT)
    found = serve_arrivals(engine, _workload(), rate=200.0, count=30)
    assert found.throughput > 0 and found.per_user > 0 and found.mean_verified == 3.0 and 1 < found.accepted_length <= 4
    assert found.first_token[0] <= found.first_token[1] and engine.idle


def _rows():
    """Two turns: the scheduler emits as much as plain decoding in the first, a first token included, and twice as much in the second."""
    plain = [Window(1.0, 11, 1, 10, 0, 2.0), Window(1.0, 9, 0, 9, 0, 2.0)]
    baseline = [Window(1.0, 15, 0, 10, 10, 2.0), Window(1.0, 15, 0, 10, 10, 2.0)]
    scheduler = [Window(1.0, 11, 1, 5, 15, 2.0), Window(1.0, 18, 0, 10, 30, 2.0)]
    windows = {"plain": plain, "fixed_1": baseline, "scheduler": scheduler}
    rows = [row_of(policy, 2, windows) for policy in windows]
    # At four users everybody is half as fast, and twice as many.
    return rows + [row | {"concurrency": 4, "throughput": row["throughput"] * 1.2, "per_user": row["per_user"] * 0.6} for row in rows]


def test_ratios_are_of_paired_turns_with_an_interval():
    row = next(row for row in _rows() if row["policy"] == "scheduler")
    assert row["throughput"] == 14.5 and row["per_user"] == 28 / 4 and row["mean_verified"] == 3
    assert row["accepted_length"] == 28 / 15, "the first tokens are not those of rounds"
    assert row["over_plain"] == 29 / 20 and (row["over_plain_low"], row["over_plain_high"]) == (1.0, 2.0)
    assert row["over_fixed_1"] == 29 / 30


def test_speed_at_matched_throughput_is_read_between_points():
    throughput, per_user = np.array([10.0, 16.0, 14.0]), np.array([10.0, 8.0, 3.5])
    line = Frontier("fixed_1", np.array([1, 2, 4]), throughput, per_user, np.ones(3))
    assert line.speed_at(10.0) == 10.0 and line.speed_at(13.0) == 9.0
    assert line.speed_at(15.0) == pytest.approx(8 + 1 / 3), "of two loads with that throughput the faster one"
    assert line.speed_at(17.0) is None


def test_findings_are_the_goals(tmp_path):
    rows = _rows()
    write_csv(tmp_path / "load_curve.csv", rows)
    assert read_rows(tmp_path / "load_curve.csv") == rows and read_rows(tmp_path / "absent.csv") == []
    found = findings(rows)
    assert found["lowest_over_plain"]["over_plain"] == 1.45 and found["mean_verified_falls_with_load"]
    first, second = found["at_matched_throughput"]
    assert first["ratio"] is None and second["ratio"] == pytest.approx(0.6 * 7 / second["fixed_1"]) and 4.5 < second["fixed_1"] < 7.5
    assert findings([row for row in rows if row["policy"] != "plain"]) == {}
    plot_load(rows, tmp_path / "curves.png", "measured")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "fields",
    [{"policies": ("best",)}, {"concurrency": ()}, {"budgets": (9, 3)}, {"windows": 0}, {"window": 0.0}, {"arrival_rates": (0.0,)}],
)
def test_load_options_that_cannot_be_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        LoadOptions(**fields)


class Chatting:
    """The tokenizer of the scripts with a chat template: script 1 answers whatever is asked."""

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def encode_chat(self, turns):
        return prompt(1, 2 + sum(len(turn["content"].split()) for turn in turns))


def test_a_chat_shows_answers_and_forgets_what_does_not_fit():
    engine, _ = scripted_engine(SCRIPT, Chatting())
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))
    options = chat.ChatOptions(max_new_tokens=len(SCRIPT[1]), slots=len(SCRIPT[1]) + 12)
    lines = ["hello", "", "how are you", "/new", "a " * 20, "again", "/quit", "never"]
    chat.converse(engine, engine.tokenizer, options, iter(lines), console)
    shown = console.export_text()
    assert shown.count("one two three four five six") == 3 and "a round" in shown
    assert "longer than the conversation may be" in shown
    assert engine.metrics.submitted == 3


def test_a_note_says_how_an_answer_ended():
    metrics = RequestMetrics(0.0, 0.1, 0.5, 2.5, rounds=4, emitted=10, verified=16)
    note = chat.note_of(Completion(0, tuple(range(11)), "x", "budget", metrics))
    assert note == "11 tokens · 5.0 a second · 2.50 a round · first after 0.50 s · ended by budget"
    assert metrics.tokens_per_second == 5.0
