"""Hyper-connections: doubly stochastic mixing, the published formulas, and a start that is the plain residual."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.block_backbone import BlockBackbone
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.hyper_connections import Connection, HyperConnection, StreamMerge, expand, reconnect, sinkhorn
from dspark_jax.protocols import TrainBatch

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
N, WIDTH, EPS = 3, 5, 1e-6
PLAIN = DSparkConfig(31, 16, 24, 4, 2, 8, 30, (0,), 4, num_layers=2, block_size=3, markov_rank=4)


@pytest.mark.parametrize("size", [2, 4])
def test_mixing_matrices_are_doubly_stochastic(size):
    """Rows and columns sum to 1 within 1e-4 after the published 20 steps; the rows, which come last, to rounding.

    On logits of standard deviation 0.5; the wider they spread, the slower the columns converge (at 1 some need 30 steps).
    """
    logits = jnp.asarray(0.5 * np.random.default_rng(size).normal(size=(50, size, size)), jnp.float32)
    mix = np.asarray(jax.jit(sinkhorn)(logits))
    assert mix.min() >= 0
    np.testing.assert_allclose(mix.sum(-2), 1, atol=1e-4)
    np.testing.assert_allclose(mix.sum(-1), 1, atol=1e-6)
    expected = np.exp(np.asarray(logits, np.float64))
    for _ in range(20):
        expected = expected / expected.sum(-2, keepdims=True)
        expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(mix, expected, atol=1e-5)


def test_extreme_logits_give_a_finite_matrix_and_finite_gradients():
    logits = jnp.array([[300.0, -300.0], [-300.0, 300.0]])
    mix, gradient = jax.value_and_grad(lambda logits: jnp.square(sinkhorn(logits)).sum())(logits)
    assert float(mix) == pytest.approx(2.0)
    assert np.isfinite(np.asarray(gradient)).all()


def _random_params(module, *inputs):
    rng = np.random.default_rng(7)
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs)["params"])
    return jax.tree.map(lambda leaf: jnp.asarray(0.7 * rng.normal(size=leaf.shape), jnp.float32), nn.meta.unbox(boxed))


def test_reading_writing_and_mixing_are_what_the_formulas_say():
    """Against float64 loops over streams: sigmoid, 2 sigmoid and Sinkhorn of gate x projection of the normed streams + static part."""
    rng = np.random.default_rng(0)
    streams = rng.normal(size=(4, N, WIDTH)).astype(np.float32)
    output = rng.normal(size=(4, WIDTH)).astype(np.float32)
    module = HyperConnection(N, WIDTH, EPS, 1)
    params = _random_params(module, jnp.asarray(streams))
    read, connection = jax.jit(module.apply)({"params": params}, streams)
    after = np.asarray(reconnect(jnp.asarray(streams), connection, jnp.asarray(output)))
    fn, base, scale = (np.asarray(params[name], np.float64) for name in ("fn", "base", "scale"))
    for row in range(4):
        flat = streams[row].reshape(-1).astype(np.float64)
        flat = flat / np.sqrt((flat**2).mean() + EPS)
        dynamic = fn @ flat
        pre = 1 / (1 + np.exp(-(scale[0] * dynamic[:N] + base[:N])))
        post = 2 / (1 + np.exp(-(scale[1] * dynamic[N : 2 * N] + base[N : 2 * N])))
        mix = np.exp(scale[2] * dynamic[2 * N :] + base[2 * N :]).reshape(N, N)
        for _ in range(20):
            mix = mix / mix.sum(0)
            mix = mix / mix.sum(1, keepdims=True)
        np.testing.assert_allclose(np.asarray(read)[row], pre @ streams[row], **ACTIVATIONS)
        for stream in range(N):
            expected = sum(mix[stream, other] * streams[row, other] for other in range(N)) + post[stream] * output[row]
            np.testing.assert_allclose(after[row, stream], expected, **ACTIVATIONS)
    merge = StreamMerge(N, WIDTH, EPS)
    params = _random_params(merge, jnp.asarray(streams))
    merged = jax.jit(merge.apply)({"params": params}, streams)
    fn, base, scale = (np.asarray(params[name], np.float64) for name in ("fn", "base", "scale"))
    flat = streams.reshape(4, -1).astype(np.float64)
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + EPS)
    weights = 1 / (1 + np.exp(-(scale * (flat @ fn.T) + base)))
    np.testing.assert_allclose(np.asarray(merged), np.einsum("rn,rnd->rd", weights, streams), **ACTIVATIONS)


def test_the_mean_over_the_streams_passes_unchanged():
    """What makes the connection stable: without an output, mixing moves content between streams and neither adds nor loses any."""
    rng = np.random.default_rng(1)
    streams = jnp.asarray(rng.normal(size=(6, N, WIDTH)), jnp.float32)
    mix = sinkhorn(jnp.asarray(rng.normal(size=(6, N, N)), jnp.float32))
    after = reconnect(streams, Connection(jnp.ones((6, N)), mix), jnp.zeros((6, WIDTH)))
    np.testing.assert_allclose(np.asarray(after.mean(1)), np.asarray(streams.mean(1)), atol=1e-4)
    assert np.abs(np.asarray(after - streams)).max() > 0.1


# --- in a backbone


@pytest.fixture(scope="module")
def backbones():
    """A plain backbone and one of three streams as they are initialised, of equal weights where both have them; and their inputs."""
    rng = np.random.default_rng(2)
    batch = TrainBatch(
        ids=jnp.zeros((2, 9), jnp.int32),
        loss_mask=jnp.ones((2, 9), bool),
        features=jnp.asarray(rng.normal(size=(2, 9, 16)), jnp.float32),
        last_hidden=jnp.zeros((2, 9, 16)),
        anchors=jnp.array([[1, 4], [3, 8]], jnp.int32),
        keep=jnp.ones((2, 2), bool),
    )
    embeddings = jnp.asarray(rng.normal(size=(2, 2, 3, 16)), jnp.float32)
    plain, streamed = BlockBackbone(PLAIN), BlockBackbone(dataclasses.replace(PLAIN, streams=3))
    params = nn.meta.unbox(jax.jit(lambda key: streamed.init(key, embeddings, batch, method="initialise"))(jax.random.key(0))["params"])
    params = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if "_hc" in str(path) or "hc_" in str(path) else 8 * leaf, params)
    shared = {name: leaf for name, leaf in params.items() if name != "hc_head"}
    for name in ("layers_0", "layers_1"):
        shared[name] = {inner: leaf for inner, leaf in params[name].items() if inner not in ("attn_hc", "ffn_hc")}

    slopes = jnp.asarray(rng.normal(size=embeddings.shape), jnp.float32)

    def loss(params):
        hidden: Any = streamed.apply({"params": params}, embeddings, batch, method="train_hidden")
        return (hidden * slopes).sum(), hidden

    gradient = jax.jit(jax.grad(loss, has_aux=True))

    expected = jax.jit(lambda params: plain.apply({"params": params}, embeddings, batch, method="train_hidden"))(shared)
    return params, gradient, np.asarray(expected), np.asarray(embeddings)


def test_a_network_of_several_streams_starts_as_the_plain_one(backbones):
    """As initialised, streams stay equal and the output is that of plain residuals, although every layer moves it."""
    params, gradient_of, expected, embeddings = backbones
    _, hidden = gradient_of(params)
    np.testing.assert_allclose(np.asarray(hidden), expected, **ACTIVATIONS)
    normed = embeddings / np.sqrt((embeddings**2).mean(-1, keepdims=True))
    assert np.abs(expected - 8 * normed).max() > 1.0, "the layers do something"


def test_streams_part_as_soon_as_anything_is_trained(backbones):
    """Gradients are finite, reach readings and writings of every connection, and differ from stream to stream; the gates follow."""
    params, gradient_of, _, _ = backbones
    gradient, _ = gradient_of(params)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))
    connections = [(f"layers_{i}", name) for i in range(2) for name in ("attn_hc", "ffn_hc")]
    for layer, name in connections:
        base = np.asarray(gradient[layer][name]["base"])
        assert np.ptp(base[:3]) > 1e-3 * np.abs(base[:3]).max() > 0, "readings"
    for layer, name in connections[:-1]:
        base = np.asarray(gradient[layer][name]["base"])
        assert np.ptp(base[3:6]) > 1e-3 * np.abs(base[3:6]).max() > 0, "writings, for as long as somebody reads them"
    moved = jax.tree.map(lambda leaf, slope: leaf - 1e-2 * slope, params, gradient)
    second, _ = gradient_of(moved)
    for layer, name in connections:
        assert np.abs(np.asarray(second[layer][name]["scale"][:2])).min() > 0
        assert np.abs(np.asarray(second[layer][name]["fn"])).max() > 0
    assert np.abs(np.asarray(second["layers_1"]["attn_hc"]["base"][6:])).max() > 1e-6, "mixing matters once streams differ"


def test_expanded_streams_all_hold_the_embedding():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(np.asarray(expand(x, 4)), np.repeat(np.asarray(x)[:, None], 4, axis=1))
