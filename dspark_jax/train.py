"""The optimizer step of a drafter: the target reads, anchors are drawn, the loss falls.

Online: the frozen target runs inside the step, so nothing is stored between them. Parameters and moments are float32 whatever the compute
dtype is: at these learning rates bfloat16 parameters would never move [E3]. The step is plain `jax.jit`: place its arguments on a
mesh and the sums over the batch become sums over all devices. Source: section 4.1 of the DSpark paper and its released settings.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import struct
from jaxtyping import PRNGKeyArray

from dspark_jax.anchors import read_batch, sample_anchors
from dspark_jax.losses import DraftLossConfig, LossTerms, draft_denominators, draft_loss, loss_metrics
from dspark_jax.protocols import Drafter, Target, TargetHead, TrainBatch
from dspark_jax.typing import Array, Bool, Int, Params, typed


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a clipped gradient, a linear warm-up and a cosine decay. Defaults are the paper's.

    Attributes:
      algorithm: "adamw"; or "muon", an ablation: the momentum of the projections of the layers is orthogonalised, and scaled so that an
        update is as large as AdamW's (Liu et al., "Muon is scalable for LLM training", 2025). Everything else has AdamW with
        Nesterov's momentum.
      total_steps: N, optimizer steps of the whole run.
      learning_rate: at the end of the warm-up.
      init_learning_rate: what the warm-up starts from (before its first step, which already takes one increment).
      final_learning_rate: what the cosine ends at, after the last step.
      warmup_ratio: share of the steps that warm up, rounded down to whole steps.
      max_grad_norm: the global norm is cut to it; infinity for never.
      reference_overshoot: repeat the reference's hand-over to the cosine, which multiplies every rate behind the warm-up by
        2 / (1 + cos(pi / T)), T being the steps behind it. Off: the cosine begins at `learning_rate`.
    """

    total_steps: int
    learning_rate: float = 6e-4
    init_learning_rate: float = 0.0
    final_learning_rate: float = 0.0
    warmup_ratio: float = 0.04
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    algorithm: Literal["adamw", "muon"] = "adamw"
    reference_overshoot: bool = False

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; at least 1 is needed")
        for name, low, high in (("warmup_ratio", 0.0, 1.0), ("beta1", 0.0, 1.0), ("beta2", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value < high:
                raise ValueError(f"{name} is {value}; allowed: {low} <= {name} < {high}")
        for name in ("learning_rate", "init_learning_rate", "final_learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; allowed: a finite number of at least 0")
        if self.algorithm not in ("adamw", "muon"):
            raise ValueError(f"algorithm is {self.algorithm!r}; allowed: adamw, muon")
        if not self.max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; allowed: a positive number")
        if self.reference_overshoot and self.total_steps - self.warmup_steps < 2:
            raise ValueError(f"total_steps is {self.total_steps}; reference_overshoot needs at least 2 steps behind the warm-up")

    @property
    def warmup_steps(self) -> int:
        """Steps that warm up."""
        return int(self.warmup_ratio * self.total_steps)


Trainable = Literal["all", "confidence_head"]
TRAINABLES: tuple[Trainable, ...] = ("all", "confidence_head")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that one optimizer step depends on.

    Attributes:
      num_anchors: A, blocks drawn per sequence and step.
      micro_batches: parts that a batch is computed in, one after another; the batch size must be a multiple of it.
      normalise: "global": losses are means over the whole batch, whatever the parts are. "micro": every part is a mean over its
        own sites and the step takes the mean of the parts, as the reference does; short answers then weigh more.
      compute_dtype: dtype that parameters and features are cast to in the forward pass: "float32" or "bfloat16".
      trainable: "confidence_head" leaves everything else as it is, to the bit, and of the loss only the confidence term stands.
    """

    optimizer: OptimizerConfig
    loss: DraftLossConfig = DraftLossConfig()
    num_anchors: int = 512
    micro_batches: int = 1
    normalise: Literal["global", "micro"] = "global"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    trainable: Trainable = "all"

    def __post_init__(self) -> None:
        for name in ("num_anchors", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        choices = {"normalise": ("global", "micro"), "compute_dtype": ("float32", "bfloat16"), "trainable": TRAINABLES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.trainable == "confidence_head" and not self.loss.confidence:
            raise ValueError("confidence is 0.0 in loss; a trainable 'confidence_head' needs a positive weight")

    @property
    def step_loss(self) -> DraftLossConfig:
        """`loss` as far as it moves what is trained."""
        return self.loss if self.trainable == "all" else dataclasses.replace(self.loss, ce=0.0, l1=0.0, soft_ce=0.0)


@struct.dataclass
class TrainState:
    """What a run carries from step to step and a checkpoint holds. `rng` never changes: a step folds its number into it."""

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    rng: PRNGKeyArray


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate of step 0, 1, ...: the s-th warm-up step takes (s + 1) / w of the way up, then a cosine over the rest."""
    warmup = config.warmup_steps
    decay = config.total_steps - warmup
    peak, first, last = config.learning_rate, config.init_learning_rate, config.final_learning_rate

    def rate(step: Any) -> Array:
        done = jnp.asarray(step).astype(jnp.float32)
        up = first + (peak - first) * (done + 1.0) / max(warmup, 1)
        share = (done - warmup) / decay
        if config.reference_overshoot:
            # The reference's recursion leaves the overshoot behind where the cosine has come to its end and rises again.
            cosine = (1.0 + jnp.cos(jnp.pi * share)) / jnp.where(share <= 1.0, 1.0 + math.cos(math.pi / decay), 2.0)
        else:
            cosine = (1.0 + jnp.cos(jnp.pi * jnp.minimum(share, 1.0))) / 2.0
        return jnp.where(done < warmup, up, last + (peak - last) * cosine)

    return rate


def _global_norm(tree: Any) -> Array:
    return jnp.sqrt(sum((jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)), start=jnp.zeros((), jnp.float32)))


def clip_gradient(max_norm: float) -> optax.GradientTransformation:
    """Scale by min(1, max_norm / (norm + 1e-6)), norm being the global L2 norm: the reference's clipping."""

    def scaled(updates: Any, _: Any) -> Any:
        factor = jnp.minimum(1.0, max_norm / (_global_norm(updates) + 1e-6))
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)

    return optax.stateless(scaled)


MUON_UPDATE_RMS = 0.2
"""Root mean square of Muon's updates in units of the learning rate: AdamW's, by the paper that scaled it up."""


def _orthogonalised(params: Params) -> Any:
    """Which parameters Muon moves: projections (out, in). Tables, norms and heads are AdamW's."""

    def dimensions(path: Any, leaf: Any) -> Any:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        is_projection = leaf.ndim == 2 and len(names) > 1 and (names[-2].endswith("_proj") or names[-2] == "fc")
        return optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0) if is_projection else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped AdamW (or Muon); decay is decoupled from the moments and scaled by the learning rate."""
    rate, decay = learning_rate(config), config.weight_decay
    if config.algorithm == "muon":
        algorithm = optax.contrib.muon(
            rate,
            weight_decay=decay,
            eps=config.epsilon,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=decay,
            muon_weight_dimension_numbers=cast(Any, _orthogonalised),
            consistent_rms=MUON_UPDATE_RMS,
        )
    else:
        algorithm = optax.adamw(rate, config.beta1, config.beta2, config.epsilon, weight_decay=decay)
    chain = optax.chain(clip_gradient(config.max_grad_norm), algorithm)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # optax raises a float to the power of its integer step count, which strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params, **extra)

    return optax.GradientTransformation(chain.init, update)


def _parted(params: Params, trainable: Trainable) -> tuple[Params, Params]:
    """The parameters that a step moves, and the frozen ones."""
    if trainable == "all":
        return params, {}
    if trainable not in params:
        raise ValueError(f"trainable is {trainable!r}; the drafter has none: its parameters are {', '.join(sorted(params))}")
    return {trainable: params[trainable]}, {name: leaf for name, leaf in params.items() if name != trainable}


def init_train_state(rng: PRNGKeyArray, params: Params, config: OptimizerConfig, trainable: Trainable = "all") -> TrainState:
    """The state before the first step; parameters become float32 masters, copied, since a step gives its state's arrays away.

    Args:
      trainable: as in the `TrainConfig` of the steps; the optimizer has moments of what is trained alone.

    Raises:
      ValueError: the drafter has no parameters of what is to be trained.
    """
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    opt_state = make_optimizer(config).init(_parted(masters, trainable)[0])
    return TrainState(step=jnp.zeros((), jnp.int32), params=masters, opt_state=opt_state, rng=jnp.copy(rng))


def _cast(tree: Any, dtype: Any) -> Any:
    """Floating leaves in `dtype`; ids stay what they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _in_parts(tree: Any, parts: int) -> Any:
    """[B, ...] to [parts, B / parts, ...]. Part m takes the rows m, m + parts, ...: a batch that is split over devices stays so."""

    def split(x: Array) -> Array:
        if x.shape[0] % parts:
            raise ValueError(f"micro_batches is {parts}; it must divide the batch size {x.shape[0]}")
        return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, tree)


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The loss of parts of a batch, as a function of float32 parameters."""

    drafter: Drafter
    config: TrainConfig
    teacher_head: TargetHead
    draft_ids: Array | None

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.config.compute_dtype)

    @property
    def head(self) -> TargetHead:
        return _cast(self.teacher_head.restrict(self.draft_ids), self.dtype)

    def denominators(self, params: Params, ids: Array, loss_mask: Array, anchors: Array, keep: Array, segment: Array | None) -> Any:
        """Sums of weights of the whole batch. They depend on masks and labels alone, so that XLA drops everything else of this pass."""
        width = self.head.embedding.shape[1]
        features = jnp.zeros((*ids.shape, width * len(self.drafter.taps)), self.dtype)
        last_hidden = jnp.zeros((*ids.shape, width), self.dtype)
        blank = TrainBatch(ids, loss_mask, features, last_hidden, anchors, keep, segment=segment)
        return draft_denominators(self.drafter.prediction_sites(_cast(params, self.dtype), self.head, blank), self.draft_ids)

    def __call__(self, moving: Params, frozen: Params, batch: TrainBatch, denominators: Any) -> tuple[Array, LossTerms]:
        params = _cast({**moving, **frozen}, self.dtype)
        batch = dataclasses.replace(batch, features=batch.features.astype(self.dtype))
        return draft_loss(self.drafter, params, self.head, self.teacher_head, batch, self.config.step_loss, denominators)


def _gradients(
    objective: _Objective, params: Params, parts: Any, read: Callable[[Any], TrainBatch], denominators: Any
) -> tuple[Array, LossTerms, Params]:
    """Loss, terms and float32 gradients, summed over the parts of a batch; `read` makes each part's batch when its turn comes.

    Gradients are of what is trained: nothing is differentiated with respect to the rest.
    """
    moving, frozen = _parted(params, objective.config.trainable)

    def evaluate(rows: Any) -> tuple[Array, LossTerms, Params]:
        (loss, terms), gradients = jax.value_and_grad(objective, has_aux=True)(moving, frozen, read(rows), denominators)
        return loss, terms, gradients

    shapes = jax.eval_shape(evaluate, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, _ = jax.lax.scan(lambda total, rows: (jax.tree.map(jnp.add, total, evaluate(rows)), None), zeros, parts)
    return sums


def _step(
    objective: _Objective, state: TrainState, rows: tuple[Any, ...], parts: Any, read: Callable[[Any], TrainBatch]
) -> tuple[TrainState, dict[str, Array]]:
    """One update. `rows` are ids, loss mask, anchors, keep and segment of the whole batch; `parts` is what `read` turns into batches."""
    config = objective.config
    denominators = objective.denominators(state.params, *rows) if config.normalise == "global" else None
    loss, terms, gradients = _gradients(objective, state.params, parts, read, denominators)
    if config.normalise == "micro":
        loss, gradients = jax.tree.map(lambda x: x / config.micro_batches, (loss, gradients))
    moving, frozen = _parted(state.params, config.trainable)
    updates, opt_state = make_optimizer(config.optimizer).update(gradients, state.opt_state, moving)
    metrics = loss_metrics(terms, config.step_loss) | {
        "loss": loss,
        "grad_norm": _global_norm(gradients),
        "learning_rate": learning_rate(config.optimizer)(state.step),
    }
    moved: Any = optax.apply_updates(cast(Any, moving), updates)
    return dataclasses.replace(state, step=state.step + 1, params={**moved, **frozen}, opt_state=opt_state), metrics


@partial(jax.jit, static_argnames=("target", "drafter", "config"), donate_argnames=("state",))
def train_step(
    target: Target,
    drafter: Drafter,
    config: TrainConfig,
    state: TrainState,
    target_params: Params,
    ids: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    draft_ids: Int[Array, "Vd"] | None = None,
    segment: Int[Array, "B S"] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step, online: the target reads the texts inside it. `state` is given away: its arrays are reused.

    Args:
      target_params: the frozen target's parameters, in the dtype it is to run in.
      ids: tokens, zero-padded at the right.
      loss_mask: True on the tokens that the target wrote.
      draft_ids: ascending target ids of the draft vocabulary; None for all of them.
      segment: number of the text that each position belongs to, where rows hold several texts [E2]; None where a row is one.

    Returns:
      the next state, and `losses.loss_metrics` with `loss` (of which the gradient was taken), `grad_norm` (before clipping) and
      `learning_rate` (used in this step).

    Raises:
      ValueError: the batch size is not a multiple of `config.micro_batches`.
    """
    anchors, keep = sample_anchors(jax.random.fold_in(state.rng, state.step), loss_mask, config.num_anchors, segment)
    rows = (ids, loss_mask, anchors, keep, segment)
    objective = _Objective(drafter, config, target.head(jax.lax.stop_gradient(target_params)), draft_ids)

    def read(part: tuple[Any, ...]) -> TrainBatch:
        return read_batch(target, target_params, drafter.taps, *part)

    return _step(objective, state, rows, _in_parts(rows, config.micro_batches), read)


@partial(jax.jit, static_argnames=("drafter", "config"), donate_argnames=("state",))
def train_step_on_features(
    drafter: Drafter,
    config: TrainConfig,
    state: TrainState,
    teacher_head: TargetHead,
    batch: TrainBatch,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """`train_step` on a batch whose features and anchors are already there: from a cache of features, or from another program."""
    objective = _Objective(drafter, config, jax.lax.stop_gradient(teacher_head), draft_ids)
    rows = (batch.ids, batch.loss_mask, batch.anchors, batch.keep, batch.segment)
    return _step(objective, state, rows, _in_parts(batch, config.micro_batches), lambda part: part)


@typed
def require_finite(metrics: Mapping[str, Any], step: int, sample_ids: Sequence[int]) -> None:
    """Stop a run whose loss or gradient is no longer a number, before it writes another checkpoint.

    Args:
      metrics: what a training step returned.
      step: its number, for the message.
      sample_ids: which texts were in its batch, for the message.

    Raises:
      FloatingPointError: `loss` or `grad_norm` is NaN or infinite.
    """
    for name in ("loss", "grad_norm"):
        value = float(np.asarray(metrics[name]))
        if not math.isfinite(value):
            raise FloatingPointError(f"{name} is {value} at step {step}; samples of the batch: {', '.join(map(str, sample_ids))}")


__all__ = [
    "OptimizerConfig",
    "TrainConfig",
    "TrainState",
    "clip_gradient",
    "init_train_state",
    "learning_rate",
    "make_optimizer",
    "require_finite",
    "train_step",
    "train_step_on_features",
]
