"""Prompts that the project makes itself, and the log of the answers that the target gives."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import jinja2
import pytest

from dspark_jax.data import chatml_template, gemma4_template, load_token_sequences, save_token_sequences
from experiments.answers import (
    APPENDED_TOGETHER,
    Answer,
    AnswerConfig,
    AnswerLog,
    Request,
    answer_requests,
    fill_answers,
    sampled_turns,
    sequences_from_answers,
    temperature_class,
    turn_requests,
)
from experiments.prompts import Prompt, chat_prompts, code_prompts, library_functions, maths_prompts, split_of, user_header
from experiments.word_problems import TEMPLATES, word_problem

MODULES = ("textwrap", "heapq", "statistics", "json", "shutil", "fractions")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GEMMA = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"


def texts(prompts):
    return [prompt.text for prompt in prompts]


def fingerprint(prompts):
    return hashlib.sha256(repr(prompts).encode()).hexdigest()


# Word problems


def test_word_problems_have_positive_integer_answers_and_no_holes():
    rng = Random(0)
    problems = [word_problem(rng) for _ in range(4000)]
    assert all(type(problem.answer) is int and problem.answer > 0 for problem in problems)
    assert not any(set(problem.text) & set("{}") for problem in problems)
    assert all(problem.text[0] == problem.text[0].upper() and problem.text[-1] in ".?" for problem in problems)


def test_word_problems_are_varied():
    """At least a dozen kinds, each in several wordings, and hardly a text twice in 4,000."""
    rng = Random(0)
    assert len(TEMPLATES) >= 12
    assert all(len(wordings) >= 2 for template in TEMPLATES for wordings in template.sentences)
    assert len({word_problem(rng).text for _ in range(4000)}) > 3990


def test_divisions_in_word_problems_leave_no_remainder():
    """Redrawn values: wherever an answer divides, multiplying back gives the numbers of the text."""
    for number, template in enumerate(TEMPLATES):
        for seed in range(200):
            values = template.draw(Random(f"{number} {seed}"))
            answer = template.answer(values)
            if "rest_days" in values:
                assert answer * values["rest_days"] + values["daily"] * values["days"] == values["pages"]
            elif "friends" in values:
                assert answer * values["friends"] == values["first"] + values["second"] + values["third"]
            elif "inflow" in values:
                assert values["start"] + answer * (values["inflow"] - values["leak"]) == values["volume"]
            elif "earned" in values:
                assert values["start"] + answer * (values["earned"] - values["spent"]) == values["price"]
            elif "off" in values and "price" in values:
                assert 100 * (answer - values["fee"]) == values["n"] * values["price"] * (100 - values["off"])
            elif "trays" in values:
                assert values["part"] * (values["trays"] * values["each"] - answer - values["later"]) == values["trays"] * values["each"]
            elif "rows" in values:
                assert values["part"] * (answer + values["sold"]) == values["rows"] * values["each"]


# Splits


def test_training_and_held_out_prompts_share_no_text_and_no_library_function():
    maths = [maths_prompts(300, split, seed=5, heldout_share=0.5) for split in ("train", "heldout")]
    code = [code_prompts(split, seed=5, heldout_share=0.5, modules=MODULES) for split in ("train", "heldout")]
    for train, heldout in (maths, code):
        assert train and heldout
        assert not set(texts(train)) & set(texts(heldout))
        assert not {prompt.key for prompt in train} & {prompt.key for prompt in heldout}
        assert {prompt.split for prompt in train} == {"train"} and {prompt.split for prompt in heldout} == {"heldout"}
    functions = [{prompt.key.rpartition("-")[0] for prompt in prompts} for prompts in code]
    assert not functions[0] & functions[1]


def test_a_split_is_decided_by_the_seed_and_has_about_the_share_asked_for():
    subjects = [f"subject {number}" for number in range(4000)]
    first, again, other = ([split_of(subject, seed, 0.25) for subject in subjects] for seed in (1, 1, 2))
    assert first == again != other
    # Six standard deviations of a binomial with 4,000 draws.
    assert abs(first.count("heldout") - 1000) < 165


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_that_leaves_a_split_empty_is_refused(share):
    with pytest.raises(ValueError, match="heldout_share is .*; allowed: above 0 and below 1"):
        maths_prompts(3, "train", heldout_share=share)


def test_unknown_splits_and_domains_are_refused():
    with pytest.raises(ValueError, match="split is 'test'; allowed: train, heldout"):
        maths_prompts(3, "test")
    with pytest.raises(ValueError, match="split is 'test'; allowed: train, heldout"):
        code_prompts("test", modules=MODULES)
    with pytest.raises(ValueError, match="domain is 'law'; allowed: maths, code, chat"):
        Prompt("law", "text", "train", "key")
    with pytest.raises(ValueError, match="count is -1"):
        maths_prompts(-1, "train")


# Prompts


def test_maths_prompts_are_a_function_of_the_seed_and_a_larger_count_only_adds():
    prompts = maths_prompts(200, "train", seed=3)
    assert len(set(texts(prompts))) == len({prompt.key for prompt in prompts}) == 200
    assert maths_prompts(50, "train", seed=3) == prompts[:50]
    assert not set(texts(maths_prompts(200, "train", seed=4))) & set(texts(prompts))


def test_code_prompts_are_made_from_signatures_and_first_paragraphs_of_the_standard_library():
    functions = library_functions(MODULES)
    assert {function.module for function in functions} == set(MODULES)
    push = next(function for function in functions if function.name == "heappush")
    assert (push.signature, push.summary) == ("(heap, item, /)", "Push item onto heap, maintaining the heap invariant.")
    prompts = code_prompts("train", modules=MODULES) + code_prompts("heldout", modules=MODULES)
    assert len(prompts) == len(set(texts(prompts))) == len({prompt.key for prompt in prompts}) == 5 * len(functions)
    assert sum("heappush(heap, item, /)" in text for text in texts(prompts)) == 5
    assert any("statistics.median" in text for text in texts(prompts))


def test_another_seed_holds_out_other_library_functions_and_orders_the_tasks_anew():
    def heldout(seed):
        return [prompt.key for prompt in code_prompts("heldout", seed=seed, heldout_share=0.5, modules=MODULES)]

    assert heldout(1) == heldout(1)
    assert set(heldout(1)) != set(heldout(2))
    both = set(heldout(1)) & set(heldout(2))
    assert both and [key for key in heldout(1) if key in both] != [key for key in heldout(2) if key in both]


def test_the_whole_standard_library_gives_thousands_of_tasks():
    train, heldout = code_prompts("train"), code_prompts("heldout")
    assert len(train) > 5000 and len(heldout) > 200
    assert not any(" at 0x" in text for text in texts(train + heldout))


def test_prompts_do_not_depend_on_the_process():
    """Another process with another hash seed writes the same prompts in the same order."""
    script = (
        "import hashlib; from experiments.prompts import code_prompts, maths_prompts;"
        "prompts = maths_prompts(50, 'train') + code_prompts('train') + code_prompts('heldout');"
        "print(hashlib.sha256(repr(prompts).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == fingerprint(maths_prompts(50, "train") + code_prompts("train") + code_prompts("heldout"))


@pytest.mark.parametrize(
    ("source", "template", "expected"),
    [
        (CHATML, chatml_template("Be kind."), "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"),
        (GEMMA, gemma4_template(), "<|turn>user\n"),
    ],
)
def test_the_user_header_ends_where_the_user_speaks(source, template, expected):
    compiled = jinja2.Template(source, keep_trailing_newline=True)
    assert user_header(lambda messages: compiled.render(messages=messages), template) == expected


def test_a_template_without_the_user_s_words_gives_no_header():
    with pytest.raises(ValueError, match="render drops the user's words"):
        user_header(lambda messages: "fixed", chatml_template())


def test_sampled_user_turns_are_cut_at_their_end_and_short_blank_and_repeated_ones_dropped():
    def decode(ids):
        return "".join(chr(i) for i in ids)

    def turn(text, *ending):
        return [ord(c) for c in text] + list(ending)

    turns = [
        turn("How are you?", 2, 65, 66),
        turn("Hi", 2),
        turn("    ", 2),
        turn("How are you?", 1, 65),
        turn(" never ends"),
        turn("", 2, 65, 66, 67),
    ]
    prompts = chat_prompts(turns, decode, end_ids=(0, 1, 2))
    assert [(prompt.text, prompt.key, prompt.domain) for prompt in prompts] == [
        ("How are you?", "chat-0-0", "chat"),
        ("never ends", "chat-0-4", "chat"),
    ]
    assert all(prompt.split == split_of(prompt.text, 0, 1 / 16) for prompt in prompts)


# The log of answers


def answer(number, **changes):
    fields = {"id": f"a{number}", "tokens": (5, 6, number), "answer_start": 2, "finished": True, "domain": "maths"}
    return Answer(**{**fields, "temperature": 0.2, "heldout": False, "source": number, **changes})


def test_a_log_cut_anywhere_in_its_last_line_goes_on_without_loss_or_repetition(tmp_path):
    path = tmp_path / "log.jsonl"
    AnswerLog.open(path).append([answer(0), answer(1)]).append([answer(2)])
    whole = path.read_bytes()
    begin = whole[:-1].rfind(b"\n") + 1
    for length in range(begin, len(whole) + 1):
        path.write_bytes(whole[:length])
        log = AnswerLog.open(path)
        survived = length == len(whole)
        assert log.finished == ({"a0", "a1", "a2"} if survived else {"a0", "a1"})
        log = log if survived else log.append([answer(2)])
        assert path.read_bytes() == whole
        assert log.read() == [answer(0), answer(1), answer(2)]


def test_a_log_that_does_not_exist_is_empty(tmp_path):
    log = AnswerLog.open(tmp_path / "log.jsonl")
    assert (log.finished, log.read()) == (frozenset(), [])
    assert not (tmp_path / "log.jsonl").exists()


def test_an_id_can_not_be_appended_twice_and_nothing_is_written_then(tmp_path):
    log = AnswerLog.open(tmp_path / "log.jsonl").append([answer(0)])
    for answers in ([answer(1), answer(0)], [answer(1), answer(1)]):
        with pytest.raises(ValueError, match="id is 'a[01]', which .*log.jsonl holds already"):
            log.append(answers)
    assert log.read() == [answer(0)]


@pytest.mark.parametrize("line", ["no json", "[1]", '{"id": "a"}', '{"id": "b", "tokens": 3}', "3"])
def test_a_damaged_line_is_named(tmp_path, line):
    log = AnswerLog.open(tmp_path / "log.jsonl").append([answer(0)])
    with open(log.path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="log.jsonl, line 2 is no answer .*answer_start"):
        AnswerLog.open(log.path)


def test_a_log_that_repeats_an_id_is_refused(tmp_path):
    log = AnswerLog.open(tmp_path / "log.jsonl").append([answer(0)])
    log.path.write_bytes(2 * log.path.read_bytes())
    with pytest.raises(ValueError, match="repeats 1 of its ids"):
        AnswerLog.open(log.path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"answer_start": 3}, "answer_start of a0 is 3; allowed: 0 to 2"),
        ({"domain": "law"}, "domain of a0 is 'law'"),
        ({"temperature": -0.1}, "temperature is -0.1; allowed: at least 0"),
    ],
)
def test_bad_answers_are_refused(changes, error):
    with pytest.raises(ValueError, match=error):
        answer(0, **changes)


def test_answers_become_the_sequences_that_training_reads(tmp_path):
    answers = [
        answer(7, tokens=(1, 2, 3, 4), answer_start=1, domain="chat", source=-1, heldout=True, finished=False, temperature=1.0),
        answer(9, domain="code", temperature=0.0),
    ]
    save_token_sequences(tmp_path / "a.npz", sequences_from_answers(answers))
    sequences = load_token_sequences(tmp_path / "a.npz")
    assert (sequences.tokens.dtype.name, sequences.tokens.tolist()) == ("uint16", [1, 2, 3, 4, 5, 6, 9])
    assert (sequences.answer_start.tolist(), sequences.answer_end.tolist()) == ([1, 2], [4, 3])
    assert (sequences.domain.tolist(), sequences.temperature.tolist()) == ([2, 1], [2, 0])
    assert (sequences.heldout.tolist(), sequences.finished.tolist()) == ([1, 0], [False, True])
    assert sequences.source.tolist() == [-1, 9]
    wide = sequences_from_answers([answer(0, tokens=(1, 2, 150_000))])
    assert (wide.tokens.dtype.name, wide.tokens.tolist()) == ("uint32", [1, 2, 150_000])


def test_sequences_are_made_of_distinct_answers_and_of_ids_only():
    for answers, error in (([], "answers is empty"), ([answer(0)] * 2, "repeat 1"), ([answer(0, tokens=(1, 2, -3))], "from -3 to 2")):
        with pytest.raises(ValueError, match=error):
            sequences_from_answers(answers)


def test_temperatures_fall_into_the_three_classes_of_the_given_files():
    assert [temperature_class(temperature) for temperature in (0.0, 0.2, 0.3, 1.0)] == [0, 1, 1, 2]


# Filling the log


class Interrupted(Exception):
    pass


class FixedTarget:
    """Says the same whatever it is asked."""

    def __init__(self, sampled):
        self.sampled = sampled

    def __call__(self, asks):
        return enumerate(self.sampled)


class CountingTarget:
    """Answers by a hash of the ask, the last first; fails behind so many answers."""

    def __init__(self, fails_behind=None):
        self.asks, self.fails_behind = [], fails_behind

    def __call__(self, asks):
        self.asks += asks
        for count, number in enumerate(reversed(range(len(asks)))):
            if count == self.fails_behind:
                raise Interrupted
            ask = asks[number]
            rng = Random(f"{ask.prompt_ids} {ask.temperature} {ask.seed}")
            yield number, [rng.randrange(3, 100) for _ in range(rng.randrange(ask.max_new_tokens))] + [2]


def requests(count):
    return [Request(f"r{number}", (10, 11, 12, number), "code", number % 2 == 1, number) for number in range(count)]


CONFIG = AnswerConfig(max_length=20, max_new_tokens=12, seed=1)


def in_order(log):
    return sorted(log.read(), key=lambda answer: answer.id)


def test_stopping_and_resuming_changes_no_answer_and_asks_for_none_twice(tmp_path):
    """Interrupted behind any answer, and killed while any line was written."""
    whole = in_order(fill_answers(AnswerLog.open(tmp_path / "whole.jsonl"), requests(10), CountingTarget(), CONFIG, progress=False))
    assert [answer.id for answer in whole] == [f"r{number}@0.2" for number in range(10)]
    for given in range(10):
        path = tmp_path / f"log{given}.jsonl"
        with pytest.raises(Interrupted):
            fill_answers(AnswerLog.open(path), requests(10), CountingTarget(fails_behind=given), CONFIG, progress=False)
        assert len(AnswerLog.open(path).finished) == given
        with open(path, "ab") as file:
            file.write(json.dumps(dataclasses.asdict(whole[0])).encode()[:25])
        target = CountingTarget()
        log = fill_answers(AnswerLog.open(path), requests(10), target, CONFIG, progress=False)
        assert in_order(log) == whole and len(target.asks) == 10 - given
        assert fill_answers(log, requests(10), CountingTarget(fails_behind=0), CONFIG, progress=False) == log


def test_answers_are_on_disk_while_others_are_still_being_written(tmp_path):
    path, seen = tmp_path / "log.jsonl", []

    def serve(asks):
        for number, answer in CountingTarget()(asks):
            seen.append(len(AnswerLog.open(path).finished))
            yield number, answer

    fill_answers(AnswerLog.open(path), requests(2 * APPENDED_TOGETHER + 1), serve, CONFIG, progress=False)
    assert seen == [0] * APPENDED_TOGETHER + [APPENDED_TOGETHER] * APPENDED_TOGETHER + [2 * APPENDED_TOGETHER]


def test_every_answer_has_a_seed_of_its_own_and_the_room_there_is(tmp_path):
    target = CountingTarget()
    made = [*requests(10), Request("long", (1,) * 15, "code", False, 0)]
    fill_answers(AnswerLog.open(tmp_path / "log.jsonl"), made, target, CONFIG, progress=False)
    assert [ask.max_new_tokens for ask in target.asks] == [12] * 10 + [5]
    assert {ask.temperature for ask in target.asks} == {0.2}
    assert len({ask.seed for ask in target.asks}) == 11
    assert all(0 <= ask.seed < 2**31 for ask in target.asks)


def test_an_answer_ends_at_its_first_stop_token_or_is_cut_at_the_greatest_length(tmp_path):
    sampled = [[7, 8, 2], [7, 0, 8, 9], [1], [7] * 30, [7] * 15 + [2], [7] * 16 + [2]]
    config = AnswerConfig(max_length=20, temperature=0.0)
    log = fill_answers(AnswerLog.open(tmp_path / "log.jsonl"), requests(6), FixedTarget(sampled), config, progress=False)
    answers = log.read()
    assert [list(answer.tokens[4:]) for answer in answers] == [[7, 8, 2], [7, 2], [2], [7] * 16, [7] * 15 + [2], [7] * 16]
    assert [answer.finished for answer in answers] == [True, True, True, False, True, False]
    assert [answer.heldout for answer in answers] == [False, True] * 3
    assert {(answer.answer_start, answer.temperature, answer.domain) for answer in answers} == {(4, 0.0, "code")}


def test_one_log_holds_the_answers_at_several_temperatures(tmp_path):
    log = fill_answers(AnswerLog.open(tmp_path / "log.jsonl"), requests(2), CountingTarget(), CONFIG, progress=False)
    warm = AnswerConfig(temperature=1.0, max_length=20, max_new_tokens=12)
    log = fill_answers(log, requests(2), CountingTarget(), warm, progress=False)
    assert log.finished == {"r0@0.2", "r1@0.2", "r0@1", "r1@1"}


def test_prompts_become_requests_unless_they_are_too_long():
    prompts = [Prompt("maths", "abc", "train", "m"), Prompt("chat", "abcd", "heldout", "c"), Prompt("code", "abcde", "heldout", "k")]
    made = answer_requests(prompts, lambda text: [ord(c) for c in text], max_prompt_tokens=4, samples=2)
    assert [request.id for request in made] == ["m/0", "m/1", "c/0", "c/1"]
    assert [(request.heldout, request.source) for request in made[::2]] == [(False, 0), (True, -1)]
    assert made[0].prompt_ids == (97, 98, 99)


def test_the_target_writes_chat_prompts_itself_through_the_same_log(tmp_path):
    """Turns come out in the order of their numbers, also beyond ten, and become prompts."""
    config = AnswerConfig(temperature=1.0, max_new_tokens=6)

    def serve(asks):
        assert {ask.prompt_ids for ask in asks} == {(1, 50)}
        for number in reversed(range(len(asks))):
            yield number, [*(100 + int(digit) for digit in str(asks[number].seed)[:5]), 100 + number, 2]

    log = fill_answers(AnswerLog.open(tmp_path / "turns.jsonl"), turn_requests([1, 50], 12), serve, config, progress=False)
    turns = sampled_turns(log.read())
    assert [turn[-2] for turn in turns] == [100 + number for number in range(12)]
    prompts = chat_prompts(turns, lambda ids: "".join(chr(i) for i in ids), end_ids=(0, 1, 2))
    assert [prompt.key for prompt in prompts] == [f"chat-0-{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("made", "sampled", "error"),
    [
        (requests(3), [(0, [5]), (1, [6])], "serve gave 2 answers; allowed: one for each of 3"),
        (requests(2), [(0, [5]), (1, [])], "serve gave 0 tokens for request r1"),
        (requests(2), [(0, [5]), (0, [5])], "serve gave 1 tokens for request r0; allowed: at least 1, and once"),
        (requests(2) * 2, [(0, [5])] * 4, "ids of requests repeat"),
        ([Request("r", (1,) * 20, "code", False, 0)], [(0, [5])], "length of prompt r is 20; allowed: 1 to 19"),
    ],
)
def test_bad_requests_and_bad_answers_of_the_target_are_refused(tmp_path, made, sampled, error):
    with pytest.raises(ValueError, match=error):
        fill_answers(AnswerLog.open(tmp_path / "log.jsonl"), made, lambda asks: sampled, CONFIG, progress=False)


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}, {"max_length": 1}])
def test_bad_settings_of_sampling_are_refused(settings):
    (field,) = settings
    with pytest.raises(ValueError, match=f"{field} is .*; allowed: at least"):
        AnswerConfig(**settings)
