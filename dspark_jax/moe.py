"""A mixture-of-experts MLP as in DeepSeek-V3 and V4: fine-grained experts, shared experts, balance without an auxiliary loss.

Every token chooses the `top_k` experts of largest affinity + bias and mixes their outputs by the affinities alone. The bias is no
subject of the gradient: after a step it is moved against the load of its expert (`updated_bias`), so that balance costs the
model's loss nothing. No expert has a capacity, so that no token is ever dropped and none depends on its batch-mates.

Sources: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.1.2, equations 12 to 20; DeepSeek-V4 scores by
sqrt(softplus) instead of a sigmoid.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.layers import Activation, GatedMLP, parameter
from dspark_jax.typing import Array, Bool, Float, Int, Params, typed

Scoring = Literal["sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = ("sigmoid", "sqrtsoftplus")

BALANCE_SPEED = 1e-3
"""How far a bias moves a step: gamma of DeepSeek-V3."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes of one mixture, and how its gates come about.

    Attributes:
      num_experts: routed experts.
      top_k: routed experts that a token runs through.
      intermediate_size: inner width of every expert, routed or shared.
      num_shared_experts: experts that every token runs through, gate 1; 0 for none.
      scoring: affinity of a token with an expert as a function of their dot product: "sigmoid" (V3) or "sqrtsoftplus" (V4).
      normalise_gates: the gates of a token are divided by their sum.
      routed_scaling_factor: then multiplied by this.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int = 1
    scoring: Scoring = "sigmoid"
    normalise_gates: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        for field, least in (("num_experts", 1), ("intermediate_size", 1), ("num_shared_experts", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least {least}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}; it must be in 1..{self.num_experts} (num_experts)")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {self.scoring!r}; allowed: {', '.join(SCORINGS)}")
        if not self.routed_scaling_factor > 0:
            raise ValueError(f"routed_scaling_factor is {self.routed_scaling_factor}; it must be positive")


@struct.dataclass
class Routing:
    """Where tokens go: the experts chosen, in falling order of affinity + bias; the affinities with all; the gates of the chosen."""

    chosen: Int[Array, "*batch k"]
    affinities: Float[Array, "*batch experts"]
    gates: Float[Array, "*batch k"]


@typed
def route(logits: Float[Array, "*batch experts"], bias: Float[Array, "experts"], config: MoEConfig) -> Routing:
    """Choose experts by affinity + bias and weigh them by affinity (V3, equations 13 to 16); float32."""
    logits = logits.astype(jnp.float32)
    affinities = nn.sigmoid(logits) if config.scoring == "sigmoid" else jnp.sqrt(nn.softplus(logits))
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(affinities) + jax.lax.stop_gradient(bias).astype(jnp.float32), config.top_k)
    gates = jnp.take_along_axis(affinities, chosen, axis=-1)
    if config.normalise_gates:
        gates = gates / jnp.maximum(gates.sum(axis=-1, keepdims=True), 1e-20)
    return Routing(chosen, affinities, gates * config.routed_scaling_factor)


class Router(nn.Module):
    """Affinities of tokens with experts. The bias stands under `stop_gradient`: `rebalanced` alone moves it."""

    width: int
    config: MoEConfig

    def setup(self) -> None:
        experts = self.config.num_experts
        self.weight = parameter(self, "weight", nn.initializers.normal(0.02), (experts, self.width), ("experts", "embed"))
        self.e_score_correction_bias = parameter(self, "e_score_correction_bias", nn.initializers.zeros, (experts,), ("experts",))

    def __call__(self, x: Float[Array, "N D"]) -> Routing:
        logits = jnp.einsum("nd,ed->ne", x.astype(jnp.float32), self.weight.astype(jnp.float32))
        return route(logits, self.e_score_correction_bias, self.config)


class Experts(nn.Module):
    """Gated MLPs side by side, their weights stacked along the first axis."""

    width: int
    config: MoEConfig
    activation: Activation = "silu"

    def setup(self) -> None:
        experts, inner, init = self.config.num_experts, self.config.intermediate_size, nn.initializers.normal(0.02)
        up_axes, down_axes = ("experts", "expert_mlp", "embed"), ("experts", "embed", "expert_mlp")
        self.gate_proj = parameter(self, "gate_proj", init, (experts, inner, self.width), up_axes)
        self.up_proj = parameter(self, "up_proj", init, (experts, inner, self.width), up_axes)
        self.down_proj = parameter(self, "down_proj", init, (experts, self.width, inner), down_axes)

    def __call__(self, x: Float[Array, "N D"], sizes: Int[Array, "experts"]) -> Float[Array, "N D"]:
        """Run the first sizes[0] rows through expert 0, the next sizes[1] through expert 1, and so on."""
        gate = jax.lax.ragged_dot(x, self.gate_proj.swapaxes(1, 2), sizes)
        gate = nn.silu(gate) if self.activation == "silu" else nn.gelu(gate, approximate=True)
        inner = gate * jax.lax.ragged_dot(x, self.up_proj.swapaxes(1, 2), sizes)
        return jax.lax.ragged_dot(inner, self.down_proj.swapaxes(1, 2), sizes)


class MoE(nn.Module):
    """Shared experts + the gated sum of each token's routed experts.

    The routing of a pass is sown into the collection "intermediates" under "routing", for `rebalanced` and for
    `sequence_balance_loss`; where nobody asks for that collection it costs nothing.
    """

    width: int
    config: MoEConfig
    activation: Activation = "silu"

    def setup(self) -> None:
        config = self.config
        self.gate = Router(self.width, config)
        self.experts = Experts(self.width, config, self.activation)
        if config.num_shared_experts:
            # Gated MLPs whose outputs are added are one gated MLP of their widths together.
            self.shared_experts = GatedMLP(self.width, config.num_shared_experts * config.intermediate_size, self.activation)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        config = self.config
        rows = x.reshape(-1, self.width)
        with jax.named_scope("route"):
            routing = self.gate(rows)
        self.sow("intermediates", "routing", jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], leaf.shape[-1]), routing))
        with jax.named_scope("experts"):
            flat = routing.chosen.reshape(-1)
            order = jnp.argsort(flat, stable=True)
            sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
            by_expert = self.experts(rows[order // config.top_k], sizes)
            by_token = by_expert[jnp.argsort(order)].reshape(-1, config.top_k, self.width)
            mixed = jnp.einsum("nkd,nk->nd", by_token, routing.gates.astype(x.dtype)).reshape(x.shape)
        return mixed + self.shared_experts(x) if config.num_shared_experts else mixed


@typed
def expert_loads(chosen: Int[Array, "*batch k"], counted: Bool[Array, "*batch"], num_experts: int) -> Int[Array, "{num_experts}"]:
    """How many of the `counted` tokens chose each expert; padding is left out of the count by `counted`."""
    weight = jnp.broadcast_to(counted[..., None], chosen.shape).astype(jnp.int32)
    return jnp.zeros((num_experts,), jnp.int32).at[chosen.reshape(-1)].add(weight.reshape(-1))


@typed
def updated_bias(bias: Float[Array, "experts"], loads: Int[Array, "experts"], speed: float = BALANCE_SPEED) -> Float[Array, "experts"]:
    """The biases after one step: down by `speed` where the expert was loaded above the mean, up where below (V3, section 2.1.2)."""
    excess = loads.astype(jnp.float32) - loads.astype(jnp.float32).mean()
    return bias - (speed * jnp.sign(excess)).astype(bias.dtype)


def rebalanced(params: Params, sown: Mapping[str, Any], counted: Bool[Array, "*batch"], speed: float = BALANCE_SPEED) -> Params:
    """`params` with the biases of every mixture in them moved one step against the loads of one batch.

    Args:
      params: of the module whose forward pass was run, as a tree of dicts.
      sown: the collection "intermediates" of that pass: `_, state = module.apply(..., mutable=["intermediates"])`.
      counted: which tokens count; shaped like the tokens that the mixtures saw.
      speed: 0 leaves everything as it is, as the last stage of V3's training did.
    """
    moved = dict(params)
    for name, inner in sown.items():
        if name == "routing":
            gate = dict(moved["gate"])
            bias = gate["e_score_correction_bias"]
            gate["e_score_correction_bias"] = updated_bias(bias, expert_loads(inner[0].chosen, counted, bias.shape[0]), speed)
            moved["gate"] = gate
        elif isinstance(inner, Mapping):
            moved[name] = rebalanced(moved[name], inner, counted, speed)
    return moved


@typed
def sequence_balance_loss(
    affinities: Float[Array, "B S experts"], chosen: Int[Array, "B S k"], counted: Bool[Array, "B S"]
) -> Float[Array, ""]:
    """sum over experts of f_i P_i, mean over sequences (V3, equations 17 to 20, without the factor alpha, 1e-4 there).

    f_i is the expert's share of the sequence's choices x the number of experts (1 where balanced), P_i its mean share of the
    affinities. It is 1 where everything is balanced, and its gradient reaches the affinities through P alone.
    """
    num_experts = affinities.shape[-1]
    real = counted.astype(jnp.float32)
    tokens = jnp.maximum(real.sum(axis=1), 1.0)[:, None]
    picked = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).sum(axis=2)
    frequency = num_experts / chosen.shape[-1] * jnp.einsum("bse,bs->be", picked, real) / tokens
    share = affinities / jnp.maximum(affinities.sum(axis=-1, keepdims=True), 1e-20)
    chance = jnp.einsum("bse,bs->be", share, real) / tokens
    return (jax.lax.stop_gradient(frequency) * chance).sum(axis=-1).mean()
