"""The device half of the engine: a batch of slots that requests are put into, and the programs that work on it.

A batch has one of a few shapes (rows x cache slots), and everything that is done to it is a program compiled ahead for such a shape:
read a chunk of one request's text, begin its rounds, put it into a row, change the shape, run a round. Nothing is compiled later.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import in_place
from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, decode_round
from dspark_jax.decode_state import OwnNoise
from dspark_jax.draft_planning import NOBODY, DraftHistory
from dspark_jax.prefill import NO_STOP, Reading, begin_rounds, nothing_deferred, read_chunk
from dspark_jax.protocols import Committed, StatefulPolicy
from dspark_jax.round_stats import RoundStats
from dspark_jax.sampling import Sampling
from dspark_jax.sharding import MESH_AXES, replicated
from dspark_jax.slot_executor import EMPTY, BatchShape, NewRow, Ticket, blank_row
from dspark_jax.typing import Array
from pallas_kernels.noise import seed_key


@dataclasses.dataclass(frozen=True)
class _DeviceTicket:
    value: Any

    def get(self) -> Any:
        return jax.device_get(self.value)


BATCH_LEVEL = ("seed", "policy_state", "draft_history", "calibration")
"""Fields of a `DecodeState` that belong to the batch and not to its rows."""


def _rows_of(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, **dict.fromkeys(BATCH_LEVEL))


def _fitted(leaf: Array, shape: tuple[int, ...]) -> Array:
    """`leaf` cut or padded with zeros at the end of every axis: what the first slots of a cache hold stays where it is."""
    leaf = leaf[tuple(slice(0, size) for size in shape)]
    return jnp.pad(leaf, [(0, size - have) for size, have in zip(shape, leaf.shape, strict=True)])


def history_of(old: DraftHistory, blank: DraftHistory, place: Array, kept: Array) -> DraftHistory:
    """The history of a batch of another shape: its newest rounds, of the rows that are kept. Of blocks of another length it is empty.

    Args:
      old, blank: of the former batch, and of an empty one of the new shape.
      place: int32 [R], the former row of every new one, whatever it is where that is not kept.
      kept: bool [R].
    """
    if old.survival.shape[2] != blank.survival.shape[2]:
        return dataclasses.replace(blank, round=old.round)
    rounds = min(old.survival.shape[0], blank.survival.shape[0])
    request_id = jnp.where(kept, old.request_id[:rounds, place], NOBODY)
    # A round of which nobody is left says nothing, least of all that drafting does not pay.
    told = jnp.any(request_id != NOBODY, axis=1, keepdims=True)
    request_id = jnp.where(told, request_id, blank.request_id[:rounds])
    survival = jnp.where((told & kept)[..., None], old.survival[:rounds, place], blank.survival[:rounds])
    return DraftHistory(
        survival=jnp.concatenate([survival, blank.survival[rounds:]]),
        request_id=jnp.concatenate([request_id, blank.request_id[rounds:]]),
        round=old.round,
    )


class DeviceSlots:
    """The `SlotExecutor` of a real device or mesh.

    Attributes:
      plans: what a round does, by the rows of the batch. The target is the same in all of them, and so is the drafter but for the length
        of its blocks.
      slot_ladder: values of T, ascending.
      chunk: tokens of a text that are read at once.
      num_stop_ids: K.
      calibration: learns from the rounds and stands in for the plans' survival model; it goes on from what it has seen before.
      mesh: rows are split over "data" and "fsdp" and key heads over "tensor" where they divide; None: one device.
    """

    def __init__(
        self,
        plans: Mapping[int, DecodePlan],
        params: DecodeParams,
        slot_ladder: tuple[int, ...],
        *,
        chunk: int = 64,
        num_stop_ids: int = 4,
        seed: int = 0,
        cache_dtype: Any = jnp.float32,
        calibration: OnlineCalibration | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.plans, self.slot_ladder, self.chunk, self.num_stop_ids, self.mesh = dict(plans), slot_ladder, chunk, num_stop_ids, mesh
        self._params, self._seed, self._cache_dtype, self._calibration = params, seed, cache_dtype, calibration
        self._programs: dict[tuple, Any] = {}
        self._plan = max(self.plans.values(), key=lambda plan: plan.block_size)
        self.shape = BatchShape(min(self.plans), slot_ladder[0])
        self._state: Any = None

    # --- what the programs work on

    @property
    def shapes(self) -> list[BatchShape]:
        """All shapes of a batch."""
        return [BatchShape(rows, slots) for rows in sorted(self.plans) for slots in self.slot_ladder]

    def _empty(self, shape: BatchShape) -> DecodeState:
        plan, (rows, slots) = self.plans[shape.rows], shape
        target_cache, drafter_state = self._caches(rows, slots)
        one = jnp.ones((rows,), jnp.int32)
        return DecodeState(
            ids=jnp.zeros((rows, slots), jnp.int32),
            length=one,
            prompt_length=one,
            limit=one,
            stop_ids=jnp.full((rows, self.num_stop_ids), NO_STOP, jnp.int32),
            finished=jnp.ones((rows,), bool),
            request_id=jnp.full((rows,), EMPTY, jnp.int32),
            round=jnp.zeros((rows,), jnp.int32),
            seed=seed_key(self._seed),
            sampling=Sampling(jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32), jnp.ones((rows,), jnp.float32)),
            target_cache=target_cache,
            drafter_state=drafter_state,
            policy_state=plan.policy.init_state(rows, plan.block_size) if isinstance(plan.policy, StatefulPolicy) else None,
            draft_history=None if plan.planner is None else plan.planner.init_history(rows),
            deferred=None if plan.planner is None else self._nothing_deferred(self._params, rows),
            own_noise=OwnNoise(jnp.zeros((rows, 2), jnp.uint32), jnp.zeros((rows,), jnp.int32)),
            calibration=self._calibration,
        )

    def _caches(self, rows: int, slots: int) -> tuple[Any, Any]:
        sizes: dict[str, Any] = {"writes_per_pass": max(self.chunk, self._plan.block_size + 1), "dtype": self._cache_dtype}
        drafter = self._plan.drafter
        return self._plan.target.init_cache(rows, slots, **sizes), None if drafter is None else drafter.init_state(rows, slots, **sizes)

    def _nothing_deferred(self, params: DecodeParams, rows: int) -> Committed:
        return nothing_deferred(self._plan, params, rows, self._plan.block_size)

    def cache_bytes(self, shape: BatchShape) -> int:
        """What a batch of this shape holds: caches, drafter state and the rest, over all devices."""
        return self._bytes(jax.eval_shape(lambda: self._empty(shape)))

    def peak_bytes(self, largest: BatchShape) -> int:
        """The most that is held at a time up to a shape: a batch and the one it is changed into, a request that is being read, and one
        that is ready."""
        sizes = sorted(self.cache_bytes(shape) for shape in self.shapes if shape.rows <= largest.rows and shape.slots <= largest.slots)
        return sum(sizes[-2:]) + 2 * self._bytes(jax.eval_shape(lambda: self._caches(1, self.slot_ladder[-1])))

    def _bytes(self, tree: Any) -> int:
        """Bytes of abstract arrays over all devices: what is not split is on each of them."""
        if self.mesh is None:
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        parts = [(self._sharding(leaf).shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
        return self.mesh.size * sum(math.prod(shape) * size for shape, size in parts)

    # --- programs

    def _read(self, params: DecodeParams, reading: Reading, ids: Array, length: Array, index: Array) -> Reading:
        return read_chunk(self._plan, params, reading, ids, length, index, self.chunk)

    def _begin(self, params: DecodeParams, row: NewRow, reading: Reading) -> tuple[DecodeState, Array]:
        blank = jnp.zeros((1,), jnp.int32)
        state = DecodeState(
            ids=row.ids,
            length=row.length,
            prompt_length=row.length,
            limit=row.limit,
            stop_ids=row.stop_ids,
            finished=blank > 0,
            request_id=row.request_id,
            round=row.round,
            seed=jnp.zeros((2,), jnp.uint32),
            sampling=row.sampling,
            target_cache=None,
            drafter_state=None,
            deferred=None if self._plan.planner is None else self._nothing_deferred(params, 1),
            own_noise=row.own_noise,
        )
        state = begin_rounds(self._plan, params, state, reading, row.length, row.given)
        return _rows_of(state), state.ids[0, row.length[0]]

    def _insert(self, state: DecodeState, row: DecodeState, slot: Array) -> DecodeState:
        def put(leaf: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, _fitted(new, (1, *leaf.shape[1:])).astype(leaf.dtype), slot, axis=0)

        rows = jax.tree.map(put, _rows_of(state), row)
        return dataclasses.replace(rows, **{name: getattr(state, name) for name in BATCH_LEVEL})

    def _resize(self, state: DecodeState, source: Array, shape: BatchShape) -> DecodeState:
        kept = source >= 0

        def take(old: Array, blank: Array) -> Array:
            picked = _fitted(old[jnp.maximum(source, 0)], blank.shape)
            return jnp.where(kept.reshape(-1, *(1,) * (blank.ndim - 1)), picked, blank)

        empty = self._empty(shape)
        rows = jax.tree.map(take, _rows_of(state), _rows_of(empty))
        history = empty.draft_history
        if history is not None and state.draft_history is not None:
            history = history_of(state.draft_history, history, jnp.maximum(source, 0), kept)
        return dataclasses.replace(
            rows, seed=state.seed, policy_state=empty.policy_state, draft_history=history, calibration=state.calibration
        )

    def _round(self, params: DecodeParams, state: DecodeState, release: Array, rows: int) -> tuple[DecodeState, RoundStats]:
        state = dataclasses.replace(state, finished=state.finished | release, request_id=jnp.where(release, EMPTY, state.request_id))
        run = functools.partial(decode_round, self.plans[rows], params)
        stats = in_place.zeros_of(run, state)[1]
        # Rounds are launched before it is known whether the last request has ended.
        return in_place.when(~jnp.all(state.finished), lambda before: run(before[0]), (state, stats))

    def _compile(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        options: dict[str, Any] = {} if self.mesh is None else {"out_shardings": jax.tree.map(self._sharding, out)}
        if self.mesh is not None:
            args = tuple(jax.tree.map(self._placed, arg) for arg in args)
        return jax.jit(function, donate_argnums=donate, **options).lower(*args).compile()

    def _sharding(self, leaf: Any) -> NamedSharding:
        mesh = self.mesh
        assert mesh is not None
        if leaf.ndim != 4:
            return replicated(mesh)
        rows, heads = leaf.shape[:2]
        data, fsdp, tensor = MESH_AXES
        split = (data, fsdp) if rows % (mesh.shape[data] * mesh.shape[fsdp]) == 0 else None
        return NamedSharding(mesh, PartitionSpec(split, tensor if heads % mesh.shape[tensor] == 0 else None))

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding(leaf))

    def _program(self, *key: Any) -> Any:
        if key not in self._programs:
            self._programs[key] = self._make(*key)
        return self._programs[key]

    def _make(self, kind: str, *key: Any) -> Any:
        """The program of a key. Arguments are abstract but for the parameters."""
        longest, index = self.slot_ladder[-1], jax.ShapeDtypeStruct((), jnp.int32)
        row = jax.eval_shape(functools.partial(blank_row, longest, self.num_stop_ids))
        reading = jax.eval_shape(lambda: Reading.nothing(self._plan, self._params, *self._caches(1, longest)))
        if kind == "nothing":
            return self._compile(lambda: Reading.nothing(self._plan, self._params, *self._caches(1, longest)), out=reading)
        if kind == "read":
            return self._compile(self._read, self._params, reading, row.ids, row.length, index, donate=(1,), out=reading)
        begun = jax.eval_shape(self._begin, self._params, row, reading)
        if kind == "begin":
            return self._compile(self._begin, self._params, row, reading, out=begun)
        (shape,), target = key[:1], key[1:]
        state = jax.eval_shape(lambda: self._empty(shape))
        if kind == "empty":
            return self._compile(lambda: self._empty(shape), out=state)
        if kind == "insert":
            return self._compile(self._insert, state, begun[0], index, donate=(0,), out=state)
        if kind == "round":
            run = functools.partial(self._round, rows=shape.rows)
            release = jax.ShapeDtypeStruct((shape.rows,), jnp.bool_)
            out = jax.eval_shape(run, self._params, state, release)
            return self._compile(run, self._params, state, release, donate=(1,), out=out)
        source, wanted = jax.ShapeDtypeStruct((target[0].rows,), jnp.int32), jax.eval_shape(lambda: self._empty(target[0]))
        return self._compile(functools.partial(self._resize, shape=target[0]), state, source, out=wanted)

    def compile_all(self) -> Iterator[tuple[int, int]]:
        """Compile what has not been compiled; gives (done, number of programs) along the way."""
        neighbours = [(a, b) for a in self.shapes for b in self.shapes if a != b and self._adjacent(a, b)]
        keys: list[tuple] = [("nothing",), ("read",), ("begin",)]
        keys += [(kind, shape) for shape in self.shapes for kind in ("round", "insert", "empty")]
        keys += [("resize", *pair) for pair in neighbours]
        for done, key in enumerate(keys):
            self._program(*key)
            yield done + 1, len(keys)
        if self._state is None:
            self.reset(self.shape)

    def _adjacent(self, a: BatchShape, b: BatchShape) -> bool:
        ladder, slots = sorted(self.plans), list(self.slot_ladder)
        steps = abs(ladder.index(a.rows) - ladder.index(b.rows)), abs(slots.index(a.slots) - slots.index(b.slots))
        return sum(steps) == 1

    # --- the executor

    def reset(self, shape: BatchShape) -> None:
        """See `SlotExecutor`."""
        self.shape, self._state = shape, self._program("empty", shape)()

    def read(self, row: NewRow, reading: Any, index: int) -> Any:
        """See `SlotExecutor`."""
        reading = self._program("nothing")() if reading is None else reading
        return self._program("read")(self._params, reading, row.ids, row.length, np.int32(index))

    def begin(self, row: NewRow, reading: Any) -> tuple[Any, Ticket]:
        """See `SlotExecutor`."""
        state, first = self._program("begin")(self._params, row, reading)
        return state, _DeviceTicket(first)

    def insert(self, row_state: Any, slot: int) -> None:
        """See `SlotExecutor`."""
        self._state = self._program("insert", self.shape)(self._state, row_state, np.int32(slot))

    def resize(self, kept: Sequence[int], shape: BatchShape) -> None:
        """See `SlotExecutor`; by way of the shapes in between."""
        while self.shape != shape:
            following = self._towards(shape)
            source = np.full((following.rows,), -1, np.int32)
            source[: len(kept)] = kept
            self._state = self._program("resize", self.shape, following)(self._state, source)
            self.shape, kept = following, range(len(kept))
            if self.shape != shape:
                # Never three batches at a time.
                jax.block_until_ready(self._state)

    def _towards(self, shape: BatchShape) -> BatchShape:
        def nearer(ladder: list[int], here: int, there: int) -> int:
            place = ladder.index(here)
            return ladder[place + (ladder.index(there) > place) - (ladder.index(there) < place)]

        rows = nearer(sorted(self.plans), self.shape.rows, shape.rows)
        if rows != self.shape.rows:
            return BatchShape(rows, self.shape.slots)
        return BatchShape(rows, nearer(list(self.slot_ladder), self.shape.slots, shape.slots))

    def launch(self, release: np.ndarray) -> Ticket:
        """See `SlotExecutor`."""
        self._state, stats = self._program("round", self.shape)(self._params, self._state, release)
        return _DeviceTicket(stats)
