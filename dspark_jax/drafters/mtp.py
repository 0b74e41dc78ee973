"""The MTP drafter: the multi-token prediction module of DeepSeek-V3, trained behind a frozen target and chained for G tokens.

The target's last hidden state and the next token's embedding, each normed, are projected together and go through one decoder layer and
a norm of the module's own to the target's head. Source: DeepSeek-V3 Technical Report (2024), section 2.2. There every depth has a module
of its own and is trained with the target; here one module is used again for every step, as inference engines use the one that was
released. `block_size` 1 is the baseline MTP-1.
"""

import dataclasses
import functools

import jax.numpy as jnp

from dspark_jax.drafters.chain import ChainConfig, ChainLayer, ChainNetwork
from dspark_jax.drafters.chain_drafter import ChainDrafter
from dspark_jax.layers import Linear, RMSNorm
from dspark_jax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class MTPConfig(ChainConfig):
    """Sizes. The target is frozen, so any mixture of cross-entropy, soft cross-entropy and L1 may be its loss.

    Attributes:
      block_size: G; the default is MTP-1.
      taps: (), since the module reads the target's last hidden state.
    """

    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps:
            raise ValueError(f"taps is {self.taps}; MTP reads the target's last hidden state, and its taps are ()")


class MTPNetwork(ChainNetwork):
    """`eh_proj` of both norms, one layer, the final norm.

    `eh_proj` takes the embedding in its first D columns and the hidden state in the others, the order in which the released weights
    hold them and inference engines read them (equation 21 of the report writes the hidden state first). All steps share the final norm, and
    the state that is fed back has gone through it: as the target's own has, the only kind of state that `hnorm` meets in step 0.
    """

    config: MTPConfig

    def setup(self) -> None:
        super().setup()
        config = self.config
        norm = (config.hidden_size, config.rms_norm_eps, config.style.norm)
        self.enorm, self.hnorm = RMSNorm(*norm), RMSNorm(*norm)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, "features", "embed")
        self.layers = [ChainLayer(*self._sizes(), config, config.hidden_size)]

    def source(self, features: Float[Array, "*batch F"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The target's last hidden state, which has gone through the target's final norm."""
        return hidden

    def read(
        self, hidden: Float[Array, "*batch D"], embeddings: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch I"]]:
        """See `ChainNetwork.read`."""
        joined = self.eh_proj(jnp.concatenate([self.enorm(embeddings), self.hnorm(hidden)], axis=-1))
        return joined, self.layers[0].input_layernorm(joined)

    def feed_back(self, output: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """See `ChainNetwork.feed_back`."""
        return self.norm(output)


@dataclasses.dataclass(frozen=True)
class MTPDrafter(ChainDrafter):
    """MTP as a `protocols.Drafter`."""

    config: MTPConfig

    @functools.cached_property
    def _network(self) -> MTPNetwork:
        return MTPNetwork(self.config)
