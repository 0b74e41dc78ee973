"""Models to Orbax and back: the same tensors, the same config, nothing half-written."""

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from dspark_jax.sharding import make_mesh, parameter_shardings
from dspark_jax.weights import LENT
from experiments.convert import export_model, import_model, read_imported

FOLDERS = ["qwen3_target_tied", "gemma4_unified_target", "dspark_qwen3_rnn", "dflash_gemma4", "eagle3_gemma4"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_comes_back_bit_by_bit(golden, tmp_path, name):
    """A drafter leaves out the two tensors that are its target's; everything else is there, and so is every field of the config."""
    import_model(str(golden / name), tmp_path / "orbax")
    export_model(tmp_path / "orbax", tmp_path / "again")
    with (
        safe_open(golden / name / "model.safetensors", framework="np") as before,
        safe_open(tmp_path / "again" / "model.safetensors", framework="np") as after,
    ):
        lent = set(LENT) if "target" not in name else set()
        assert set(before.keys()) - lent == set(after.keys())
        for key in after.keys():
            np.testing.assert_array_equal(before.get_tensor(key), after.get_tensor(key), err_msg=key)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (golden / name, tmp_path / "again")]
    assert configs[0] == configs[1]


def test_an_orbax_folder_restores_into_a_mesh(golden, tmp_path):
    import_model(str(golden / "dspark_qwen3_rnn"), tmp_path / "orbax")
    whole = read_imported(tmp_path / "orbax")
    sharded = read_imported(tmp_path / "orbax", parameter_shardings(make_mesh(fsdp=4, tensor=2), whole.model))
    weight = sharded.params["fc"]["weight"]
    assert len(weight.sharding.device_set) == 8 and not weight.is_fully_replicated
    np.testing.assert_array_equal(weight, whole.params["fc"]["weight"])


def test_what_is_no_model_or_would_be_overwritten_is_refused(golden, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"out is .*there, which exists"):
        import_model(str(golden / "dspark_qwen3_rnn"), tmp_path / "there")
    with pytest.raises(ValueError, match="dtype is 'floaty'; allowed: float32, bfloat16, float16"):
        import_model(str(golden / "dspark_qwen3_rnn"), tmp_path / "out", dtype="floaty")
    with pytest.raises(ValueError, match=r"has no file dspark_jax.json"):
        export_model(golden / "dspark_qwen3_rnn", tmp_path / "out")
    shutil.copytree(golden / "qwen3_target_tied", tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="supported: LlamaForCausalLM"):
        import_model(str(tmp_path / "odd"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "there"]
