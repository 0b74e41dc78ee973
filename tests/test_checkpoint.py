"""A run that is stopped and resumed is the run that was not stopped, and damage on disk costs one checkpoint at most."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint import CheckpointWriter, restore_checkpoint, save_checkpoint, saved_steps
from dspark_jax.checksums import checksums
from dspark_jax.losses import DraftLossConfig
from dspark_jax.sharding import batch_sharding, make_mesh, replicated
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from tests.linear_drafter import LinearDrafter

STATE = {"weight": jnp.arange(6.0).reshape(2, 3), "step": jnp.asarray(4, jnp.int32), "rng": jax.random.key(7)}


def restored(folder, like):
    found = restore_checkpoint(folder, like)
    assert found is not None
    return found


def same_bits(have, want):
    def raw(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    pairs = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    return all(raw(a).dtype == raw(b).dtype and raw(a).tobytes() == raw(b).tobytes() for a, b in pairs)


def test_n_and_n_steps_are_bit_for_bit_two_n_steps(tmp_path):
    """[E7] Parameters, moments, random numbers and the position in the data all come back."""
    target = DenseTarget(DenseConfig(61, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
    drafter = LinearDrafter()
    optimizer = OptimizerConfig(8)
    config = TrainConfig(optimizer, DraftLossConfig(chunk=64), num_anchors=3)
    target_params, params = jax.jit(target.init)(jax.random.key(1)), jax.jit(drafter.init)(jax.random.key(2))
    texts = np.random.default_rng(0).integers(0, 61, (16, 12))

    def start():
        return init_train_state(jax.random.key(3), params, optimizer), {"epoch": 0, "row": 0}

    def run(state, position, steps):
        for _ in range(steps):
            rows = np.random.default_rng(position["epoch"]).permutation(16)[position["row"] : position["row"] + 4]
            ids = jnp.asarray(texts[rows], jnp.int32)
            state, _ = train_step(target, drafter, config, state, target_params, ids, ids > 9)
            following = position["row"] + 4
            position = {"epoch": position["epoch"] + following // 16, "row": following % 16}
        return state, position

    straight, _ = run(*start(), 8)
    state, position = run(*start(), 4)
    save_checkpoint(tmp_path, int(state.step), state, position, {"num_anchors": 3})
    del state, position
    found = restored(tmp_path, jax.eval_shape(lambda: start()[0]))
    assert found.step == 4 and found.config == {"num_anchors": 3} and found.position == {"epoch": 1, "row": 0}
    resumed, _ = run(found.state, found.position, 4)
    assert same_bits(resumed, straight)


def test_the_last_few_steps_are_kept_and_a_step_can_be_written_again(tmp_path):
    for step in (1, 2, 3, 3):
        save_checkpoint(tmp_path, step, STATE | {"step": jnp.asarray(step)}, {"row": step}, {}, keep=2)
    assert saved_steps(tmp_path) == [2, 3]
    found = restored(tmp_path, STATE)
    assert found.step == 3 and found.position == {"row": 3} and int(found.state["step"]) == 3


def damage_by_truncation(folder):
    largest = max((folder / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def damage_by_absence(folder):
    shutil.rmtree(folder / "state")


def damage_by_other_arrays(folder):
    other = folder.parent.parent / "other"
    save_checkpoint(other, 9, STATE | {"weight": STATE["weight"] + 1}, {}, {})
    shutil.rmtree(folder / "state")
    shutil.copytree(other / "9" / "state", folder / "state")


@pytest.mark.parametrize("damage", [damage_by_truncation, damage_by_absence, damage_by_other_arrays])
def test_a_damaged_step_is_passed_over_with_a_message(tmp_path, caplog, damage):
    folder = tmp_path / "run"
    for step in (1, 2):
        save_checkpoint(folder, step, STATE, {"row": step}, {})
    damage(folder / "2")
    with caplog.at_level(logging.WARNING, "dspark_jax.checkpoint"):
        found = restored(folder, STATE)
    assert found.step == 1 and same_bits(found.state, STATE)
    assert "checkpoint of step 2" in caplog.text and "trying the one before it" in caplog.text


def test_a_step_that_was_being_written_when_the_run_died_does_not_count(tmp_path):
    save_checkpoint(tmp_path, 1, STATE, {}, {})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp-1")
    assert saved_steps(tmp_path) == [1]
    assert restored(tmp_path, STATE).step == 1


def test_a_host_that_comes_late_does_not_find_the_folder_that_another_has_just_made(tmp_path, monkeypatch):
    """Hosts that went different ways here would wait for each other in different places."""
    save_checkpoint(tmp_path, 1, STATE, {}, {})
    monkeypatch.setattr("dspark_jax.checkpoint.multihost_utils.process_allgather", lambda found: np.asarray([found, False]))
    assert saved_steps(tmp_path) == [] and restore_checkpoint(tmp_path, STATE) is None


def test_where_nothing_was_saved_there_is_nothing_to_resume(tmp_path):
    assert restore_checkpoint(tmp_path / "absent", STATE) is None
    assert restore_checkpoint(tmp_path, STATE) is None


def test_a_checkpoint_of_another_state_is_refused_with_the_reason(tmp_path):
    save_checkpoint(tmp_path, 1, STATE, {}, {})
    with pytest.raises(ValueError, match=r"step 1: array \['weight'\] is float32\[2, 3\], and float32\[3, 3\] is wanted"):
        restore_checkpoint(tmp_path, STATE | {"weight": jnp.zeros((3, 3))})
    with pytest.raises(ValueError, match=r"step 1: array \['another'\] is absent, and float32\[3\] is wanted"):
        restore_checkpoint(tmp_path, {"another": jnp.zeros(3)})


def test_arrays_come_back_in_the_sharding_that_is_asked_for(tmp_path):
    save_checkpoint(tmp_path, 1, STATE, {}, {})
    wanted = replicated(make_mesh(data=8))
    found = restored(tmp_path, jax.device_put(STATE, wanted))
    assert found.state["weight"].sharding.is_equivalent_to(wanted, 2) and same_bits(found.state, STATE)


def test_steps_go_on_and_give_their_arrays_away_while_a_checkpoint_is_written(tmp_path):
    """What is on disk in the end is the state at the time of `save`, although its buffers were reused before it was written."""
    grow = jax.jit(lambda state: state | {"weight": state["weight"] + 1, "step": state["step"] + 1}, donate_argnums=0)
    state = {"weight": jnp.zeros((1000, 1000)), "step": jnp.zeros((), jnp.int32)}
    with CheckpointWriter(tmp_path, keep=3) as writer:
        for step in (1, 2, 3):
            state = grow(state)
            writer.save(step, state, {"row": step}, {"seed": 1}, calibration={"kind": "constant", "step": step})
            for _ in range(5):
                state = grow(state)
    for step in (3, 2, 1):
        found = restored(tmp_path, state)
        assert found.step == step and found.calibration == {"kind": "constant", "step": step}
        expected = 6.0 * step - 5.0
        assert (np.asarray(found.state["weight"]) == expected).all() and int(found.state["step"]) == expected
        shutil.rmtree(tmp_path / str(step))


def test_a_write_that_fails_in_the_background_raises_at_the_end(tmp_path, monkeypatch):
    def full_disk(self, step):
        raise OSError(f"no space left for step {step}")

    with pytest.raises(OSError, match="no space left for step 1"), CheckpointWriter(tmp_path) as writer:
        monkeypatch.setattr(type(writer._manager), "_finalize_checkpoint", full_disk)
        writer.save(1, STATE, {}, {})


def test_a_run_that_went_back_to_an_older_step_writes_over_the_later_ones(tmp_path):
    """Else the newest step would forever be the one that could not be read, and later saves would be passed over without a word."""
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, STATE, {"row": step}, {})
    damage_by_truncation(tmp_path / "3")
    assert restored(tmp_path, STATE).step == 2
    save_checkpoint(tmp_path, 2, STATE, {"row": 20}, {})
    assert saved_steps(tmp_path) == [1, 2]
    assert restored(tmp_path, STATE).position == {"row": 20}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_checksum_does_not_depend_on_the_mesh_and_sees_any_changed_entry(dtype):
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 6)), dtype)
    before = checksums({"x": values})["['x']"]
    assert checksums({"x": jax.device_put(values, batch_sharding(make_mesh(data=4, fsdp=2)))})["['x']"] == before
    changed = {
        checksums({"x": values.at[row, column].set(1 - values[row, column] if dtype != "bool" else ~values[row, column])})["['x']"]
        for row in (0, 3, 7)
        for column in (0, 5)
    }
    assert len(changed) == 6 and before not in changed
    assert checksums({"x": values[::-1]})["['x']"] != before, "the order counts"


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(tmp_path, 1, STATE, {}, {}, keep=0)
