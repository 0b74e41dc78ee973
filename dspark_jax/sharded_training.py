"""Training over a mesh: where every array of a training state lies, and the optimizer step between such states.

Its arguments are placed by the rules of `sharding.py`, XLA derives the collectives, and the state comes out as it went in: parameters
and moments split over "fsdp" and "tensor", rows of the batch over "data" and "fsdp". A weight is gathered along "fsdp" where a
forward pass uses it, so that activations are split by rows alone (and by heads and MLP along "tensor").
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from dspark_jax.anchors import read_batch, sample_anchors
from dspark_jax.feature_samples import FeatureBatch, anchored_batch
from dspark_jax.protocols import FlatTokens, Sites, Target, TargetHead, TrainBatch
from dspark_jax.sharding import gather_parameters, parameter_shardings, place, replicated
from dspark_jax.train import TrainConfig, TrainState, init_train_state, train_step, train_step_on_features
from dspark_jax.typing import Array, Params


def train_state_shardings(mesh: Mesh, drafter: Any, config: TrainConfig) -> TrainState:
    """A NamedSharding for every array of a training state, in a tree shaped like it.

    Moments lie where their parameters lie; step number, random key and the optimizer's counters are on every device.

    Args:
      drafter: a `protocols.Drafter` whose parameters have logical axes (`sharding.Initialised`).
    """

    def initial(rng: PRNGKeyArray) -> TrainState:
        return init_train_state(rng, drafter.init(rng), config.optimizer, config.trainable)

    of_parameters = dict(jax.tree_util.tree_flatten_with_path(parameter_shardings(mesh, drafter))[0])

    def sharding_of(path: tuple[Any, ...], _: Any) -> NamedSharding:
        # The path of a parameter is the end of its moments' paths.
        ends = (path[start:] for start in range(len(path)))
        return next((of_parameters[end] for end in ends if end in of_parameters), replicated(mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(initial, jax.random.key(0)))


def sharded_train_state(mesh: Mesh, drafter: Any, config: TrainConfig, seed: int, params: Params | None = None) -> TrainState:
    """`train.init_train_state` over a mesh: no device ever holds more than its part of random parameters or of moments.

    Args:
      seed: of the parameters and of the anchors.
      params: to go on from, the same on every host; None for random ones.
    """
    shardings = train_state_shardings(mesh, drafter, config)

    def initial(params: Params | None) -> TrainState:
        params_rng, anchor_rng = jax.random.split(jax.random.key(seed))
        return init_train_state(anchor_rng, drafter.init(params_rng) if params is None else params, config.optimizer, config.trainable)

    if params is not None:
        params = place(params, parameter_shardings(mesh, drafter))
    return jax.jit(initial, out_shardings=shardings)(params)


@dataclasses.dataclass(frozen=True)
class _Gathering:
    """A model as the training step sees it, its weights gathered along "fsdp" where they are used."""

    model: Any
    mesh: Mesh

    def _gathered(self, params: Params) -> Params:
        return gather_parameters(self.mesh, self.model, params)


@dataclasses.dataclass(frozen=True)
class _GatheringTarget(_Gathering):
    def head(self, params: Params) -> TargetHead:
        return self.model.head(self._gathered(params))

    def forward(self, params: Params, cache: Any, tokens: FlatTokens, taps: tuple[int, ...]) -> tuple[Array, Array, Any]:
        return self.model.forward(self._gathered(params), cache, tokens, taps)


@dataclasses.dataclass(frozen=True)
class _GatheringDrafter(_Gathering):
    @property
    def block_size(self) -> int:
        return self.model.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        return self.model.prediction_sites(self._gathered(params), head, batch)

    def site_logits(self, params: Params, head: TargetHead, hidden: Array, latent: Array) -> Array:
        # The parameters of sequential heads have no axis that is split over "fsdp".
        return self.model.site_logits(params, head, hidden, latent)

    def rebalanced(self, params: Params, head: TargetHead, batch: TrainBatch) -> Params:
        return self.model.rebalanced(params, head, batch)


Step = Callable[..., tuple[TrainState, dict[str, Array]]]
"""(state, target parameters, ids, loss mask, draft ids, segment) to the next state and metrics, as `train.train_step` has them."""

_Advance = tuple[TrainState, dict[str, Array], Callable[[], TrainBatch]]
"""The next state, metrics, and what gives the batch of the first micro-batch."""


def sharded_train_step(mesh: Mesh, target: Target, drafter: Any, config: TrainConfig) -> Step:
    """`train.train_step`, compiled for states of `train_state_shardings`; metrics come out on every device.

    A drafter with mixtures of experts also has their balance biases moved, by the loads of the rows of the first micro-batch.
    """
    reading: Any = _GatheringTarget(target, mesh)
    drafting: Any = _GatheringDrafter(drafter, mesh)

    def advance(
        state: TrainState, target_params: Params, ids: Array, loss_mask: Array, draft_ids: Array | None, segment: Array | None
    ) -> _Advance:
        def first_part() -> TrainBatch:
            rng = jax.random.fold_in(state.rng, state.step)
            rows = (ids, loss_mask, *sample_anchors(rng, loss_mask, config.num_anchors, segment), segment)
            return read_batch(reading, target_params, drafter.taps, *_first_part(rows, config))

        return *train_step(reading, drafting, config, state, target_params, ids, loss_mask, draft_ids, segment), first_part

    return _over_the_mesh(mesh, reading, drafting, config, advance)


def sharded_train_step_on_features(mesh: Mesh, target: Target, drafter: Any, config: TrainConfig) -> Step:
    """`sharded_train_step` that takes two more arguments, features and last hidden states of the texts, of which the target reads none.

    Anchors are those that the online step would draw. Of the target's parameters only the head's are used.
    """
    reading: Any = _GatheringTarget(target, mesh)
    drafting: Any = _GatheringDrafter(drafter, mesh)

    def advance(
        state: TrainState,
        target_params: Params,
        ids: Array,
        loss_mask: Array,
        draft_ids: Array | None,
        segment: Array | None,
        features: Array,
        last_hidden: Array,
    ) -> _Advance:
        head, rng = reading.head(target_params), jax.random.fold_in(state.rng, state.step)
        stored = FeatureBatch(ids, loss_mask, features, last_hidden, segment)
        batch = anchored_batch(stored, rng, config.num_anchors, head.embedding.dtype)
        return *train_step_on_features(drafting, config, state, head, batch, draft_ids), lambda: _first_part(batch, config)

    return _over_the_mesh(mesh, reading, drafting, config, advance)


def _first_part(tree: Any, config: TrainConfig) -> Any:
    return jax.tree.map(lambda x: x[:: config.micro_batches], tree)


def _over_the_mesh(mesh: Mesh, reading: Any, drafting: Any, config: TrainConfig, advance: Callable[..., _Advance]) -> Step:
    """A compiled step, with experts rebalanced where the drafter has any."""
    drafter = drafting.model
    balances = getattr(getattr(drafter, "config", None), "experts", None) is not None and config.trainable == "all"

    def step(
        state: TrainState,
        target_params: Params,
        ids: Array,
        loss_mask: Array,
        draft_ids: Array | None = None,
        segment: Array | None = None,
        *features: Array,
    ) -> tuple[TrainState, dict[str, Array]]:
        # `sharding.constrain` splits activations over the mesh that is set.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            following, metrics, first_part = advance(state, target_params, ids, loss_mask, draft_ids, segment, *features)
            if balances:
                head = reading.head(target_params).restrict(draft_ids)
                following = dataclasses.replace(following, params=drafting.rebalanced(following.params, head, first_part()))
            return following, metrics

    out = (train_state_shardings(mesh, drafter, config), replicated(mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=out)


__all__ = ["Step", "sharded_train_state", "sharded_train_step", "sharded_train_step_on_features", "train_state_shardings"]
