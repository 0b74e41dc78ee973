"""The training loop as two processes with four devices each: the run of one process, read and written by both."""

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint import restore_checkpoint
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.sharded_training import sharded_train_state
from experiments.train_drafter import run_mesh, train
from experiments.training_log import read_lines
from tests.training_host import TIMEOUT, quick_compilation, start_host, tiny_run, write_run_inputs


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_on_two_hosts(folder, out, mesh, **changes) -> list[list[np.ndarray]]:
    """Start both hosts and wait for them; gives what each saw of every batch. A host that fails shows what it printed."""
    task = {"coordinator": f"localhost:{free_port()}", "num_hosts": 2, "out": out, "mesh": mesh, "total_steps": 3, "wait_in": 0}
    tasks = [task | {"host": host, "changes": changes, "seen": str(folder / f"{out}.seen_{host}.json")} for host in (0, 1)]
    hosts = [start_host(each, folder / f"{out}.task_{each['host']}.json", num_devices=4) for each in tasks]
    watchdog = threading.Timer(TIMEOUT, lambda: [host.kill() for host in hosts])
    watchdog.start()
    try:
        # Side by side: a host whose pipe is full stands still, and the other one waits for it.
        with ThreadPoolExecutor(2) as readers:
            printed = [text for text, _ in readers.map(lambda host: host.communicate(), hosts)]
    finally:
        watchdog.cancel()
    for number, host in enumerate(hosts):
        assert host.returncode == 0, f"host {number} of 2 ended with {host.returncode}:\n{printed[number][-8000:]}"
    assert "step 3/3" in printed[0] and "step" not in printed[1], "the first host alone prints"
    return [[np.asarray(rows) for rows in json.loads((folder / f"{out}.seen_{host}.json").read_text())] for host in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two_processes")
    write_run_inputs(path)
    with quick_compilation():
        yield path


@pytest.fixture(scope="module")
def alone(folder):
    """The last state and the records of the run in this process, on one device."""
    state = train(tiny_run(folder, "alone"))
    return jax.device_get(state.params), read_lines(folder / "alone" / "metrics.jsonl")


# Both hosts and this process compile everything: a minute on two cores.
@pytest.mark.slow
def test_two_processes_are_one_run(folder, alone):
    """Parameters are split across both hosts (fsdp 4 x tensor 2): losses, rows of the batches, records and the checkpoint."""
    params, want = alone
    first, second = run_on_two_hosts(folder, "both", (1, 4, 2), measure_every=3, measure_prompts=2, measure_tokens=4)

    have = read_lines(folder / "both" / "metrics.jsonl")
    assert [record["step"] for record in have] == [1, 2, 3]
    for ours, theirs in zip(have, want, strict=True):
        for name in ("loss", "grad_norm", "accept_rate", "accepted_length", "blocks"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=2e-6, err_msg=name)
    held_out = read_lines(folder / "both" / "held_out.jsonl")[-1]
    want_held_out = read_lines(folder / "alone" / "held_out.jsonl")[-1]
    np.testing.assert_allclose(held_out["sampled"]["accept_rate"], want_held_out["sampled"]["accept_rate"], rtol=1e-4)
    assert 1.0 <= held_out["measured"]["greedy"] <= 4.0

    for mine, others in zip(first, second, strict=True):
        assert mine.shape == others.shape == (8, 32)
        both = np.concatenate([mine, others])
        assert len(np.unique(both, axis=0)) == 16, "sixteen different texts: no row is read twice"

    checkpoints = folder / "both" / "checkpoints"
    parts = {path.name for path in (checkpoints / "3" / "state").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= parts, "each host has written its own part"
    run = tiny_run(folder, "both")
    like = sharded_train_state(run_mesh(run), DSparkDrafter(run.drafter), run.train, seed=1)
    found = restore_checkpoint(checkpoints, like)
    assert found is not None and found.step == 3
    for ours, theirs in zip(jax.tree.leaves(found.state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert (folder / "both" / "drafter" / "model.safetensors").exists()
