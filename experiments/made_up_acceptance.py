"""Blocks that nobody drafted: acceptance as the paper reports it, with a confidence that knows as much of it as it does.

Every draft has a chance of its own to be accepted, given that those before it were: a beta distribution around the mean of its domain and
position. The confidence is that chance; what it does not know is whether the draft then is accepted. It is calibrated exactly, and
the smaller the concentration, the more it tells the drafts apart. Blocks behind neighbouring tokens have nothing to do with each other,
which real ones do: a hard token is hard for every block that reaches it.
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping

import numpy as np

from dspark_jax.data import DOMAINS
from experiments.recorded_rounds import RecordedBlocks

TABLE_1: Mapping[str, tuple[float, ...]] = {"maths": (6.17, 5.78, 5.01), "code": (5.16, 5.52, 5.17), "chat": (3.72, 3.58, 3.21)}
"""Accepted lengths of DSpark on Qwen3-8B in the paper's Table 1, per benchmark: 7 drafts, temperature 1."""

TABLE_1_DRAFTS = 7
CONCENTRATION = 3.0
"""Of the chances of the drafts of one domain: an AUC of the confidence of 0.81 (chat) to 0.88 (maths), where the paper has 0.81 to 0.90."""


def expected_accepted_length(continuation: tuple[float, ...]) -> float:
    """Tokens of a round that verifies all drafts, from the conditional acceptance per position."""
    return 1.0 + sum(itertools.accumulate(continuation, operator.mul))


def level_continuation(accepted_length: float, block_size: int) -> float:
    """The conditional acceptance that, the same at every position, gives an accepted length with so many drafts.

    Raises:
      ValueError: an accepted length that no chance from 0 to 1 gives.
    """
    if not 1 <= accepted_length <= block_size + 1:
        raise ValueError(f"accepted_length is {accepted_length}; with {block_size} drafts allowed are numbers from 1 to {block_size + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_accepted_length((middle,) * block_size) < accepted_length else (low, middle)
    return high


def paper_continuation() -> dict[str, float]:
    """Conditional acceptance by domain, level over positions (as in the paper's Figure 2), of the means of Table 1."""
    return {domain: level_continuation(float(np.mean(lengths)), TABLE_1_DRAFTS) for domain, lengths in TABLE_1.items()}


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """What is made up.

    Attributes:
      block_size: G.
      continuation: domain -> mean conditional acceptance per position, one per draft.
      num_texts: as many of each domain, in turn.
      prompts, answers: least and most tokens, between which all lengths are as likely.
      concentration: of the beta distributions; more means less to know.
    """

    block_size: int
    continuation: Mapping[str, tuple[float, ...]]
    num_texts: int = 96
    prompts: tuple[int, int] = (256, 768)
    answers: tuple[int, int] = (64, 512)
    concentration: float = CONCENTRATION

    def __post_init__(self) -> None:
        for domain, chances in self.continuation.items():
            if domain not in DOMAINS or len(chances) != self.block_size or not all(0 < chance < 1 for chance in chances):
                raise ValueError(
                    f"continuation is {self.continuation}; allowed are one chance per draft between 0 and 1 for {', '.join(DOMAINS)}"
                )
        if not self.concentration > 0:
            raise ValueError(f"concentration is {self.concentration}; allowed are numbers above 0")
        for field in ("prompts", "answers"):
            least, most = getattr(self, field)
            if not 1 <= least <= most:
                raise ValueError(f"{field} is {(least, most)}; allowed are a least and a most number of tokens, 1 or more")


def paper_setting(block_size: int = 5) -> MadeUp:
    """Drafts of the acceptance of Table 1, as many as the paper serves with (section 5.4)."""
    return MadeUp(block_size, {domain: (chance,) * block_size for domain, chance in paper_continuation().items()})


def make_up(made_up: MadeUp, seed: int = 0) -> RecordedBlocks:
    """Blocks with their calibrated confidence; the first drafts of a block are the same whatever `block_size`, at any given seed."""
    rng = np.random.default_rng(seed)
    names = [list(made_up.continuation)[number % len(made_up.continuation)] for number in range(made_up.num_texts)]
    context = rng.integers(made_up.prompts[0], made_up.prompts[1] + 1, made_up.num_texts) + 1
    anchors = rng.integers(made_up.answers[0], made_up.answers[1] + 1, made_up.num_texts)
    shape = (made_up.num_texts, int(anchors.max()))
    chances, kept = [], []
    for place in range(made_up.block_size):
        mean = np.array([made_up.continuation[name][place] for name in names])[:, None]
        spread = made_up.concentration
        chances.append(np.clip(rng.beta(mean * spread, (1 - mean) * spread, shape), 1e-4, 1 - 1e-4))
        kept.append(rng.random(shape) < chances[-1])
    chance = np.stack(chances, axis=2)
    return RecordedBlocks(
        confidence_logits=np.log(chance / (1 - chance)).astype(np.float32),
        kept=np.stack(kept, axis=2),
        anchors=anchors.astype(np.int32),
        context=context.astype(np.int32),
        domain=np.array([DOMAINS.index(name) for name in names], np.int32),
    )


def conditional_acceptance(blocks: RecordedBlocks) -> tuple[float, ...]:
    """Per position: of the blocks that accept the drafts before it, the share that accept it."""
    place = np.arange(blocks.kept.shape[1])
    there = (place < blocks.anchors[:, None])[:, :, None]
    reached = np.concatenate([np.ones_like(blocks.kept[:, :, :1]), np.cumprod(blocks.kept, axis=2)[:, :, :-1] > 0], axis=2) & there
    return tuple(((blocks.kept & reached).sum(axis=(0, 1)) / np.maximum(reached.sum(axis=(0, 1)), 1)).tolist())
