"""The stream of training batches: which sequences come together, in which order, packed or not, and where it goes on."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.batches import TokenBatches, packed_rows, read_ahead
from tests.answered_texts import make_sequences, random_sequences


def take(batches, number, state=None):
    return list(itertools.islice(batches.stream(state), number))


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


# Several sequences in a row


@given(lengths=st.lists(st.integers(1, 40), max_size=80), row_length=st.integers(40, 90), open_rows=st.integers(1, 8))
def test_packed_rows_hold_every_sequence_once_and_no_more_than_fits(lengths, row_length, open_rows):
    rows = packed_rows(np.asarray(lengths, np.int64), row_length, open_rows)
    assert sorted(itertools.chain(*(row.tolist() for row in rows))) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= row_length for row in rows)


def test_packing_leaves_little_padding_and_refuses_what_is_longer_than_a_row():
    lengths = np.random.default_rng(0).integers(20, 400, 2000)
    assert lengths.sum() > 0.98 * 1024 * len(packed_rows(lengths, 1024))
    with pytest.raises(ValueError, match="lengths is 41; allowed: at most row_length 40"):
        packed_rows(np.asarray([3, 41]), 40)


def test_a_packed_batch_holds_its_sequences_one_behind_the_other():
    sequences = random_sequences(60)
    batches = TokenBatches(sequences, 4, (64,), min_loss_tokens=1, packed=True)
    seen = []
    for batch, _ in take(batches, batches.batches_per_epoch):
        rows = iter(batch.rows)
        assert batch.segment is not None
        for ids, mask, segment in zip(batch.ids, batch.loss_mask, batch.segment, strict=True):
            assert (np.diff(segment[segment > 0]) >= 0).all() and not ids[segment == 0].any() and not mask[segment == 0].any()
            for number in range(1, segment.max() + 1):
                row = next(rows)
                own = segment == number
                assert ids[own].tolist() == sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1]].tolist()
                assert np.flatnonzero(mask[own]).tolist() == list(range(sequences.answer_start[row], sequences.answer_end[row]))
        assert next(rows, None) is None
        seen += batch.rows.tolist()
    assert len(set(seen)) == len(seen) > 50


def test_shards_of_packed_batches_are_slices_and_epochs_differ():
    sequences = random_sequences(80)
    settings: Any = {"batch_size": 4, "lengths": (64,), "min_loss_tokens": 1, "packed": True}
    whole = take(TokenBatches(sequences, **settings), 12)
    shards = [take(TokenBatches(sequences, **settings, shard_index=index, shard_count=2), 12) for index in range(2)]
    for step, (batch, state) in enumerate(whole):
        parts: list[Any] = [shard[step][0].segment for shard in shards]
        assert np.array_equal(np.concatenate(parts), np.asarray(batch.segment))
        assert all(shard[step][1] == state for shard in shards)
    per_epoch = TokenBatches(sequences, **settings).batches_per_epoch
    assert not np.array_equal(whole[0][0].ids, whole[per_epoch][0].ids)
    with pytest.raises(ValueError, match=r"lengths is \(32, 64\); allowed: one length, since rows are packed"):
        TokenBatches(sequences, **settings | {"lengths": (32, 64)})


# Grain


@pytest.mark.parametrize("packed", [False, True])
def test_grain_reads_the_same_batches_ahead_and_goes_on_from_its_state(packed):
    """[E7] The state, through JSON, continues the stream bit by bit."""
    pytest.importorskip("grain")
    batches = TokenBatches(random_sequences(40), 4, (64,), min_loss_tokens=1, packed=packed)
    expected = [batch.ids for batch, _ in take(batches, 9)]
    iterator = iter(read_ahead(batches))
    found = [next(iterator).ids for _ in range(5)]
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(read_ahead(batches))
    again.set_state(state)
    found += [next(again).ids for _ in range(4)]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_orbax_saves_where_grain_stands(tmp_path):
    """[E7]"""
    grain, ocp = pytest.importorskip("grain"), pytest.importorskip("orbax.checkpoint")
    batches = TokenBatches(random_sequences(40), 4, (64,), min_loss_tokens=1)
    iterator = iter(read_ahead(batches))
    for _ in range(3):
        next(iterator)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        expected = next(iterator)
        again = iter(read_ahead(batches))
        manager.restore(3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(again)))
    np.testing.assert_array_equal(next(again).ids, expected.ids)
