"""What every drafter on a chain shares: its state, its proposal, its prediction sites."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from dspark_jax.drafters.block_drafter import apply
from dspark_jax.drafters.chain import ChainConfig, ChainNetwork, ChainState, ChainSteps, chain_targets
from dspark_jax.drafters.confidence_head import ConfidenceHead
from dspark_jax.drafters.draft_draw import draw_drafts
from dspark_jax.drafters.draft_scores import score_logits
from dspark_jax.protocols import Committed, DraftBlock, Sites, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.sharding import Initialised
from dspark_jax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class ChainDrafter(Initialised):
    """A `protocols.Drafter` but for its network, which subclasses name."""

    config: ChainConfig

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def _network(self) -> ChainNetwork:
        raise NotImplementedError

    @property
    def _confidence(self) -> ConfidenceHead | None:
        config = self.config
        return ConfidenceHead(config.hidden_size, 0, detach=True) if config.confidence_head else None

    def with_confidence(self) -> Self:
        """The same drafter with a confidence head."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, confidence_head=True, confidence_score=None))

    def _boxed_init(self, rng: jax.Array) -> Any:
        config = self.config
        features, hidden = (jnp.zeros((1, 1, width)) for width in (len(config.taps) * config.hidden_size, config.hidden_size))
        params = dict(self._network.init(rng, features, hidden, hidden, method="initialise")["params"])
        if self._confidence is not None:
            params["confidence_head"] = self._confidence.init(jax.random.fold_in(rng, 1), hidden, None)["params"]
        return params

    def _confidence_logits(self, params: Params, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch"] | None:
        """What the head says of normed hidden states; None without one."""
        return None if self._confidence is None else apply(self._confidence, params["confidence_head"], hidden, None)

    def init_state(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> ChainState:
        """No pairs yet, and room for `max_len` of them per request."""
        config = self.config
        shape = (num_rows, config.num_kv_heads, max_len, config.head_dim)
        return ChainState(
            keys=jnp.zeros(shape, dtype),
            values=jnp.zeros(shape, dtype),
            length=jnp.zeros((num_rows,), jnp.int32),
            hidden=jnp.zeros((num_rows, config.hidden_size), jnp.float32),
        )

    def commit(self, params: Params, head: TargetHead, state: ChainState, committed: Committed) -> ChainState:
        """Add the committed positions, each paired with the token behind it."""
        dtype = compute_dtype(params)
        embeddings = head.embed(committed.next_ids).astype(dtype)
        known = (committed.features.astype(dtype), committed.hidden.astype(dtype))
        return apply(self._network, params, state, *known, embeddings, committed.count, method="commit")

    def propose(
        self, params: Params, head: TargetHead, state: ChainState, anchor: Int[Array, "R"], noise: Noise, sampling: Sampling
    ) -> DraftBlock:
        """The first draft from the seed, each further one from one more step of the layer: G - 1 steps for G drafts.

        The anchor is the token of the last pair already, so that nothing new is read of it.
        """
        config = self.config
        num_rows, dtype = anchor.shape[0], compute_dtype(params)
        cached = dataclasses.replace(state, keys=state.keys.astype(dtype), values=state.values.astype(dtype))

        def one_more(output: Array, token: Array, steps: ChainSteps, place: Array) -> tuple[Array, ChainSteps]:
            embedding = head.embed(token).astype(dtype)
            return apply(self._network, params, cached, steps, place, output, embedding, method="decode_step")

        def draft_token(carry: tuple[Array, Array, ChainSteps], place: Array) -> tuple[tuple[Array, Array, ChainSteps], tuple]:
            output, token, steps = carry
            output, steps = jax.lax.cond(place > 0, one_more, lambda seed, anchor, none, place: (seed, none), output, token, steps, place)
            hidden = apply(self._network, params, output, method="final_norm")
            draft = draw_drafts(head.logits(hidden), head, sampling, noise.key, jnp.full((num_rows,), place, jnp.int32))
            return (output, draft.ids, steps), (draft, self._confidence_logits(params, hidden))

        start = (state.hidden.astype(dtype), anchor, ChainSteps.empty(num_rows, 1, config, dtype))
        with jax.named_scope("draft_tokens"):
            _, columns = jax.lax.scan(draft_token, start, jnp.arange(config.block_size, dtype=jnp.int32))
        (ids, log_q, log_normaliser, floor, logits), confidence = jax.tree.map(lambda column: column.swapaxes(0, 1), columns)
        if config.confidence_score is not None:
            confidence = score_logits(logits, config.confidence_score)
        return DraftBlock(ids, log_q, log_normaliser, floor, confidence, logits)

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        """All steps behind all positions of a batch, with the true tokens, and hidden states fed back with their gradients.

        Sites come in order (b, i, t); `anchor` is i + 1, so that chains at the end of a row have theirs behind it.
        """
        config = self.config
        dtype = compute_dtype(params)
        num_rows, length = batch.ids.shape
        targets = chain_targets(batch, config.block_size, config.supervision)
        shape = targets.labels.shape
        embeddings = head.embed(jnp.pad(batch.ids, ((0, 0), (0, config.block_size)))).astype(dtype)
        known = (batch.features.astype(dtype), batch.last_hidden.astype(dtype))
        hidden: Array = apply(self._network, params, *known, embeddings, batch.segment, method="train_hidden")
        confidence = self._confidence_logits(params, hidden)
        step = jnp.arange(config.block_size, dtype=jnp.int32)
        decay = config.step_loss_decay ** step.astype(jnp.float32)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
        anchor = jnp.arange(1, length + 1, dtype=jnp.int32)[:, None]
        return Sites(
            hidden=hidden.reshape(-1, config.hidden_size),
            latent=jnp.zeros((targets.labels.size, 0), dtype),
            anchor=jnp.broadcast_to(anchor, shape).reshape(-1),
            label=targets.labels.reshape(-1),
            teacher_index=(rows * length + targets.teacher_position).reshape(-1),
            weight=jnp.where(targets.supervised, decay, 0.0).reshape(-1),
            step=jnp.broadcast_to(step, shape).reshape(-1),
            confidence_logits=None if confidence is None else confidence.reshape(-1),
            soft_ce_places=num_rows * length if config.soft_ce_over_places else None,
        )

    def site_logits(
        self, params: Params, head: TargetHead, hidden: Float[Array, "P D"], latent: Float[Array, "P M"]
    ) -> Float[Array, "P Vd"]:
        """Draft logits of a chunk of sites, float32."""
        return head.logits(hidden)


def compute_dtype(params: Params) -> Any:
    """Compute dtype of a chain: that of its parameters."""
    return params["norm"]["weight"].dtype
