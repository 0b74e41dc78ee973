"""The device mesh, the rules from logical to mesh axes, and multi-host start-up.

Parameters name their axes logically ("vocab", "embed", "heads", ...) where they are created; this file alone says which mesh
axis each of them is split over. Programs are plain `jax.jit` with NamedSharding: the same code runs on one CPU, on eight
virtual devices, on a GPU and on every host of a pod.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import multihost_utils
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

    The devices of a host lie next to each other, so that the tensor axis, whose traffic is the heaviest, leaves a host last, and every
    host has neighbouring rows of a batch.

    Raises:
      ValueError: where the sizes do not multiply to the number of devices.
    """
    chosen = sorted(jax.devices(), key=lambda device: (device.process_index, device.id)) if devices is None else list(devices)
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


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with its axes split by the rules, over the mesh that `jax.set_mesh` has set; as it is where none is set.

    Where the parameters of a product are split along the axis that it sums over, XLA may move either them or the activations: this says
    which.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not set(MESH_AXES) <= set(mesh.axis_names):
        return x
    axes = (_mesh_axes_of(name, size, mesh) for name, size in zip(names, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, whole: NamedSharding, cut: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, whole)


def _gathered_forward(x: jax.Array, whole: NamedSharding, cut: NamedSharding) -> tuple[jax.Array, None]:
    return _gathered(x, whole, cut), None


def _gathered_backward(whole: NamedSharding, cut: NamedSharding, residual: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, cut),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def gather_parameters(mesh: Mesh, model: Initialised, params: Any) -> Any:
    """`params` as a forward pass should read them: whole along "fsdp", still cut along "tensor"; gradients come back cut.

    Left alone, XLA takes a weight that is cut along the axis which a product sums over as a wish to cut the activations there as
    well, and to have all rows of a batch on every device.
    """

    def gathered(x: Any, cut: NamedSharding) -> Any:
        whole = NamedSharding(mesh, PartitionSpec(*(None if axis == "fsdp" else axis for axis in cut.spec)))
        return x if whole == cut else _gathered(x, whole, cut)

    return jax.tree.map(gathered, params, parameter_shardings(mesh, model))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, shardings: Any) -> Any:
    """A tree that every host has as a whole, cut up by `shardings`, a tree of the same structure or one sharding for all."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: _from_everywhere(leaf, shardings), tree)
    return jax.tree.map(_from_everywhere, tree, shardings)


def _from_everywhere(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def on_every_host(tree: Any) -> Any:
    """The opposite of `place`: a tree that every host has as a whole, in its own memory. All hosts call it."""
    if jax.process_count() == 1:
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


def batch_share(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Which rows of every batch this host has to read: share `index` of `count` equal ones, as `data.TokenBatches` takes them.

    Hosts that differ along the tensor axis alone have the same share.

    Raises:
      ValueError: the rows cannot be split evenly over the data and fsdp axes, or those of this host are no share.
    """
    groups = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % groups:
        raise ValueError(f"batch_size is {batch_size}; allowed are multiples of data x fsdp = {groups} of the mesh")
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    starts = {rows[0].indices(batch_size)[0] for rows in indices if rows is not None}
    first, size = min(starts), len(starts) * (batch_size // groups)
    if batch_size % size or first % size or max(starts) - first + batch_size // groups != size:
        raise ValueError(
            f"mesh gives this host the rows from {sorted(starts)} on of {batch_size}; they must be one of several equal shares"
        )
    return first // size, batch_size // size


def global_batch(mesh: Mesh, batch_size: int, share: Any) -> Any:
    """The arrays of a batch over all hosts from each host's own rows; leading axes are `batch_size` afterwards."""

    def joined(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(batch_sharding(mesh), rows, (batch_size, *rows.shape[1:]))

    return jax.tree.map(joined, share)


def start_multi_host(coordinator: str | None = None, num_hosts: int | None = None, host: int | None = None) -> None:
    """Join the other hosts of a run. Call once, before any array exists; a single host needs no call.

    On Cloud TPU pods and under SLURM everything is found out; elsewhere the arguments say it, the same on all hosts but for the last.

    Args:
      coordinator: "address:port" of host 0, with a port that is free there.
      num_hosts: processes of the run.
      host: number of this one, from 0.

    Raises:
      ValueError: some of the arguments are given and some are not.
    """
    given = [value is not None for value in (coordinator, num_hosts, host)]
    if any(given) and not all(given):
        raise ValueError(f"coordinator is {coordinator!r}, num_hosts {num_hosts} and host {host}; allowed is all three or none")
    jax.distributed.initialize(coordinator, num_hosts, host)
