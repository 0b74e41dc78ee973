"""Cost curves by formula for a dense target and its drafters on an accelerator: a roofline, nothing measured, nothing compiled.

With N flat tokens of R requests of T committed tokens each, weights of P parameters, bfloat16 (2 bytes), peak F and bandwidth B:

    products      max(2 P N / F, 2 P / B)                           of a layer, and of the output head
    attention     max(4 Hq D T N / F, 4 Hkv D T R / B)              of a layer; Hq query and Hkv key heads of D
    target        launch + L (products + attention) + head
    DSpark        5 such layers and the head on G R tokens, and G times the head of the sequential part, 2 r V R / F or 2 r V / B
    MTP-1         one such layer and the head on R tokens
    commit        the features' projection and the draft layers' keys and values of 1 + G positions per request

Activations, norms, embeddings and sampling are left out, kernels waste nothing, and no tile is padded: rounds come out fast, and the
curve has no steps.
"""

import dataclasses
import math
import warnings

from dspark_jax.step_curve import CurveWarning, StepCurve
from dspark_jax.targets.dense import DenseConfig
from experiments.model_presets import DRAFT_LAYERS, MARKOV_RANK, ModelPreset
from experiments.step_curves import ROWS, CurveFamily, RoundCosts, rounded

BYTES = 2
SHARES = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
"""Flat tokens per request of the buckets: every fixed length has its own."""

CONTEXTS = (256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device.

    Attributes:
      name: in names of files. product: as it is sold.
      flops_per_second: peak of dense bfloat16 products.
      launch_seconds: what starting a round takes.
    """

    name: str
    product: str
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 1e-4

    def seconds(self, flops: float, moved: float) -> float:
        """The longer of computing and moving."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


H200 = Accelerator("h200", "NVIDIA H200 SXM", 989e12, 4.8e12)
"""From NVIDIA's data sheet of the H200: 1,979 teraflops in bfloat16 with sparsity, half of it without; 4.8 TB/s. The launch is assumed."""


def products(chip: Accelerator, parameters: float, num_tokens: float) -> float:
    """Seconds of products with so many parameters."""
    return chip.seconds(2 * parameters * num_tokens, BYTES * parameters)


def layer_parameters(config: DenseConfig) -> int:
    """Of the projections and the MLP of a layer."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def layers_seconds(chip: Accelerator, config: DenseConfig, num_layers: int, rows: int, num_tokens: int, context: int) -> float:
    """Seconds of so many layers."""
    flops = 4 * config.num_heads * config.head_dim * context * num_tokens
    moved = 2 * BYTES * config.num_kv_heads * config.head_dim * context * rows
    return num_layers * (products(chip, layer_parameters(config), num_tokens) + chip.seconds(flops, moved))


def head_seconds(chip: Accelerator, config: DenseConfig, num_tokens: int) -> float:
    """Seconds of the output head."""
    return products(chip, config.hidden_size * config.vocab_size, num_tokens)


def target_seconds(chip: Accelerator, config: DenseConfig, rows: int, num_tokens: int, context: int) -> float:
    """Seconds of the target's pass."""
    layers = layers_seconds(chip, config, config.num_layers, rows, num_tokens, context)
    return chip.launch_seconds + layers + head_seconds(chip, config, num_tokens)


@dataclasses.dataclass(frozen=True)
class DraftCosts:
    """What a drafter is made of.

    Attributes:
      block_size: G.
      num_layers: of the target's sizes.
      features: hidden states of the target that it reads per position.
      markov_rank: r; 0 without a sequential head.
    """

    name: str
    block_size: int
    num_layers: int
    features: int
    markov_rank: int = 0

    def propose_seconds(self, chip: Accelerator, config: DenseConfig, rows: int, context: int) -> float:
        """Seconds of a block for every request."""
        tokens = rows * self.block_size
        backbone = layers_seconds(chip, config, self.num_layers, rows, tokens, context) + head_seconds(chip, config, tokens)
        return backbone + self.block_size * products(chip, self.markov_rank * config.vocab_size, rows)

    def commit_seconds(self, chip: Accelerator, config: DenseConfig, rows: int) -> float:
        """Seconds of taking in 1 + G positions of every request."""
        keys = 2 * self.num_layers * config.num_kv_heads * config.head_dim
        return products(chip, config.hidden_size * (self.features * config.hidden_size + keys), rows * (1 + self.block_size))


def dspark_costs(preset: ModelPreset, block_size: int) -> DraftCosts:
    """DSpark as published for a target."""
    return DraftCosts(f"{preset.name}_dspark", block_size, DRAFT_LAYERS, len(preset.taps), MARKOV_RANK)


def mtp_costs(preset: ModelPreset) -> DraftCosts:
    """MTP-1: a layer that reads the last hidden state and the embedding of the token behind it."""
    return DraftCosts(f"{preset.name}_mtp", 1, 1, 2)


def roofline_family(chip: Accelerator, preset: ModelPreset, draft: DraftCosts, rows: tuple[int, ...] = ROWS) -> CurveFamily:
    """The family of one drafter."""
    config, curves = preset.target.config, []
    for each in rows:
        shares = [share for share in SHARES if share < 1 + draft.block_size] + [1 + draft.block_size]
        tokens = tuple(sorted({math.floor(each * share + 0.5) for share in shares}))
        propose = draft.propose_seconds(chip, config, each, CONTEXTS[1])
        commit = draft.commit_seconds(chip, config, each)

        def curve(buckets: tuple[int, ...], rest: float, size: int = each) -> StepCurve:
            costs = [(at, tuple(rounded(target_seconds(chip, config, size, bucket, at)) for bucket in buckets)) for at in CONTEXTS]
            return StepCurve(buckets, costs[0][1], rounded(rest), costs[0][0], tuple(costs[1:]))

        with warnings.catch_warnings():
            # Few requests leave a chip waiting for its weights, whatever they verify.
            warnings.simplefilter("ignore", CurveWarning)
            undrafted = curve((each,), commit / (1 + draft.block_size))
            curves.append(RoundCosts(each, curve(tokens, propose + commit), undrafted, rounded(commit)))
    notes = (
        "By formula, neither measured nor compiled: see experiments/roofline_curves.py. Rounds come out too fast, small ones most.",
        f"A round has {chip.launch_seconds * 1e6:g} microseconds for its launch, which are an assumption.",
        f"The drafter's attention is that of {CONTEXTS[1]} committed tokens.",
    )
    device = dataclasses.asdict(chip)
    return CurveFamily(f"{chip.name}_{draft.name}", "predicted", device, preset.name, draft.name, draft.block_size, notes, tuple(curves))
