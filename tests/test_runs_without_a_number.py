"""A run whose loss is no longer a number stops, says which texts did it, and leaves nothing of that step behind."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.batches import TokenBatches
from dspark_jax.checkpoint import restore_checkpoint, saved_steps
from dspark_jax.data import load_token_sequences, save_token_sequences
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.sharded_training import sharded_train_state
from experiments.stored_features import training_texts
from experiments.train_drafter import run_mesh, train
from experiments.training_log import read_lines
from tests.tiny_models import write_target
from tests.training_host import quick_compilation, tiny_run, write_run_inputs

POISON = 63
"""A token whose embedding is not a number."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of steps on eight texts each, a checkpoint behind every one; the poison is in one text of the second batch alone."""
    folder = tmp_path_factory.mktemp("runs_without_a_number")
    write_run_inputs(folder)
    write_target(folder / "poisoned", tie_word_embeddings=False)
    weights = load_file(folder / "poisoned" / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = np.nan
    save_file(weights, folder / "poisoned" / "model.safetensors")
    texts = load_token_sequences(folder / "texts.npz")
    tokens = np.where(texts.tokens == POISON, POISON - 1, texts.tokens).astype(np.uint16)
    poisoned = int(TokenBatches(training_texts(texts), batch_size=8, lengths=(32,))[1].rows[3])
    # Training texts come first in the file, so that their numbers are those of the file.
    tokens[texts.offsets[poisoned]] = POISON
    save_token_sequences(folder / "poisoned.npz", dataclasses.replace(texts, tokens=tokens))
    plain = tiny_run(folder, "out")
    changes = {"target": str(folder / "poisoned"), "data": (folder / "poisoned.npz",), "batch_size": 8, "checkpoint_every": 1}
    with quick_compilation():
        yield dataclasses.replace(plain, **changes)


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_texts(run):
    with pytest.raises(FloatingPointError) as raised:
        train(run)
    second = TokenBatches(training_texts(load_token_sequences(run.data)), batch_size=8, lengths=(32,))[1]
    assert str(raised.value) == f"loss is nan at step 2; samples of the batch: {', '.join(map(str, second.rows))}"

    assert saved_steps(run.out / "checkpoints") == [1]
    state = sharded_train_state(run_mesh(run), DSparkDrafter(run.drafter), run.train, seed=1)
    found = restore_checkpoint(run.out / "checkpoints", state)
    assert found is not None and found.position == {"epoch": 0, "index": 1}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found.state.params, found.state.opt_state)))
    assert [record["step"] for record in read_lines(run.out / "metrics.jsonl")] == [1]
    assert not (run.out / "drafter").exists() and not (run.out / "held_out.jsonl").exists()
