"""A run that a signal stops writes its checkpoint, ends well, and goes on to the very bits of the run that nobody stopped."""

import json
import signal
import threading

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint import saved_steps
from experiments.train_drafter import train
from experiments.training_log import read_lines
from tests.training_host import TIMEOUT, quick_compilation, start_host, tiny_run, write_run_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stopped_runs")
    write_run_inputs(path)
    with quick_compilation():
        yield path


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(folder, number):
    """[E7] The signal comes in the third step of five, while checkpoints are written every second step."""
    out = f"stopped_by_{number.name}"
    task = {"coordinator": None, "out": out, "mesh": [1, 1, 1], "total_steps": 5, "wait_in": 3, "changes": {}}
    host = start_host(task | {"seen": str(folder / f"{out}.seen.json")}, folder / f"{out}.task.json", num_devices=1)
    watchdog = threading.Timer(TIMEOUT, host.kill)
    watchdog.start()
    assert host.stdin is not None and host.stdout is not None
    printed = ""
    try:
        for line in host.stdout:
            printed += line
            if line == "waiting\n":
                host.send_signal(number)
                host.stdin.write("\n")
                host.stdin.flush()
        assert host.wait() == 0, printed
    finally:
        watchdog.cancel()
        host.kill()
    assert f"{number.name} came: stopped after step 3" in " ".join(printed.split())
    assert saved_steps(folder / out / "checkpoints") == [2, 3]
    assert not (folder / out / "drafter").exists()
    assert len(json.loads((folder / f"{out}.seen.json").read_text())) == 3

    resumed, whole = (train(tiny_run(folder, name, total_steps=5)) for name in (out, f"whole_{out}"))
    assert int(resumed.step) == 5
    ours, theirs = (jax.tree.leaves((state.params, state.opt_state)) for state in (resumed, whole))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert [record["step"] for record in read_lines(folder / out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert (folder / out / "drafter").exists()
