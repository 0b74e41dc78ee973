"""What the engine asks of a device, real or simulated: a batch of slots, and what can be done to it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import struct

from dspark_jax.decode_state import OwnNoise
from dspark_jax.sampling import Sampling
from dspark_jax.typing import Array, Int

EMPTY = -3
"""Request id of a row without a request; policies have -1 and -2 for their own purposes."""


class BatchShape(NamedTuple):
    """Rows of a batch, and T of its caches."""

    rows: int
    slots: int


@struct.dataclass
class NewRow:
    """One request as it enters: everything by which its rounds differ from others'. Arrays of one row.

    Attributes:
      ids: the text, zero-padded to the largest T.
      length: tokens of the text that are to be read.
      given: the token behind them, for a request that goes on; -1 where it is to be drawn.
      limit: length at which its budget is used up.
      stop_ids: padded with -1.
      round: rounds that it has behind it.
    """

    ids: Int[Array, "1 T"]
    length: Int[Array, "1"]
    given: Int[Array, "1"]
    limit: Int[Array, "1"]
    stop_ids: Int[Array, "1 K"]
    request_id: Int[Array, "1"]
    round: Int[Array, "1"]
    sampling: Sampling
    own_noise: OwnNoise


class Ticket(Protocol):
    """Something that the device computes; `get` waits for it."""

    def get(self) -> Any: ...


class SlotExecutor(Protocol):
    """What the engine asks of a device, real or simulated. Calls return at once; whatever has to be known comes as a `Ticket`."""

    shape: BatchShape

    def read(self, row: NewRow, reading: Any, index: int) -> Any:
        """One more chunk of the row's text; `reading` is None for the first."""
        ...

    def begin(self, row: NewRow, reading: Any) -> tuple[Any, Ticket]:
        """The row ready for rounds, and its first token (or the given one)."""
        ...

    def insert(self, row_state: Any, slot: int) -> None:
        """Put a row into the batch."""
        ...

    def resize(self, kept: Sequence[int], shape: BatchShape) -> None:
        """A batch of another shape, whose first rows are the former rows `kept`, in that order; the others are empty."""
        ...

    def launch(self, release: np.ndarray) -> Ticket:
        """A round, before which the marked rows are emptied; the ticket gives `RoundStats` of numpy arrays."""
        ...

    def reset(self, shape: BatchShape) -> None:
        """Forget everything and begin with an empty batch."""
        ...


def blank_row(slots: int, num_stop_ids: int) -> NewRow:
    """A `NewRow` of zeros, in numpy arrays."""

    def zeros(*shape: int, dtype: Any = np.int32) -> Any:
        return np.zeros((1, *shape), dtype)

    return NewRow(
        ids=zeros(slots),
        length=zeros(),
        given=zeros(),
        limit=zeros(),
        stop_ids=zeros(num_stop_ids),
        request_id=zeros(),
        round=zeros(),
        sampling=Sampling(zeros(dtype=np.float32), zeros(), zeros(dtype=np.float32)),
        own_noise=OwnNoise(zeros(2, dtype=np.uint32), zeros()),
    )
