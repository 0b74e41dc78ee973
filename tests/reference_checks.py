"""How our numbers are held against those of the reference: training batches, gradients, metrics, decoding traces."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.losses import draft_loss
from dspark_jax.protocols import FlatTokens, TrainBatch
from dspark_jax.verify import accept_probs, residual_probs

ACTIVATIONS: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-4}


def batch_of(arrays, length=None):
    """A stored batch, padded to `length` tokens."""

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, 0 if length is None else length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return TrainBatch(
        ids=padded(arrays["input_ids"]),
        loss_mask=padded(arrays["loss_mask"] == 1),
        features=padded(arrays["target_hidden_states"]),
        last_hidden=padded(arrays["target_last_hidden_states"]),
        anchors=jnp.asarray(arrays["anchor_positions"]),
        keep=jnp.asarray(arrays["block_keep_mask"]),
    )


def reference_names(tree):
    """{"layers.0.self_attn.q_proj.weight": array} from a parameter tree."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(key.key for key in path).replace("layers_", "layers."): leaf for path, leaf in paths}


def assert_same_gradients(gradients, arrays, prefix):
    named = reference_names(gradients)
    wanted = {name[len(prefix) :]: arrays[name] for name in arrays if name.startswith(prefix)}
    frozen = {name for name in named if name.endswith(".layer_scalar")}
    assert named.keys() - frozen == wanted.keys()
    assert not any(named[name].any() for name in frozen), "a buffer in the reference: it is never trained"
    for name, want in wanted.items():
        assert np.linalg.norm(named[name] - want) <= 1e-4 * np.linalg.norm(want), name


@functools.partial(jax.jit, static_argnames=("drafter", "config"))
def evaluate(drafter, params, head, teacher_head, batch, config, denominators=None):
    """Loss, terms and gradients."""

    def objective(params):
        return draft_loss(drafter, params, head, teacher_head, batch, config, denominators)

    (loss, terms), gradients = jax.value_and_grad(objective, has_aux=True)(params)
    return loss, terms, gradients


def check_metrics(metrics, path, *, with_loss):
    wanted = json.loads(path.read_text())
    names = {
        "tau_probabilistic": "accepted_length",
        "confidence_cumprod_bias": "survival_bias",
        **{name: name for name in ("ce_loss", "l1_loss", "confidence_loss", "confidence_abs_error", "confidence_bias")},
        **({"loss": "loss"} if with_loss else {}),
    }
    compared = {theirs: ours for theirs, ours in names.items() if f"train/{theirs}" in wanted}
    assert {"tau_probabilistic", "ce_loss"} <= compared.keys()
    for theirs, ours in compared.items():
        np.testing.assert_allclose(metrics[ours], wanted[f"train/{theirs}"], err_msg=ours, **ACTIVATIONS)
    np.testing.assert_allclose(
        metrics["accept_rate"], [wanted[f"train/accept_rate@{k}"] for k in range(len(metrics["accept_rate"]))], **ACTIVATIONS
    )


def assert_round(trace, index, row, before, state, stats):
    assert before[row] - 1 == trace["start"][index]
    assert stats.anchor[row] == trace["anchor_token"][index]
    np.testing.assert_array_equal(
        stats.drafts[row], trace["all_draft_tokens" if "all_draft_tokens" in trace else "verify_draft_tokens"][index]
    )
    if "confidence_logits" in trace:
        np.testing.assert_allclose(stats.confidence_logits[row], trace["confidence_logits"][index], atol=1e-4, rtol=1e-3)
    assert stats.verified[row] == trace["draft_token_count"][index]
    if not trace["terminated_by_stop"][index]:
        assert stats.num_accepted[row] == trace["accepted"][index]
        assert stats.next_id[row] == trace["next_token"][index]
        committed = trace["committed_tokens"][index]
        committed = committed[committed >= 0]
        assert stats.emitted[row] == len(committed) and not stats.cut[row]
        np.testing.assert_array_equal(np.asarray(state.ids)[row, before[row] : before[row] + len(committed)], committed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _teacher_forced(target, drafter, target_params, drafter_params, texts, anchors):
    """Draft logits of the block at every text's anchor, and the target's logits everywhere."""
    rows, width = texts.shape
    everything = FlatTokens.grid(texts, jnp.zeros((rows,), jnp.int32), jnp.full((rows,), width, jnp.int32))
    hidden, features, _ = target.forward(target_params, None, everything, drafter.taps)
    head = target.head(target_params)
    batch = TrainBatch(
        ids=texts,
        loss_mask=jnp.ones((rows, width), bool),
        features=features.reshape(rows, width, -1),
        last_hidden=hidden.reshape(rows, width, -1),
        anchors=anchors[:, None],
        keep=jnp.ones((rows, 1), bool),
    )
    sites = drafter.prediction_sites(drafter_params, head, batch)
    drafts = drafter.site_logits(drafter_params, head, sites.hidden, sites.latent)
    return drafts.reshape(rows, drafter.block_size, -1), head.logits(hidden).reshape(rows, width, -1)


def _softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _inverse_cdf(probs, uniform):
    wide = np.asarray(probs, np.float64)
    return int(np.searchsorted(np.cumsum(wide / wide.sum()), uniform, side="right"))


def assert_stochastic_trace(trace, target, target_params, drafter, drafter_params):
    """Golden `decode_temp1`: both models give its logits on its prefixes, and its uniforms decide with them as they did there."""
    output, starts = trace["output_ids"][0], trace["start"]
    num, block_size = len(starts), drafter.block_size
    width = int(starts.max()) + block_size + 1
    texts = np.zeros((num, width), np.int32)
    for row, begin in enumerate(starts):
        texts[row, : begin + 1] = output[: begin + 1]
        texts[row, begin + 1 : begin + 1 + block_size] = trace["verify_draft_tokens"][row]
    assert np.array_equal(texts[np.arange(num), starts], trace["anchor_token"])
    drafts, everywhere = _teacher_forced(target, drafter, target_params, drafter_params, jnp.asarray(texts), jnp.asarray(starts))
    place = starts[:, None] + np.arange(block_size + 1)
    verify = np.asarray(everywhere)[np.arange(num)[:, None], place]
    np.testing.assert_allclose(np.asarray(drafts), trace["corrected_logits"], **ACTIVATIONS)
    np.testing.assert_allclose(verify, trace["verify_logits"], **ACTIVATIONS)
    q, p = _softmax(drafts), _softmax(verify)
    np.testing.assert_allclose(q, trace["draft_probs"], atol=1e-5)

    uniforms = iter(trace["uniform_value"])
    first = int(trace["num_input_tokens"])
    assert _inverse_cdf(_softmax(everywhere)[0, first - 1], next(uniforms)) == output[first]
    for row in range(num):
        ids = trace["verify_draft_tokens"][row]
        assert [_inverse_cdf(q[row, k], next(uniforms)) for k in range(block_size)] == ids.tolist()
        chance = accept_probs(jnp.asarray(p[row, :-1], jnp.float32), jnp.asarray(q[row], jnp.float32), jnp.asarray(ids))
        accepted = np.array([next(uniforms) for _ in range(block_size)]) < np.asarray(chance)
        count = int(np.cumprod(accepted).sum())
        assert count == trace["accepted"][row]
        law = p[row, count]
        if count < block_size:
            law = residual_probs(jnp.asarray(law, jnp.float32), jnp.asarray(q[row, count], jnp.float32))
        assert _inverse_cdf(np.asarray(law), next(uniforms)) == trace["next_token"][row]
    assert next(uniforms, None) is None
