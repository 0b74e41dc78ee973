"""What rounds did, and the sums that accepted length and conditional acceptance are read from."""

import jax.numpy as jnp
from flax import struct

from dspark_jax.typing import Array, Bool, Float, Int


@struct.dataclass
class RoundStats:
    """What happened in one round; only the rows that are `active` mean something.

    `emitted` counts tokens after stop and budget cuts; `cut` marks rounds that these shortened. `probe` marks requests whose drafts
    were all verified to learn from it, as was settled before drafting. Where `drafted` is False, the drafter did not run, and
    `drafts` and `confidence_logits` are zeros.
    """

    active: Bool[Array, "R"]
    anchor: Int[Array, "R"]
    drafts: Int[Array, "R G"]
    confidence_logits: Float[Array, "R G"]
    verified: Int[Array, "R"]
    num_accepted: Int[Array, "R"]
    next_id: Int[Array, "R"]
    emitted: Int[Array, "R"]
    cut: Bool[Array, "R"]
    probe: Bool[Array, "R"]
    drafted: Bool[Array, ""]


@struct.dataclass
class Tally:
    """Sums over rounds, per request. Rounds cut short by a stop token or the budget are counted apart.

    Accepted length = emitted / rounds. Conditional acceptance at k = accepted[k] / reached[k].

    Attributes:
      reached: rounds whose verified length is at least k and that accepted the k - 1 drafts before.
      accepted: those of them that accepted draft k as well.
      verified: drafts sent to the target.
    """

    rounds: Int[Array, "R"]
    emitted: Int[Array, "R"]
    cut_rounds: Int[Array, "R"]
    cut_emitted: Int[Array, "R"]
    verified: Int[Array, "R"]
    reached: Int[Array, "R G"]
    accepted: Int[Array, "R G"]

    @classmethod
    def zeros(cls, num_rows: int, block_size: int) -> "Tally":
        row, block = jnp.zeros((num_rows,), jnp.int32), jnp.zeros((num_rows, block_size), jnp.int32)
        return cls(row, row, row, row, row, block, block)

    def add(self, stats: RoundStats) -> "Tally":
        """The sums with one more round."""
        whole = stats.active & ~stats.cut
        place = jnp.arange(stats.drafts.shape[1], dtype=jnp.int32)
        reached = whole[:, None] & (place < stats.verified[:, None]) & (place <= stats.num_accepted[:, None])
        return Tally(
            rounds=self.rounds + whole.astype(jnp.int32),
            emitted=self.emitted + jnp.where(whole, stats.emitted, 0),
            cut_rounds=self.cut_rounds + stats.cut.astype(jnp.int32),
            cut_emitted=self.cut_emitted + jnp.where(stats.cut, stats.emitted, 0),
            verified=self.verified + jnp.where(stats.active, stats.verified, 0),
            reached=self.reached + reached.astype(jnp.int32),
            accepted=self.accepted + (reached & (place < stats.num_accepted[:, None])).astype(jnp.int32),
        )
