"""The training step and the decode round at the real dimensions, to be compiled for all chips of a topology that is not here.

Everything is abstract: parameters, optimizer state and caches are shapes with a place on the mesh, as `dspark_jax.sharding` gives it.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, decode_round
from dspark_jax.losses import DraftLossConfig
from dspark_jax.round_stats import RoundStats
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.sharded_training import sharded_train_step, train_state_shardings
from dspark_jax.sharding import Initialised, batch_sharding, make_mesh, parameter_shardings, replicated
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state
from experiments.aot_work import topology_device
from experiments.model_presets import ModelPreset
from experiments.step_timing import SLOTS_AHEAD
from experiments.written_out import written_out

ANCHORS, TEXT_LENGTH = 512, 4096
"""Blocks and tokens of a text, the paper's."""

SITES_PER_CHIP = 512
"""Prediction sites of a chip whose logits exist at once: enough that reading the output head is not what takes the time."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What `jax.jit` gave and is to be lowered with, over the mesh."""

    mesh: Mesh
    jitted: Any
    args: tuple[Any, ...]

    def compile(self) -> Any:
        """Compiled for the mesh's devices. Raises what XLA raises, for one where it does not fit."""
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(*self.args).compile()


def topology_mesh(topology: str, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of all chips of a TPU topology ("v5e:4x4"). Errors as in `topology_device` and `make_mesh`."""
    topology_device(topology)
    return make_mesh(data, fsdp, tensor, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def models(preset: ModelPreset, num_layers: int | None = None) -> tuple[Any, Any]:
    """Target and DSpark drafter of a preset, as they are on TPUs.

    Args:
      num_layers: of the target; None for all. The taps that are then too deep move up to the last layer that may be tapped.
    """
    drafter = dataclasses.replace(preset.dspark(), backend="xla")
    target = dataclasses.replace(preset.target, cache_writes="late")
    if num_layers is None:
        return target, drafter
    target = dataclasses.replace(target, config=dataclasses.replace(target.config, num_layers=num_layers))
    taps = tuple(min(tap, num_layers - 2) for tap in drafter.taps)
    return target, dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, taps=taps))


def train_config(mesh: Mesh, micro_batches: int = 1) -> TrainConfig:
    """The paper's settings, bfloat16 between the masters; the sites that have logits at once grow with the chips."""
    loss = DraftLossConfig(chunk=SITES_PER_CHIP * mesh.size)
    optimizer = OptimizerConfig(total_steps=10_000)
    return TrainConfig(optimizer, loss, num_anchors=ANCHORS, micro_batches=micro_batches, compute_dtype="bfloat16")


def training_step(target: Any, drafter: Any, mesh: Mesh, texts_per_shard: int = 1, micro_batches: int = 1) -> Program:
    """The online step: a frozen bfloat16 target, float32 masters and moments of the drafter.

    Args:
      texts_per_shard: texts of a micro-batch in each part that the mesh splits it into.
    """
    config, shardings = train_config(mesh, micro_batches), parameter_shardings(mesh, target)
    state = jax.eval_shape(lambda: init_train_state(jax.random.key(0), drafter.init(jax.random.key(0)), config.optimizer, config.trainable))
    state = _placed(state, train_state_shardings(mesh, drafter, config))
    shape = (texts_per_shard * micro_batches * mesh.shape["data"] * mesh.shape["fsdp"], TEXT_LENGTH)
    texts = [jax.ShapeDtypeStruct(shape, kind, sharding=batch_sharding(mesh)) for kind in (jnp.int32, jnp.bool_)]
    target_params = _placed(_in_bfloat16(target), shardings)
    return Program(mesh, sharded_train_step(mesh, target, drafter, config), (state, target_params, *texts))


@dataclasses.dataclass(frozen=True)
class RoundSize:
    """What a round works on.

    Attributes:
      rows: requests.
      context: committed tokens of each.
      bucket: flat tokens of the target's pass.
      temperature: of all requests; a constant of the program, so that what other temperatures need is left out.
    """

    rows: int
    context: int
    bucket: int
    temperature: float = 1.0

    @property
    def slots(self) -> int:
        """Of a cache, per request."""
        return self.context + SLOTS_AHEAD


def decoding_round(target: Any, drafter: Any, mesh: Mesh, size: RoundSize) -> Program:
    """One round, its loops written out; weights and caches lie in memory as the compiler wants them.

    Caches are split by requests over "data" and "fsdp" and by key heads over "tensor"; the state is given up to the next one.
    """
    plan = DecodePlan(target, drafter, FixedLength(drafter.block_size), RawSurvival(), backend="xla")
    params = tuple(_in_bfloat16(model) for model in (target, drafter))
    state = _decode_state(target, drafter, size)

    def one_round(params: Any, state: DecodeState) -> tuple[DecodeState, RoundStats]:
        sampling = Sampling.make(size.rows, size.temperature)
        whole = dataclasses.replace(state, sampling=sampling)
        following, stats = decode_round(plan, DecodeParams.of(target, *params), whole, size.bucket)
        return dataclasses.replace(following, sampling=None), stats

    cache = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))

    def free(sharding: Any) -> Format:
        return Format(Layout.AUTO, sharding)

    weights_lie = tuple(jax.tree.map(free, parameter_shardings(mesh, model)) for model in (target, drafter))
    state_lies = jax.tree.map(lambda leaf: free(cache) if leaf.ndim == 4 else replicated(mesh), state)
    counted = written_out(one_round, mesh, params, state)
    jitted = jax.jit(counted, in_shardings=(weights_lie, state_lies), out_shardings=(state_lies, None), donate_argnums=1)
    return Program(mesh, jitted, (params, state))


def live_bytes(target: Any, drafter: Any, size: RoundSize) -> int:
    """What a round cannot do without reading: all parameters of both models, and the keys and values of committed tokens."""
    state = _decode_state(target, drafter, size)
    caches = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    slots_in_use = sum(_nbytes(leaf) * size.context // leaf.shape[2] for leaf in caches)
    return slots_in_use + sum(_nbytes(leaf) for leaf in jax.tree.leaves([_in_bfloat16(model) for model in (target, drafter)]))


def _decode_state(target: Any, drafter: Any, size: RoundSize) -> DecodeState:
    def abstract(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def caches() -> tuple[Any, Any]:
        options: Any = {"writes_per_pass": drafter.block_size + 1, "dtype": jnp.bfloat16}
        return target.init_cache(size.rows, size.slots, **options), drafter.init_state(size.rows, size.slots, **options)

    target_cache, drafter_state = jax.eval_shape(caches)
    per_row, constant = abstract(size.rows), cast(Any, None)
    return DecodeState(
        ids=abstract(size.rows, size.slots),
        length=per_row,
        prompt_length=per_row,
        limit=per_row,
        stop_ids=abstract(size.rows, 1),
        finished=abstract(size.rows, dtype=jnp.bool_),
        request_id=per_row,
        round=per_row,
        seed=abstract(2, dtype=jnp.uint32),
        sampling=constant,
        target_cache=target_cache,
        drafter_state=drafter_state,
    )


def _in_bfloat16(model: Initialised) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), model.abstract_params())


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings)


def _nbytes(leaf: Any) -> int:
    return leaf.size * jnp.dtype(leaf.dtype).itemsize
