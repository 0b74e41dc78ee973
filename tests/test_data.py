"""Loss masks, answered sequences on disk and the stream of training batches."""

import dataclasses
import itertools
import json

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data import (
    DOMAINS,
    FIELD_DTYPES,
    ChatTemplate,
    TokenBatches,
    TokenSequences,
    chatml_template,
    complete_chat,
    gemma4_template,
    load_token_sequences,
    loss_mask,
    offsets_from_lengths,
    qwen_template,
    save_token_sequences,
)

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


def make_sequences(lengths, answer_lengths=None, seed=0):
    """Random sequences of these lengths whose answers are their last tokens; token 0 never occurs, so that padding shows."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    answer_lengths = [max(1, length // 2) for length in lengths] if answer_lengths is None else answer_lengths
    return TokenSequences(
        tokens=rng.integers(1, 1000, sum(lengths)).astype(np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=(np.asarray(lengths) - np.asarray(answer_lengths)).astype(np.int16),
        answer_end=np.asarray(lengths, np.int16),
        finished=rng.random(count) < 0.5,
        domain=rng.integers(0, 3, count).astype(np.int8),
        temperature=rng.integers(0, 3, count).astype(np.int8),
        heldout=rng.integers(0, 2, count).astype(np.int8),
        source=rng.integers(-1, 50, count).astype(np.int32),
    )


def random_sequences(count, longest=40, seed=0):
    return make_sequences(np.random.default_rng(seed).integers(2, longest + 1, count).tolist(), seed=seed)


def take(batches, number, state=None):
    return list(itertools.islice(batches.stream(state), number))


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


# Batches


def test_a_batch_holds_its_sequences_right_padded_with_the_answers_marked():
    sequences = random_sequences(20)
    batches = TokenBatches(sequences, batch_size=4, lengths=(32,), min_loss_tokens=1)
    for batch, _ in take(batches, 5):
        assert batch.ids.shape == batch.loss_mask.shape == (4, 32)
        assert (batch.ids.dtype, batch.loss_mask.dtype) == (np.int32, np.bool_)
        for ids, mask, row in zip(batch.ids, batch.loss_mask, batch.rows, strict=True):
            tokens = sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1]][:32]
            assert ids.tolist() == tokens.tolist() + [0] * (32 - len(tokens))
            assert np.flatnonzero(mask).tolist() == list(range(sequences.answer_start[row], min(32, sequences.answer_end[row])))


@pytest.mark.parametrize("lengths", [(40,), (10, 20, 40)])
def test_n_batches_and_n_after_a_restart_are_2n(lengths):
    """[E7] From every position of three epochs, the state (through JSON) continues the stream bit by bit."""
    sequences = random_sequences(30)
    batches = TokenBatches(sequences, batch_size=4, lengths=lengths, min_loss_tokens=2, window=3)
    whole = take(batches, 3 * batches.batches_per_epoch + 1)
    for position in range(1, len(whole)):
        state = json.loads(json.dumps(whole[position - 1][1]))
        again = take(TokenBatches(sequences, 4, lengths, min_loss_tokens=2, window=3), len(whole) - position, state)
        for (batch, after), (expected, expected_after) in zip(again, whole[position:], strict=True):
            assert np.array_equal(batch.ids, expected.ids)
            assert np.array_equal(batch.loss_mask, expected.loss_mask)
            assert after == expected_after


@given(
    count=st.integers(8, 60),
    batch_size=st.integers(1, 8),
    lengths=st.sampled_from([(40,), (25,), (10, 40), (8, 16, 24, 40)]),
    seed=st.integers(0, 5),
)
def test_an_epoch_has_every_sequence_once_but_for_the_last_part_of_a_batch(count, batch_size, lengths, seed):
    sequences = random_sequences(count, seed=seed)
    batches = TokenBatches(sequences, batch_size, lengths, seed=seed, min_loss_tokens=1, window=2)
    # Where the longest S cuts the whole answer off, the sequence is left out.
    usable = np.flatnonzero(np.minimum(sequences.answer_end, lengths[-1]) > sequences.answer_start)
    epoch = take(batches, batches.batches_per_epoch)
    rows = np.concatenate([batch.rows for batch, _ in epoch])
    assert len(np.unique(rows)) == len(rows) == len(usable) // batch_size * batch_size
    assert set(rows) <= set(usable)
    for batch, _ in epoch:
        longest = min(sequences.lengths[batch.rows].max(), lengths[-1])
        assert batch.ids.shape[1] == min(length for length in lengths if length >= longest)
    assert epoch[-1][1] == {"epoch": 1, "index": 0}


def test_epochs_and_seeds_have_different_orders_and_one_seed_the_same():
    sequences = random_sequences(64)

    def order(seed, epoch=0):
        batches = TokenBatches(sequences, 8, (40,), seed=seed, min_loss_tokens=1)
        return np.concatenate([batch.rows for batch, _ in take(batches, 8, {"epoch": epoch, "index": 0})]).tolist()

    assert order(3) == order(3)
    assert order(3) != order(4)
    assert order(3) != order(3, epoch=1)
    # Seed and epoch do not add up to the same permutation.
    assert order(4) != order(3, epoch=1)


def test_sorting_by_length_saves_padding_and_keeps_the_window():
    sequences = random_sequences(256)
    plain = take(TokenBatches(sequences, 8, (40,), min_loss_tokens=1), 32)
    sorted_ = take(TokenBatches(sequences, 8, (10, 20, 30, 40), min_loss_tokens=1, window=16), 32)
    assert sum(batch.ids.size for batch, _ in sorted_) < 0.75 * sum(batch.ids.size for batch, _ in plain)
    first, again = ({int(row) for batch, _ in batches[:16] for row in batch.rows} for batches in (plain, sorted_))
    assert first == again


def test_shards_are_slices_of_the_global_batch_and_agree_on_its_length():
    sequences = random_sequences(40)
    settings = {"batch_size": 8, "lengths": (10, 20, 40), "min_loss_tokens": 1}
    whole = take(TokenBatches(sequences, **settings), 9)
    shards = [take(TokenBatches(sequences, **settings, shard_index=index, shard_count=4), 9) for index in range(4)]
    for step, (batch, state) in enumerate(whole):
        assert np.array_equal(np.concatenate([shard[step][0].ids for shard in shards]), batch.ids)
        assert np.array_equal(np.concatenate([shard[step][0].loss_mask for shard in shards]), batch.loss_mask)
        assert all(shard[step][1] == state for shard in shards)


def test_sequences_with_too_few_answer_tokens_are_dropped():
    sequences = make_sequences([30, 30, 30, 30], answer_lengths=[13, 14, 15, 20])
    assert {int(row) for batch, _ in take(TokenBatches(sequences, 1, (30,)), 3) for row in batch.rows} == {1, 2, 3}
    # Cut to 28, the answers lose two tokens.
    assert TokenBatches(sequences, 1, (28,)).batches_per_epoch == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"batch_size": 0}, "batch_size is 0; allowed: at least 1"),
        ({"batch_size": 31}, "batch_size is 31; allowed: at most the 30 sequences"),
        ({"lengths": ()}, r"lengths is \(\)"),
        ({"lengths": (20, 10)}, r"lengths is \(20, 10\); allowed: ascending"),
        ({"shard_count": 3}, "shard_count is 3; allowed: divisors of batch_size 4"),
        ({"shard_count": 2, "shard_index": 2}, "shard_index is 2; allowed: 0 to 1"),
        ({"seed": -1}, "seed is -1"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_bad_settings_of_the_stream_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        TokenBatches(random_sequences(30), **{"batch_size": 4, "min_loss_tokens": 1, "lengths": (40,), **settings})


@pytest.mark.parametrize("state", [{"epoch": 0, "index": 7}, {"epoch": -1, "index": 0}, {"index": 0}])
def test_a_state_of_another_stream_is_refused(state):
    with pytest.raises(ValueError, match="state is .*; allowed: epoch at least 0 and index 0 to 6"):
        TokenBatches(random_sequences(30), 4, (40,), min_loss_tokens=1).stream(state)


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
