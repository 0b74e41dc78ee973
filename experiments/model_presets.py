"""Models of the paper at their real dimensions, and the drafters that were published for them, as Python functions.

Nothing here has weights: `load_target` reads those from a folder, and `tests/test_model_presets.py` holds sizes and parameter counts
without allocating anything. Sources: the models' public `config.json` files; taps, mask ids, block and rank from the reference's twelve
configs (block 7, 5 layers, rank 256; Eagle3: 1 layer, 7 steps).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.layers import GEMMA4_STYLE
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.targets.gemma_layers import FULL, SLIDING, AttentionKind, GemmaConfig

BLOCK_SIZE, DRAFT_LAYERS, MARKOV_RANK = 7, 5, 256


@dataclasses.dataclass(frozen=True)
class ModelPreset:
    """A target and what its published drafters are made of.

    Attributes:
      taps: layers whose outputs are injected.
      mask_token_id: an id of the vocabulary that no text uses.
      layer: sizes and wiring of a draft layer, as keyword arguments of a drafter's config.
    """

    name: str
    target: Any
    taps: tuple[int, ...]
    mask_token_id: int
    layer: Any

    def dspark(self, **changes: Any) -> DSparkDrafter:
        """DSpark as published: 5 layers, block 7, vanilla head of rank 256, confidence with the Markov feature."""
        return DSparkDrafter(DSparkConfig(**self._block(DRAFT_LAYERS) | {"markov_rank": MARKOV_RANK} | changes))

    def dflash(self, **changes: Any) -> DFlashDrafter:
        """DFlash as the reference compares with it: the same backbone, anchor first."""
        return DFlashDrafter(DFlashConfig(**self._block(DRAFT_LAYERS) | changes))

    def eagle3(self, **changes: Any) -> Eagle3Drafter:
        """Eagle3 as the reference compares with it: one layer, the same taps, 7 steps, the whole vocabulary."""
        return Eagle3Drafter(Eagle3Config(**self.layer | {"taps": self.taps, "block_size": BLOCK_SIZE} | changes))

    def mtp(self, **changes: Any) -> MTPDrafter:
        """One module of the target's own width; MTP-1 unless `block_size` says otherwise."""
        return MTPDrafter(MTPConfig(**self.layer | changes))

    def _block(self, num_layers: int) -> Any:
        return self.layer | {
            "taps": self.taps,
            "mask_token_id": self.mask_token_id,
            "num_layers": num_layers,
            "block_size": BLOCK_SIZE,
        }


def _qwen3(name: str, width: int, heads: int, inner: int, layers: int, taps: tuple[int, ...], tied: bool) -> ModelPreset:
    sizes: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    target = DenseTarget(
        DenseConfig(
            **sizes,
            num_layers=layers,
            qk_norm=True,
            tie_word_embeddings=tied,
            max_position_embeddings=40_960,
            architecture="Qwen3ForCausalLM",
        )
    )
    return ModelPreset(name, target, taps, 151_669, sizes | {"num_target_layers": layers})


def qwen3_4b() -> ModelPreset:
    """Qwen3-4B: 36 layers, 4.0 billion parameters, tied head."""
    return _qwen3("qwen3_4b", 2560, 32, 9728, 36, (1, 9, 17, 25, 33), tied=True)


def qwen3_8b() -> ModelPreset:
    """Qwen3-8B: 36 layers, 8.2 billion parameters."""
    return _qwen3("qwen3_8b", 4096, 32, 12_288, 36, (1, 9, 17, 25, 33), tied=False)


def qwen3_14b() -> ModelPreset:
    """Qwen3-14B: 40 layers, 14.8 billion parameters."""
    return _qwen3("qwen3_14b", 5120, 40, 17_408, 40, (1, 10, 19, 28, 37), tied=False)


def gemma4_12b() -> ModelPreset:
    """The text part of Gemma 4 12B: 48 layers, every sixth with full attention, 11.9 billion parameters.

    Its draft layers are full-attention layers: 16 heads of 512 over one shared key head whose keys are the values too.
    """
    vocab_size, width, inner, heads, layers = 262_144, 3840, 15_360, 16, 48
    target = GemmaTarget(
        GemmaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=inner,
            num_heads=heads,
            layer_types=tuple(FULL if i % 6 == 5 else SLIDING for i in range(layers)),
            style=GEMMA4_STYLE,
            full=AttentionKind(num_kv_heads=1, head_dim=512, rope_theta=1e6, rotated_share=0.25, k_eq_v=True),
            sliding=AttentionKind(num_kv_heads=8, head_dim=256, rope_theta=1e4, window=1024),
            final_softcap=30.0,
            max_position_embeddings=262_144,
            architecture="Gemma4UnifiedForConditionalGeneration",
        )
    )
    layer = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": 512,
        "rope_theta": 1e6,
        "rotated_share": 0.25,
        "style": GEMMA4_STYLE,
        "k_eq_v": True,
        "num_target_layers": layers,
    }
    return ModelPreset("gemma4_12b", target, (5, 17, 29, 41, 46), 4, layer)


MODEL_PRESETS: dict[str, Callable[[], ModelPreset]] = {
    "qwen3_4b": qwen3_4b,
    "qwen3_8b": qwen3_8b,
    "qwen3_14b": qwen3_14b,
    "gemma4_12b": gemma4_12b,
}
