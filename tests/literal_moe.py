"""A mixture of experts in float64, one token and one expert at a time, by the formulas of DeepSeek-V3."""

import numpy as np


def gated_mlp(x, gate, up, down):
    """down(silu(gate x) * up x) of one token."""
    inner = gate @ x
    return down @ (inner / (1 + np.exp(-inner)) * (up @ x))


def choices(x, params, config):
    """Affinities with all experts, and the experts of one token in falling order of affinity + bias."""
    logits = params["gate"]["weight"] @ x
    affinities = 1 / (1 + np.exp(-logits)) if config.scoring == "sigmoid" else np.sqrt(np.log1p(np.exp(logits)))
    return affinities, np.argsort(-(affinities + params["gate"]["e_score_correction_bias"]), kind="stable")[: config.top_k]


def literal_moe(x, params, config):
    """The output for one token, from parameters in float64."""
    affinities, chosen = choices(x, params, config)
    gates = affinities[chosen]
    if config.normalise_gates:
        gates = gates / gates.sum()
    output = np.zeros_like(x)
    for expert, gate in zip(chosen, gates * config.routed_scaling_factor, strict=True):
        output += gate * gated_mlp(x, *(params["experts"][f"{name}_proj"][expert] for name in ("gate", "up", "down")))
    inner = config.intermediate_size
    for shared in range(config.num_shared_experts):
        weights = {name: params["shared_experts"][f"{name}_proj"]["weight"] for name in ("gate", "up", "down")}
        part = slice(shared * inner, (shared + 1) * inner)
        output += gated_mlp(x, weights["gate"][part], weights["up"][part], weights["down"][:, part])
    return output
