"""Loss masks and answered sequences on disk."""

import dataclasses
import json

import jinja2
import numpy as np
import pytest

from dspark_jax.data import (
    DOMAINS,
    FIELD_DTYPES,
    ChatTemplate,
    chatml_template,
    complete_chat,
    gemma4_template,
    load_token_sequences,
    loss_mask,
    most_frequent_ids,
    qwen_template,
    save_token_sequences,
)
from tests.answered_texts import make_sequences, random_sequences

TEMPLATES = {"qwen": qwen_template(), "gemma4": gemma4_template()}
WHOLE = ChatTemplate("A:", "\n")


def toy_tokenizer(special_tokens):
    """The character-level vocabulary of the golden cases."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]

    def tokenize(text):
        ids, at = [], 0
        while at < len(text):
            special = next((token for token in special_tokens if text.startswith(token, at)), None)
            ids.append(special_tokens.index(special) if special else len(special_tokens) + characters.index(text[at]))
            at += len(special or text[at])
        return ids

    return tokenize


def same(left, right):
    return all(np.array_equal(getattr(left, field), getattr(right, field)) for field in FIELD_DTYPES)


# Loss masks


def test_the_loss_mask_of_templated_chats_is_the_reference_s_token_by_token(golden):
    """[E6] Every golden chat, of both templates and cut or not: the same ids, and the same tokens in the loss."""
    stored = json.loads((golden / "units" / "loss_mask_cases.json").read_text())
    tokenize = toy_tokenizer(stored["special_tokens"])
    assert len(stored["cases"]) == 12
    for case in stored["cases"]:
        template = TEMPLATES[case["template"]]
        text = jinja2.Template(case["jinja"], keep_trailing_newline=True).render(messages=complete_chat(case["conversation"], template))
        ids, mask = loss_mask(text, tokenize, template, case["max_length"])
        assert ids.tolist() == case["input_ids"]
        assert mask.tolist() == [bool(value) for value in case["loss_mask"]]


def test_an_unclosed_answer_is_in_the_loss_up_to_the_end_of_the_text():
    ids, mask = loss_mask("A:xy\nU:z\nA:w", lambda text: [ord(c) for c in text], WHOLE, 100)
    assert "".join(chr(i) for i in ids[mask]) == "xy\nw"


def test_a_chat_without_an_answer_has_no_loss():
    assert not loss_mask("U:hello\n", lambda text: [ord(c) for c in text], WHOLE, 100)[1].any()


def test_chatml_leaves_the_newline_behind_the_closing_mark_out_of_the_loss():
    text = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nR<|im_end|>\n"
    _, mask = loss_mask(text, lambda text: [ord(c) for c in text], chatml_template(), 1000)
    assert "".join(c for c, kept in zip(text, mask, strict=True) if kept) == "R<|im_end|>"


def test_a_prefix_that_is_there_already_is_not_put_in_twice():
    chat = [{"role": "assistant", "content": gemma4_template().excluded_prefix + "Hi"}]
    assert complete_chat(chat, gemma4_template()) == chat


@pytest.mark.parametrize(
    ("message", "error"), [({"role": "tool", "content": ""}, "role.*'tool'.*assistant"), ({"role": "user"}, "content.*None")]
)
def test_a_chat_with_a_bad_message_is_refused(message, error):
    with pytest.raises(ValueError, match=error):
        complete_chat([message], qwen_template())


def test_a_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_length is 0"):
        loss_mask("A:x", lambda text: [1] * len(text), WHOLE, 0)


# Sequences on disk


def test_sequences_come_back_as_they_were_saved_and_files_are_joined_in_order(tmp_path):
    first, second = random_sequences(7, seed=1), random_sequences(4, seed=2)
    save_token_sequences(tmp_path / "a.npz", first)
    save_token_sequences(tmp_path / "b.npz", second)
    assert same(load_token_sequences(tmp_path / "a.npz"), first)
    both = load_token_sequences([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert same(both.select(np.arange(11) < 7), first)
    assert same(both.select(np.arange(11) >= 7), second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_an_interrupted_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    first = random_sequences(5)
    save_token_sequences(tmp_path / "a.npz", first)

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        save_token_sequences(tmp_path / "a.npz", random_sequences(3))
    assert same(load_token_sequences(tmp_path / "a.npz"), first)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(
    ("field", "values", "error"),
    [
        ("tokens", np.full(20, 7, np.int32), "dtype of tokens is 'int32'; allowed: uint16 or uint32"),
        ("tokens", np.full((20, 1), 7, np.uint16), "number of axes of tokens is 2"),
        ("tokens", np.full(20, 900, np.uint16), r"tokens\[0\] is 900; allowed: 0 to 899"),
        ("offsets", np.array([0, 12, 21]), r"first and last of offsets is \(0, 21\); allowed: \(0, 20\)"),
        ("offsets", np.array([], np.int64), r"first and last of offsets is \(\)"),
        ("offsets", np.array([0, 0, 20]), r"lengths by offsets\[0\] is 0; allowed: 1 to 20"),
        (
            "answer_start",
            np.array([6], np.int16),
            "length of answer_start is 1; allowed: 2, one per sequence",
        ),
        ("answer_start", np.array([6, 8], np.int16), r"answer_start\[1\] is 8; allowed: 0 to 7"),
        ("answer_end", np.array([13, 8], np.int16), r"answer_end\[0\] is 13; allowed: 1 to 12"),
        ("finished", np.array([0, 1], np.int8), "dtype of finished is 'int8'; allowed: bool"),
        ("domain", np.array([0, 3], np.int8), r"domain\[1\] is 3; allowed: 0 to 2"),
        ("temperature", np.array([-1, 0], np.int8), r"temperature\[0\] is -1; allowed: 0 to 2"),
        ("heldout", np.array([0, 2], np.int8), r"heldout\[1\] is 2; allowed: 0 to 1"),
        ("source", np.array([-2, 0], np.int32), r"source\[0\] is -2; allowed: -1 to"),
    ],
)
def test_a_bad_field_of_a_file_is_named_with_its_value_and_what_is_allowed(tmp_path, field, values, error):
    sequences = make_sequences([12, 8])
    arrays = {name: getattr(sequences, name) for name in FIELD_DTYPES}
    np.savez(tmp_path / "bad.npz", **{**arrays, field: values})
    with pytest.raises(ValueError, match=f"bad.npz.*{error}"):
        load_token_sequences(tmp_path / "bad.npz", vocab_size=900 if values.max(initial=0) == 900 else 1000)
    if values.max(initial=0) != 900:
        with pytest.raises(ValueError, match=error):
            save_token_sequences(tmp_path / "never.npz", dataclasses.replace(sequences, **{field: values}))
        assert not (tmp_path / "never.npz").exists()


def test_a_file_that_is_missing_cut_short_or_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="absent.npz.*existing"):
        load_token_sequences(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match="at least one file"):
        load_token_sequences([])
    save_token_sequences(tmp_path / "a.npz", random_sequences(5))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3, np.uint16))
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name in ("cut.npz", "text.npz", "other.npz", "single.npy"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            load_token_sequences(tmp_path / name)


def test_a_selection_needs_one_truth_value_per_sequence():
    with pytest.raises(ValueError, match="mask's length is 4; allowed: 5"):
        random_sequences(5).select(np.ones(4, np.bool_))


# The given answers of SmolLM2


def test_the_given_answers_of_smollm2_are_what_their_card_says(shared):
    sequences = load_token_sequences([shared / "smollm2" / f"smollm2_onpolicy_{part}.npz" for part in (0, 1)], vocab_size=49_152)
    assert len(sequences) == 2 * 16_375
    assert len(sequences.tokens) == 6_056_302 + 5_949_908
    assert sequences.lengths.max() == 512
    answer_tokens = sequences.answer_end.astype(np.int64) - sequences.answer_start
    rows = {
        ("maths", 0, 0): (2_048, 640_626, 456_159),
        ("maths", 2, 0): (4_096, 1_576_781, 1_205_904),
        ("code", 1, 0): (3_072, 780_701, 573_813),
        ("chat", 1, 0): (4_255, 1_625_619, 1_243_651),
        ("maths", 0, 1): (256, 85_365, 61_588),
        ("code", 0, 1): (192, 52_904, 40_095),
        ("chat", 2, 1): (256, 105_842, 83_116),
    }
    for (domain, temperature, heldout), expected in rows.items():
        mask = (sequences.domain == DOMAINS.index(domain)) & (sequences.temperature == temperature) & (sequences.heldout == heldout)
        assert (int(mask.sum()), int(sequences.lengths[mask].sum()), int(answer_tokens[mask].sum())) == expected


def test_the_most_frequent_ids_of_texts():
    """Ascending; of equally frequent ids the lowest; ids that do not occur come last."""
    tokens = np.array([5, 5, 5, 2, 2, 7, 9], np.uint16)
    sequences = dataclasses.replace(make_sequences([7]), tokens=tokens)
    assert most_frequent_ids(sequences, 3, 10).tolist() == [2, 5, 7]
    assert most_frequent_ids(sequences, 5, 10).tolist() == [0, 2, 5, 7, 9]
    for count in (0, 11):
        with pytest.raises(ValueError, match=f"count is {count}; allowed: 1 to vocab_size 10"):
            most_frequent_ids(sequences, count, 10)
