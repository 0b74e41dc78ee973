"""The Eagle3 drafter: features of several target layers, fused, and a chain of one decoder layer trained on its own outputs.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025), in the form of
the DSpark reference: no norm behind the fusion, the target's whole vocabulary unless a reduced one is asked for.
"""

import dataclasses
import functools

import jax.numpy as jnp

from dspark_jax.drafters.chain import ChainConfig, ChainLayer, ChainNetwork
from dspark_jax.drafters.chain_drafter import ChainDrafter
from dspark_jax.layers import Linear
from dspark_jax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class Eagle3Config(ChainConfig):
    """Sizes and taps. Train it with `DraftLossConfig(ce=0, l1=0, confidence=0, soft_ce=1)`, as the reference does.

    Attributes:
      taps: at least one decoder layer of the target, ascending; the reference takes five.
    """

    step_loss_decay: float = 0.8
    soft_ce_over_places: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.num_target_layers - 2
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or not 0 <= self.taps[0] <= self.taps[-1] <= last:
            raise ValueError(
                f"taps is {self.taps}; at least one, ascending, each in 0..{last} for a target of {self.num_target_layers} layers "
                "(the last layer's output is already normed)"
            )


class Eagle3Layer(ChainLayer):
    """A layer whose attention reads a token's embedding and a hidden state side by side, each with its own norm.

    The hidden state itself, not normed, is the residual stream.
    """

    def setup(self) -> None:
        super().setup()
        self.hidden_norm = self._norm()

    def side_by_side(self, hidden: Float[Array, "*batch D"], embeddings: Float[Array, "*batch D"]) -> Float[Array, "*batch I"]:
        """Embedding first, as the reference's checkpoints have it."""
        return jnp.concatenate([self.input_layernorm(embeddings), self.hidden_norm(hidden)], axis=-1)


class Eagle3Network(ChainNetwork):
    """Fusion of the taps, the layer, the final norm. Hidden states are fed back before the final norm, and never through the fusion."""

    config: Eagle3Config

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size, "features", "embed")
        self.layers = [Eagle3Layer(*self._sizes(), config, 2 * config.hidden_size)]

    def source(self, features: Float[Array, "*batch F"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The fused taps."""
        return self.fc(features)

    def read(
        self, hidden: Float[Array, "*batch D"], embeddings: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch I"]]:
        """See `ChainNetwork.read`."""
        return hidden, self.layers[0].side_by_side(hidden, embeddings)


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(ChainDrafter):
    """Eagle3 as a `protocols.Drafter`."""

    config: Eagle3Config

    @functools.cached_property
    def _network(self) -> Eagle3Network:
        return Eagle3Network(self.config)
