"""Texts that an engine streams, stop texts, and the ways of waiting for an answer."""

import asyncio
import contextlib
import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.engine import PrometheusMetrics
from dspark_jax.stop_texts import StopTexts
from tests.scripted_slots import SCRIPT, TEXT, TOKENIZER, Bytes, expected, prompt, scripted_engine
from tests.toy_engine import run_until_idle


def test_pieces_are_whole_characters_and_together_the_text():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    budget = len(SCRIPT[0])
    handle = engine.submit(prompt(0), max_new_tokens=budget)
    pieces = list(handle)
    assert len(pieces) > 5 and "".join(piece.text for piece in pieces) == TEXT == handle.completion.text
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert sum((piece.ids for piece in pieces), ()) == handle.completion.ids


def test_a_budget_that_cuts_a_character_shows_that_it_is_cut():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    handle = engine.submit(prompt(0), max_new_tokens=3)
    assert "".join(piece.text for piece in handle) == handle.completion.text == "Gr\ufffd"


@pytest.mark.parametrize(
    ("stops", "text"),
    [(("three",), "one two "), (("six", "four f"), "one two three "), (("o t", "one two"), ""), (("seven",), None), (("e ",), "on")],
)
def test_a_stop_text_ends_an_answer_and_no_part_of_it_is_shown(stops, text):
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    budget = len(SCRIPT[1])
    handle = engine.submit(prompt(1), max_new_tokens=budget, stop_texts=stops)
    whole = bytes(SCRIPT[1]).decode()
    pieces = "".join(piece.text for piece in handle)
    assert pieces == handle.completion.text == (whole if text is None else text)
    assert handle.completion.reason == ("budget" if text is None else "stop_text")
    ids = bytes(handle.completion.ids).decode()
    assert ids == whole[: len(ids)] and (text is None or ids.startswith(text))
    run_until_idle(engine)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 5))
def test_a_stream_ends_before_the_first_stop_text_however_it_is_cut(text, stops, size):
    stream, shown = StopTexts(tuple(stops)), ""
    for begin in range(0, len(text), size):
        stream, piece = stream.push(text[begin : begin + size])
        shown += piece
        # Nothing is shown that a stop text would have taken back.
        assert not any(stop in shown for stop in stops)
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert stream.found == bool(places)
    if places:
        assert text.startswith(shown) and len(shown) <= min(begin for _, begin in places) or min(places)[1] == len(shown)
    else:
        assert shown + stream.held == text


def test_a_thread_serves_many_that_wait():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    answers = {}

    def ask(number):
        answers[number] = engine.submit(prompt(number % 2, 2 + number), max_new_tokens=20 + number).result(timeout=60)

    with engine:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {number: answer.ids for number, answer in answers.items()} == {
        number: expected(SCRIPT, number % 2, 20 + number) for number in range(12)
    }


def test_many_may_wait_where_no_thread_serves():
    """Each of them runs the loop in turn."""
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    handles = [engine.submit(prompt(number % 2), max_new_tokens=40 + number) for number in range(12)]
    threads = [threading.Thread(target=handle.result, args=(60,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [handle.completion.ids for handle in handles] == [expected(SCRIPT, number % 2, 40 + number) for number in range(12)]


@pytest.mark.parametrize("served", [True, False])
def test_many_may_be_awaited_at_once(served):
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)

    async def ask():
        handles = [engine.submit(prompt(number % 2), max_new_tokens=30) for number in range(40)]
        return await asyncio.gather(*handles)

    with engine if served else contextlib.nullcontext():
        answers = asyncio.run(ask())
    assert [answer.ids for answer in answers] == [expected(SCRIPT, number % 2, 30) for number in range(40)]


def test_what_a_request_did_is_complete_when_its_end_is_told():
    engine, _ = scripted_engine(SCRIPT)
    handle = engine.submit(prompt(1), max_new_tokens=23)
    told = []
    handle._watchers.append(lambda: told.append(handle.completion and handle.completion.metrics.emitted))
    handle.result()
    assert told[-1] == 22 and told.count(22) == 1


def test_leaving_the_engine_waits_for_what_was_submitted_and_an_exception_does_not():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    with engine:
        handle = engine.submit(prompt(1), max_new_tokens=200)
    assert handle.completion.reason == "budget"
    with pytest.raises(KeyboardInterrupt), engine:
        handle = engine.submit(prompt(1), max_new_tokens=200)
        raise KeyboardInterrupt
    assert handle.completion.reason in ("cancelled", "budget")
    # It may be entered again, and served without a thread.
    assert engine.submit(prompt(1), max_new_tokens=4).result().ids == expected(SCRIPT, 1, 4)


def test_answers_can_be_awaited_and_iterated_over():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)

    async def ask():
        first, second = (engine.submit(prompt(number), max_new_tokens=20) for number in range(2))
        texts = "".join([piece.text async for piece in second])
        return (await first).ids, texts

    with engine:
        ids, texts = asyncio.run(ask())
    assert ids == expected(SCRIPT, 0, 20) and texts == "one two three four f"


def test_a_text_that_cannot_be_read_ends_its_request_alone():
    """An id that the tokenizer does not know, as padded vocabularies have them."""
    engine, _ = scripted_engine([[70, 71], [200, 71]], dataclasses.replace(TOKENIZER, backend=Bytes(unknown=200)))
    with engine:
        good, bad, stopping = (engine.submit(prompt(number), max_new_tokens=6) for number in (0, 1, 1))
        searched = engine.submit(prompt(1), max_new_tokens=6, stop_texts=("x",))
        assert [piece.text for piece in stopping if piece.text] == []
        for handle in (bad, stopping, searched):
            assert handle.result(timeout=60).reason == "error" and "200" in handle.completion.error
        assert good.result(timeout=60).text == "FGFGFG"
    assert engine.metrics.recoveries == 0


def test_waiting_has_a_limit():
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    engine._advance = lambda: False
    handle = engine.submit(prompt(1), max_new_tokens=20)
    with pytest.raises(TimeoutError, match="request 1 has not ended within 0.01 seconds"):
        handle.result(timeout=0.01)


def test_a_tokenizer_brings_its_stop_tokens():
    engine, _ = scripted_engine([[70, 71, 3, 72]], TOKENIZER)
    assert engine.submit(prompt(0), max_new_tokens=20).result().ids == (70, 71, 3)
    assert engine.submit(prompt(0), max_new_tokens=4, stop_ids=()).result().ids == (70, 71, 3, 72)


def test_prometheus_reads_the_counters():
    client = pytest.importorskip("prometheus_client", reason="needs the package prometheus-client (extra `serve`)")
    engine, _ = scripted_engine(SCRIPT, TOKENIZER)
    registry = client.CollectorRegistry()
    registry.register(PrometheusMetrics(engine.metrics))
    engine.submit(prompt(1), max_new_tokens=20).result()
    run_until_idle(engine)
    text = client.generate_latest(registry).decode()
    assert "dspark_emitted_tokens_total 20.0" in text and 'dspark_finished_total{reason="budget"} 1.0' in text
    assert "dspark_waiting 0.0" in text and f"dspark_rounds_total {engine.metrics.rounds}.0" in text
