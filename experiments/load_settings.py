"""What is served in a simulation: a target and drafter by what is known of them, and policies by their names."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from dspark_jax.calibrate import RawSurvival, survival_from_dict
from dspark_jax.schedule import FixedLength
from dspark_jax.weights import SURVIVAL_FILE
from experiments.made_up_acceptance import conditional_acceptance, make_up, paper_setting
from experiments.model_presets import ModelPreset, qwen3_8b
from experiments.recorded_rounds import load_recorded
from experiments.replay import Table, table_of
from experiments.roofline_curves import H200, dspark_costs, mtp_costs, roofline_family
from experiments.serving_policies import PLAIN, SCHEDULER
from experiments.short_blocks import best_block_sizes, chunk_seconds, with_block_size
from experiments.simulated_load import Serving
from experiments.simulated_slots import ReadingCosts
from experiments.step_curves import CurveFamily, RoundCosts, read_family

MTP = "mtp_1"
FIXED = "fixed_"


class Setting(Protocol):
    """A target and its drafter."""

    @property
    def name(self) -> str:
        """Of its files of results."""
        ...

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that are worth comparing."""
        ...

    def serving(self, policy: str) -> Serving:
        """How a policy serves.

        Raises:
          ValueError: an unknown policy, or one that this setting cannot have.
        """
        ...


def fixed_length(policy: str, block_size: int, allowed: tuple[str, ...]) -> int:
    """The drafts of a policy of fixed length.

    Raises:
      ValueError: another name.
    """
    number = policy.removeprefix(FIXED)
    if not policy.startswith(FIXED) or not number.isdigit() or not 1 <= int(number) <= block_size:
        raise ValueError(f"policy is {policy!r}; allowed: {', '.join(allowed)}, and {FIXED}N with N from 1 to {block_size}")
    return int(number)


def first_drafts(table: Table, count: int) -> Table:
    """The table of a drafter that drafts no more than so many."""
    return table._replace(survival=table.survival[:, :, :count], accepted=np.minimum(table.accepted, count))


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedSetting:
    """A drafter whose blocks were recorded, on a device whose rounds are known.

    Attributes:
      table: numpy arrays.
      continuation: per position, the usual chance that a draft is accepted.
      prefill_chunk: tokens.
      slots_ahead: see `SimulatedSlots`.
    """

    name: str
    table: Table
    costs: Mapping[int, RoundCosts]
    block_size: int
    continuation: tuple[float, ...]
    prefill_chunk: int
    slots_ahead: int | None = None
    policies: tuple[str, ...] = (PLAIN, "fixed_1", "fixed_4", "fixed_7", SCHEDULER)

    @classmethod
    def read(
        cls, curves: Path, recorded: Path, drafter: Path, temperature: int, prefill_chunk: int = 64, slots_ahead: int | None = None
    ) -> "RecordedSetting":
        """From files: cost curves, blocks, and the calibration beside the drafter's weights. Errors as of their readers."""
        family, blocks = read_family(curves), load_recorded(recorded, temperature)
        stored = json.loads((drafter / SURVIVAL_FILE).read_text(encoding="utf-8"))
        usual = stored.pop("continuation", {}).get(str(float(temperature)))
        if usual is None:
            raise ValueError(f"drafter {drafter.name} has no continuation for temperature {temperature}")
        if family.block_size != blocks.block_size:
            raise ValueError(f"curves are of {family.block_size} drafts; the recorded blocks have {blocks.block_size}")
        table = jax.device_get(table_of(blocks, survival_from_dict(stored), float(temperature)))
        costs = {each.rows: each for each in family.curves}
        name = f"{family.name}_t{temperature}"
        return cls(name, table, costs, blocks.block_size, tuple(usual), prefill_chunk, slots_ahead)

    def without_long_prompts(self, longest: int) -> "RecordedSetting":
        """The texts whose prompts have up to `longest` tokens.

        Raises:
          ValueError: there is none.
        """
        kept = np.asarray(self.table.context) - 1 <= longest
        if not kept.any():
            raise ValueError(f"longest is {longest}; the shortest prompt on record has {int(np.min(self.table.context)) - 1} tokens")
        arrays: list[Any] = [np.asarray(each)[kept] for each in self.table]
        return dataclasses.replace(self, table=Table(*arrays))

    def serving(self, policy: str) -> Serving:
        """See `Setting`. A fixed length has a drafter of blocks of that length, whose costs are estimates (`short_blocks`), and so does the
        scheduler at every number of requests."""
        table, costs, continuation = self.table, self.costs, self.continuation
        reading = ReadingCosts(chunk_seconds(costs, self.prefill_chunk, commits=policy != PLAIN))
        if policy == PLAIN:
            return Serving(table, costs, continuation, None, False, reading, self.slots_ahead)
        if policy == SCHEDULER:
            sizes = best_block_sizes(costs, continuation)
            shorter = {size: with_block_size(costs, size, self.block_size, in_between=True) for size in set(sizes.values())}
            costs = {rows: shorter[size][rows] for rows, size in sizes.items()}
            return Serving(table, costs, continuation, None, True, reading, self.slots_ahead, sizes)
        length = fixed_length(policy, self.block_size, (PLAIN, SCHEDULER))
        if length < self.block_size:
            table, costs = first_drafts(table, length), with_block_size(costs, length, self.block_size)
        return Serving(table, costs, continuation[:length], FixedLength(length), True, reading, self.slots_ahead)


@dataclasses.dataclass(frozen=True, eq=False)
class PaperSetting:
    """As the paper's section 5.4: blocks of G = 5 drafts against MTP-1, prefill on other devices; acceptance as in its Table 1.

    The target is Qwen3-8B on one H200 by a roofline, and not DeepSeek-V4 on DeepSeek's machines. MTP-1 accepts its one draft as often as
    DSpark its first.
    """

    table: Table
    continuation: tuple[float, ...]
    preset: ModelPreset
    block_size: int = 5
    name: str = "h200_qwen3_8b"
    policies: tuple[str, ...] = (PLAIN, MTP, "fixed_3", "fixed_5", SCHEDULER)

    @classmethod
    def make(cls, block_size: int = 5, seed: int = 0, num_texts: int = 96) -> "PaperSetting":
        """Blocks are made up from `seed`."""
        blocks = make_up(dataclasses.replace(paper_setting(block_size), num_texts=num_texts), seed)
        table = jax.device_get(table_of(blocks, RawSurvival(), 1.0, seed))
        return cls(table, conditional_acceptance(blocks), qwen3_8b(), block_size)

    def family(self, policy: str) -> CurveFamily:
        """Cost curves of a policy's drafter."""
        length = self.block_size
        if policy not in (PLAIN, SCHEDULER, MTP):
            length = fixed_length(policy, self.block_size, (PLAIN, SCHEDULER, MTP))
        drafter = mtp_costs(self.preset) if policy == MTP else dspark_costs(self.preset, length)
        return roofline_family(H200, self.preset, drafter)

    def serving(self, policy: str) -> Serving:
        """See `Setting`."""
        family = self.family(policy)
        costs, reading = {each.rows: each for each in family.curves}, ReadingCosts(elsewhere=True)
        if policy in (PLAIN, SCHEDULER):
            return Serving(self.table, costs, self.continuation, None, policy != PLAIN, reading)
        length = family.block_size
        return Serving(first_drafts(self.table, length), costs, self.continuation[:length], FixedLength(length), True, reading)
