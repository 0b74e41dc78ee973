"""The target's own answers to prompts of files: every turn once, in the context of its own words, through any interruption."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dspark_jax.batches import TokenBatches
from dspark_jax.data import DOMAINS, chatml_template, gemma4_template, load_token_sequences
from dspark_jax.prompt_files import read_conversations
from experiments import regenerate as module
from experiments.answers import AnswerConfig, AnswerLog
from experiments.regenerate import Regenerate, Turns, chat_turns, main, regenerate, require_same_sampling, stop_ids_of

CLOSE = 3
RECORDS = (
    {"turns": ["one", "two", "three"], "id": "long", "category": "math"},
    {"turns": ["alone"], "id": "short", "category": "code"},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "ask"}], "id": "chat"},
    {
        "messages": [
            {"role": "user", "content": "old"},
            {"role": "assistant", "content": "replaced"},
            {"role": "user", "content": "new"},
        ],
        "id": "pair",
    },
)
TURNS = {"long#0", "long#1", "long#2", "short#0", "chat#0", "pair#0", "pair#1"}
CONFIG = AnswerConfig(0.5, max_length=200, max_new_tokens=20, stop_ids=(1, CLOSE), closing_id=CLOSE)


def codes(text):
    """A character a token."""
    return [ord(character) for character in text]


def text_of(ids):
    return "".join(chr(i) for i in ids)


PLAIN = Turns(lambda messages: codes("".join(f"{one['role'][0]}:{one['content']};" for one in messages) + "a:"), text_of)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return Regenerate(prompts=(path,), out=tmp_path / "out", max_length=200, heldout_share=0.3, domains={"math": "maths"})


def echo(calls, stop_after=None):
    """A target that says how many tokens it has read, and remembers what it was asked."""

    def serve(asks):
        for number, ask in enumerate(asks):
            if stop_after is not None and len(calls) == stop_after:
                raise KeyboardInterrupt
            calls.append(ask)
            yield number, [*codes(f"<{len(ask.prompt_ids)}.{ask.seed % 97}>"), CLOSE, 99]

    return serve


def answer_all(run, tmp_path, serve, turns=PLAIN, config=CONFIG):
    log = AnswerLog.open(tmp_path / "answers.jsonl")
    return regenerate(log, read_conversations(run.prompts), turns, serve, config, run, progress=False)


def by_id(log):
    return {answer.id: answer for answer in log.read()}


def test_every_turn_is_answered_once_in_the_context_of_the_targets_own_answers(run, tmp_path):
    calls = []
    answers = by_id(answer_all(run, tmp_path, echo(calls)))
    assert set(answers) == {f"{turn}@0.5" for turn in TURNS}
    said = {name: text_of(answer.tokens[answer.answer_start : -1]) for name, answer in answers.items()}
    prompts = {name: text_of(answer.tokens[: answer.answer_start]) for name, answer in answers.items()}
    assert all(answer.tokens[-1] == CLOSE and answer.finished for answer in answers.values())
    assert prompts["long#2@0.5"] == f"u:one;a:{said['long#0@0.5']};u:two;a:{said['long#1@0.5']};u:three;a:"
    assert prompts["pair#1@0.5"] == f"u:old;a:{said['pair#0@0.5']};u:new;a:"
    assert prompts["chat#0@0.5"] == "s:S;u:ask;a:"


def test_turns_of_one_depth_are_asked_for_together_and_with_seeds_of_their_own(run, tmp_path):
    calls = []
    answer_all(run, tmp_path, echo(calls))
    # Four first turns, two second ones, a third.
    assert [text_of(ask.prompt_ids).count("a:") for ask in calls] == [1, 1, 1, 1, 2, 2, 3]
    assert {ask.temperature for ask in calls} == {0.5} and len({ask.seed for ask in calls}) == 7


@pytest.mark.parametrize("answered", range(7))
def test_stopping_and_going_on_changes_no_token_and_samples_no_answer_twice(run, tmp_path, answered):
    (tmp_path / "whole").mkdir()
    whole = by_id(answer_all(run, tmp_path / "whole", echo([])))
    calls, more = [], []
    with pytest.raises(KeyboardInterrupt):
        answer_all(run, tmp_path, echo(calls, stop_after=answered))
    assert by_id(answer_all(run, tmp_path, echo(more))) == whole
    assert len(calls) + len(more) == 7
    assert answer_all(run, tmp_path, echo([], stop_after=0)).finished == set(whole)


def test_a_line_lost_in_the_middle_of_writing_is_answered_again(run, tmp_path):
    whole = by_id(answer_all(run, tmp_path, echo([])))
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert by_id(answer_all(run, tmp_path, echo([]))) == whole


def test_a_conversation_ends_where_an_answer_was_cut_or_where_no_room_is_left(run, tmp_path):
    def cut(asks):
        return enumerate([codes("endless") if text_of(ask.prompt_ids) == "u:one;a:" else [*codes("x"), CLOSE] for ask in asks])

    answers = by_id(answer_all(run, tmp_path, cut))
    assert set(answers) == {f"{turn}@0.5" for turn in TURNS - {"long#1", "long#2"}}
    assert not answers["long#0@0.5"].finished
    (tmp_path / "small").mkdir()
    small = dataclasses.replace(run, max_length=18)
    answers = by_id(answer_all(small, tmp_path / "small", echo([]), config=dataclasses.replace(CONFIG, max_length=18)))
    assert set(answers) == {f"{turn}@0.5" for turn in ("long#0", "short#0", "chat#0", "pair#0")}


def test_prompts_may_be_added_but_not_changed_under_their_ids(run, tmp_path):
    before = by_id(answer_all(run, tmp_path, echo([])))
    path = run.prompts[0]
    path.write_text(path.read_text() + json.dumps({"turns": ["more"], "id": "added"}) + "\n")
    after = by_id(answer_all(run, tmp_path, echo([])))
    assert set(after) - set(before) == {"added#0@0.5"} and before.items() <= after.items()
    path.write_text(path.read_text().replace("alone", "changed"))
    with pytest.raises(ValueError, match="has an answer short#0@0.5 to other words than the prompts now have"):
        answer_all(run, tmp_path, echo([]))


def test_domains_come_from_categories_and_splits_from_ids(run, tmp_path):
    answers = by_id(answer_all(run, tmp_path, echo([])))
    assert {name.split("#")[0]: answer.domain for name, answer in answers.items()} == {
        "long": "maths",
        "short": "code",
        "chat": "chat",
        "pair": "chat",
    }
    assert len({answer.heldout for name, answer in answers.items() if name.startswith("long")}) == 1
    (tmp_path / "none").mkdir()
    none = by_id(answer_all(dataclasses.replace(run, heldout_share=0), tmp_path / "none", echo([])))
    assert not any(answer.heldout for answer in none.values())


class FakeTokenizer:
    """ChatML in characters; the marks are tokens of their own."""

    MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|turn>", "<turn|>")
    stop_ids = (2,)
    special_tokens = {"bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}
    chat_template = "chatml"

    def encode(self, text):
        ids = []
        while text:
            mark = next((mark for mark in self.MARKS if text.startswith(mark)), None)
            ids.append(ord(text[0]) + 10 if mark is None else self.MARKS.index(mark))
            text = text[len(mark or "x") :]
        return ids

    def decode(self, ids):
        return "".join(self.MARKS[i] if i < 10 else chr(i - 10) for i in ids)

    def id_of(self, token):
        return self.MARKS.index(token)

    def apply_chat_template(self, messages):
        return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages) + "<|im_start|>assistant\n"


TOKENIZER: Any = FakeTokenizer()


def test_an_answer_ends_at_its_mark_a_header_or_a_special_token():
    stop_ids, closing = stop_ids_of(TOKENIZER, chatml_template())
    assert (stop_ids, closing) == ((0, 1, 2), 2)
    assert stop_ids_of(TOKENIZER, gemma4_template()) == ((0, 1, 2, 3, 4), 4)


def test_what_stands_in_front_of_every_answer_is_given_and_not_asked():
    template = dataclasses.replace(chatml_template(), excluded_prefix="(none)")
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "v"}]
    text = TOKENIZER.decode(chat_turns(TOKENIZER, template).encode(chat))
    assert text.endswith("<|im_start|>assistant\n(none)") and "assistant\n(none)x<|im_end|>" in text
    assert TOKENIZER.decode(chat_turns(TOKENIZER, chatml_template()).encode(chat)).endswith("<|im_start|>assistant\n")


@pytest.fixture
def fake_target(monkeypatch):
    """The command without a model: a tokenizer of characters, and a target that answers with its prompt's length."""
    asked = []

    def serve(asks):
        for number, ask in enumerate(asks):
            asked.append(ask)
            yield number, [*TOKENIZER.encode(f"I have read {len(ask.prompt_ids)} tokens."), 2]

    monkeypatch.setattr(module, "load_tokenizer", lambda target: TOKENIZER)
    monkeypatch.setattr(module, "serve_with", lambda *settings: serve)
    return asked


def test_the_command_writes_texts_that_training_takes(run, fake_target):
    run = dataclasses.replace(run, max_length=600, batch_size=4)
    with Console(quiet=True) as console:
        main(run, console)
        texts = load_token_sequences(run.out / "texts.npz")
        main(run, console)
    assert len(fake_target) == 3 * len(TURNS)
    assert len(texts) == 3 * len(TURNS)
    assert sorted(set(texts.temperature.tolist())) == [0, 1, 2] and sorted(set(texts.domain.tolist())) == [0, 1, 2]
    words = [texts.tokens[texts.offsets[row] + texts.answer_start[row] : texts.offsets[row + 1]] for row in range(len(texts))]
    prompt = [int(texts.answer_start[row]) for row in range(len(texts))]
    assert [TOKENIZER.decode(ids[:-1]) for ids in words] == [f"I have read {length} tokens." for length in prompt]
    assert all(ids[-1] == 2 for ids in words) and texts.finished.all()
    assert DOMAINS[texts.domain[0]] == "chat", "in the order of their ids"
    batch, _ = next(TokenBatches(texts, batch_size=2, lengths=(600,)).stream())
    assert batch.loss_mask.any(axis=1).all()


def test_prompts_that_were_taken_away_are_not_in_the_texts(run, fake_target):
    run = dataclasses.replace(run, max_length=600, temperatures=(0.0,))
    with Console(quiet=True) as console:
        main(run, console)
        path = run.prompts[0]
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"long"' not in line))
        main(run, console)
    assert len(load_token_sequences(run.out / "texts.npz")) == len(TURNS) - 3
    assert len(AnswerLog.open(run.out / "answers.jsonl").finished) == len(TURNS)


@pytest.mark.parametrize("changes", [{"target": "other"}, {"top_p": 0.5}, {"max_length": 100}, {"seed": 1}, {"heldout_share": 0.1}])
def test_a_folder_with_answers_of_another_sampling_is_refused(run, changes):
    require_same_sampling(run)
    require_same_sampling(dataclasses.replace(run, batch_size=5, temperatures=(0.0,)))
    with pytest.raises(ValueError, match=f"its answers were sampled with another {next(iter(changes))}"):
        require_same_sampling(dataclasses.replace(run, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "llama"}, "template is 'llama'; allowed: chatml, qwen, gemma4"),
        ({"domain": "law"}, "domain is 'law'; allowed: maths, code, chat"),
        ({"domains": {"writing": "prose"}}, "domain is 'prose'"),
        ({"temperatures": ()}, r"temperatures is \(\)"),
        ({"temperatures": (1.0, 1.0)}, r"temperatures is \(1.0, 1.0\); allowed: one or more, each once"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Regenerate(**{"prompts": (), **changes})


def test_an_answer_s_seed_depends_on_the_run_s_seed(run, tmp_path):
    calls, other = [], []
    answer_all(run, tmp_path, echo(calls))
    (tmp_path / "other").mkdir()
    answer_all(run, tmp_path / "other", echo(other), config=dataclasses.replace(CONFIG, seed=1))
    assert not {ask.seed for ask in calls} & {ask.seed for ask in other}
    assert np.all([0 <= ask.seed < 2**31 for ask in calls])
