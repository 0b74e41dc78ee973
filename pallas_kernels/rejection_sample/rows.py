"""What the two passes of `rejection_sample` are given and give, row by row, and the values that the second draws from.

Plain JAX and the kernels share it. Axes: N flat rows of target logits, R requests, V ids.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowStats(NamedTuple):
    """What acceptance must know of rows of target logits, or of a part of the vocabulary.

    Attributes:
      log_sum: float32 [N], log-sum-exp of the kept entries of `logits / temperature`; at temperature 0 the largest logit.
      own: float32 [N], `logits / temperature` of one given id; -inf where it is filtered out or not in this part.
      best: int32 [N], id of the largest logit. Only read where the temperature is 0.
    """

    log_sum: jax.Array
    own: jax.Array
    best: jax.Array


class ResidualRows(NamedTuple):
    """What follows the accepted drafts of each request: the target's distribution p, or the residual max(0, p - q).

    Attributes:
      row: int32 [R], the row of target logits that decides.
      floor, normaliser: float32 [R], of that row.
      plain: bool [R], whether p itself: behind the last verified draft, and at temperature 0.
      temperature: float32 [R].
      draft_row: int32 [R], row of the draft logits of the request.
      draft_floor, draft_normaliser: float32 [R], of that row.
      draft_id: int32 [R], the rejected id: where there are no draft logits, q is one-hot at it.
    """

    row: jax.Array
    floor: jax.Array
    normaliser: jax.Array
    plain: jax.Array
    temperature: jax.Array
    draft_row: jax.Array
    draft_floor: jax.Array
    draft_normaliser: jax.Array
    draft_id: jax.Array


def residual_values(logits: jax.Array, draft_logits: jax.Array | None, rows: ResidualRows, column: jax.Array) -> jax.Array:
    """What is raced for: `logits / temperature` where p itself is wanted, log max(0, p - q) elsewhere. Fields of `rows` broadcast."""
    divisor = jnp.where(rows.temperature == 0, 1.0, rows.temperature)
    scaled = jnp.where(logits >= rows.floor, logits / divisor, -jnp.inf)
    if draft_logits is None:
        q = jnp.where(column == rows.draft_id, 1.0, 0.0)
    else:
        draft = draft_logits.astype(jnp.float32)
        q = jnp.where(draft >= rows.draft_floor, jnp.exp(draft / divisor - rows.draft_normaliser), 0.0)
    # A bonus token is drawn from the logits as they are, so that it is the token that plain decoding would draw.
    return jnp.where(rows.plain, scaled, jnp.log(jnp.maximum(jnp.exp(scaled - rows.normaliser) - q, 0.0)))
