"""The device mesh, the rules from logical to mesh axes, and multi-host start-up.

Parameters name their axes logically ("vocab", "embed", "heads", ...) where they are created; this file alone says which mesh
axis each of them is split over. Programs are plain `jax.jit` with NamedSharding: the same code runs on one CPU, on eight
virtual devices, on a GPU and on every host of a pod.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "expert_mlp": None,
    "embed": "fsdp",
    "features": None,
    "streams": None,
    "rank": None,
    "norm": None,
}


class Initialised:
    """Gives a target or drafter its parameters from one function that initialises its modules, logical axes and all."""

    def _boxed_init(self, rng: jax.Array) -> Any:
        raise NotImplementedError

    def init(self, rng: jax.Array) -> Any:
        """Random float32 parameters: weights normal with standard deviation 0.02, norms 1, biases 0."""
        return nn.meta.unbox(self._boxed_init(rng))

    def boxed_params(self) -> Any:
        """Abstract parameters with their logical axes, for `parameter_shardings`."""
        return jax.eval_shape(self._boxed_init, jax.random.key(0))

    def abstract_params(self) -> Any:
        """Shapes and dtypes of the parameters."""
        return nn.meta.unbox(self.boxed_params())


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices with the axes ("data", "fsdp", "tensor").

    Raises:
      ValueError: where the sizes do not multiply to the number of devices.
    """
    chosen = list(jax.devices() if devices is None else devices)
    sizes = (data, fsdp, tensor)
    if min(sizes) < 1 or math.prod(sizes) != len(chosen):
        raise ValueError(
            f"mesh data x fsdp x tensor = {data} x {fsdp} x {tensor} does not fit {len(chosen)} devices: the product must equal it"
        )
    return Mesh(np.asarray(chosen).reshape(sizes), MESH_AXES)


def _mesh_axes_of(name: str | None, size: int, mesh: Mesh) -> str | tuple[str, ...] | None:
    """Mesh axes that a logical axis of `size` is split over; None (replicated) where they do not divide it."""
    if name is None:
        return None
    if name not in LOGICAL_RULES:
        raise ValueError(f"logical axis {name!r} has no rule; known axes: {', '.join(sorted(LOGICAL_RULES))}")
    axes = LOGICAL_RULES[name]
    if axes is None:
        return None
    shards = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
    return axes if size % shards == 0 else None


def parameter_shardings(mesh: Mesh, model: Initialised) -> Any:
    """A NamedSharding for every parameter of `model`, in a tree shaped like its parameters."""

    def sharding_of(leaf: Any) -> NamedSharding:
        shape = leaf.value.shape if isinstance(leaf, nn.LogicallyPartitioned) else leaf.shape
        names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else (None,) * len(shape)
        return NamedSharding(mesh, PartitionSpec(*(_mesh_axes_of(name, size, mesh) for name, size in zip(names, shape, strict=True))))

    return jax.tree.map(sharding_of, model.boxed_params(), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def start_multi_host() -> None:
    """Join the other hosts of a pod. Call once, before any array exists; a single host needs no call."""
    jax.distributed.initialize()
