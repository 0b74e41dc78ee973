"""Compiles the programs of a round ahead of time, for devices that need not be here, and counts their work.

The layer of a target, its output head, a proposal and a commit of its drafter: operations as the compiler counts them, bytes as
`hlo_traffic` reads them off the compiled program, and both beside what a count by hand gives.
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array
from experiments.drafter_costs import Work, work_of
from experiments.hlo_traffic import main_memory_bytes
from experiments.step_timing import SLOTS_AHEAD, batch_tokens, commit_pass, committed_round, head_pass, layer_pass

SMALL_VOCABULARY = 256
"""Of the embeddings that the compiled programs look rows up in, so that the tables are no part of the cost."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target that is a stack of equal layers, its drafter, and how many tokens can be drafted (None: all)."""

    target_name: str
    drafter_name: str
    target: Any
    drafter: Any
    num_draft_ids: int | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Work of the compiled programs; caches are read once where they are read, and written where they are updated.

    Attributes:
      layer: by context, requests and flat tokens per request (1, and 1 + G).
      plain_layer: by context and requests; a token per request, and attention for one query.
      head: by flat tokens.
      propose, commit: by requests.
      ratios: for every kind of program, what was counted over what a count by hand gives, of every compilation: operations, bytes,
        and bytes with the compiler's copies of caches.
    """

    layer: Mapping[tuple[int, int, int], Work]
    plain_layer: Mapping[tuple[int, int], Work]
    head: Mapping[int, Work]
    propose: Mapping[int, Work]
    commit: Mapping[int, Work]
    ratios: Mapping[str, list[tuple[float, float, float]]]


def topology_device(topology: str) -> Any:
    """A device of a TPU topology ("v5e:2x2"), for compilation alone.

    Raises:
      ValueError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu is not installed; allowed are environments with the extra `aot`, libtpu being of the version that jax[tpu] names"
        )
    # Without the first three libtpu asks a metadata server that is not there; without the last it wants a device for itself.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def unrolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its outermost scans written out, so that every pass is counted."""

    def call(*args: Any) -> Any:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        equations = [
            each.replace(params={**each.params, "unroll": each.params["length"]}) if each.primitive.name == "scan" else each
            for each in program.jaxpr.eqns
        ]
        flat = core.jaxpr_as_fun(program.replace(jaxpr=program.jaxpr.replace(eqns=equations)))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return call


class Compiler:
    """Compiles the programs of a pair for one device and keeps their work."""

    def __init__(self, pair: Pair, device: Any, dtype: Any = jnp.bfloat16) -> None:
        self.pair, self.dtype = pair, dtype
        self.sharding = SingleDeviceSharding(device)
        config = dataclasses.replace(pair.target.config, num_layers=1, vocab_size=SMALL_VOCABULARY)
        self.one_layer = dataclasses.replace(pair.target, config=config)
        params = self._abstract(pair.target.abstract_params(), dtype)
        self.head = jax.eval_shape(pair.target.head, params)
        draft_ids = None if pair.num_draft_ids is None else jax.ShapeDtypeStruct((pair.num_draft_ids,), jnp.int32)
        restricted = jax.eval_shape(lambda head, ids: head.restrict(ids), self.head, draft_ids)
        # Only rows of the embedding are looked up. In a program of its own the compiler fetches all of it into the free on-chip memory.
        embedding = jax.ShapeDtypeStruct((SMALL_VOCABULARY, pair.target.spec.width), dtype)
        self.draft_head = dataclasses.replace(restricted, embedding=embedding)
        self.drafter_params = self._abstract(pair.drafter.abstract_params(), dtype)
        self.ratios: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("layer", "head", "propose", "commit")}

    def plain_layer(self, context: int, rows: int) -> Work:
        """One layer of the target in a round without drafts: a token and a query per request."""
        return self.layer(context, rows, 1, most_drafts=0)

    def layer(self, context: int, rows: int, per_request: int, most_drafts: int | None = None) -> Work:
        """One layer of the target on `per_request` flat tokens of every request; attention has 1 + `most_drafts` queries (None: 1 + G)."""
        num_tokens = rows * per_request
        params = self._abstract(self.one_layer.abstract_params(), self.dtype)
        cache = jax.eval_shape(lambda: self.one_layer.init_cache(rows, context + SLOTS_AHEAD, dtype=self.dtype))
        drafts = self.pair.drafter.block_size if most_drafts is None else most_drafts
        tokens = jax.eval_shape(lambda: batch_tokens(rows, num_tokens, drafts, context))
        least = _bytes(params["layers_0"]) + _bytes((cache.keys, cache.values)) + 2 * self._hidden_bytes(num_tokens)

        def layer(weights: Any, state: Any, inputs: Any) -> Any:
            return layer_pass(self.one_layer, weights, state, (), inputs)

        return self._work("layer", least, layer, params, cache, tokens, renewed=True, reads_caches=True)

    def output_head(self, num_tokens: int) -> Work:
        """The output head on so many flat tokens, and the largest logit of each."""
        hidden = jax.ShapeDtypeStruct((num_tokens, self.pair.target.spec.width), self.dtype)
        least = _bytes(self.head.lm_head) + self._hidden_bytes(num_tokens)
        return self._work("head", least, lambda head, _, inputs: head_pass(head, inputs), self.head, None, hidden)

    def propose(self, context: int, rows: int) -> Work:
        """A proposal for every request, at temperature 0."""
        drafter = self.pair.drafter

        def propose(weights: Any, state: Any, anchor: Array) -> Any:
            noise = Noise.of_round(0, jnp.arange(rows, dtype=jnp.int32), jnp.zeros((rows,), jnp.int32))
            return drafter.propose(*weights, state, anchor, noise, Sampling.make(rows, 0.0))

        state = self._state(context, rows)
        layers = {name: leaf for name, leaf in self.drafter_params.items() if name.startswith("layers_")}
        least = _bytes((layers, self.draft_head.lm_head, state.keys, state.values))
        weights = (self.drafter_params, self.draft_head)
        anchor = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return self._work("propose", least, unrolled(propose), weights, state, anchor, reads_caches=True)

    def commit(self, context: int, rows: int) -> Work:
        """The commit of a round's tokens."""
        drafter, width = self.pair.drafter, self.pair.target.spec.width
        committed = jax.eval_shape(lambda: committed_round(drafter, rows, width, self.dtype))
        least = _bytes((committed.features, self.drafter_params["fc"]))

        def commit(weights: Any, state: Any, committed: Any) -> Any:
            return commit_pass(drafter, *weights, state, committed)

        weights = (self.drafter_params, self.draft_head)
        return self._work("commit", least, commit, weights, self._state(context, rows), committed, renewed=True)

    def _state(self, context: int, rows: int) -> Any:
        return jax.eval_shape(lambda: self.pair.drafter.init_state(rows, context + SLOTS_AHEAD, dtype=self.dtype))

    def _hidden_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.pair.target.spec.width * jnp.dtype(self.dtype).itemsize

    def _abstract(self, tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)

    def _work(
        self,
        kind: str,
        least_bytes: int,
        function: Callable[..., Any],
        weights: Any,
        state: Any,
        inputs: Any,
        *,
        renewed: bool = False,
        reads_caches: bool = False,
    ) -> Work:
        """Work of `function(weights, state, inputs)`.

        Args:
          renewed: the state is given up to a new one.
          reads_caches: the keys and values of the state are read, once.
        """
        # Weights lie as the compiler wants them: a server puts them there once. The state is passed on from program to program.
        layouts = (Format(Layout.AUTO, self.sharding), self.sharding, self.sharding)
        jitted = jax.jit(function, in_shardings=layouts, out_shardings=self.sharding, donate_argnums=(1,) if renewed else ())
        compiled = jitted.lower(weights, state, inputs).compile()
        text, counted = compiled.as_text() or "", cast(Any, compiled.cost_analysis())
        caches = () if state is None else (*state.keys, *state.values)
        sizes, weight_shapes = {leaf.size for leaf in caches}, {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(weights)}

        def is_cache(shape: Sequence[int]) -> bool:
            # In another layout a cache may have another shape; some weight may happen to have as many elements.
            return math.prod(shape) in sizes and tuple(sorted(shape)) not in weight_shapes

        # Into which layout the compiler copies a cache around a scatter, and whether, changes from size to size.
        moved = main_memory_bytes(text, is_cache) + (_bytes(caches) if reads_caches else 0)
        work, products = Work(int(counted["flops"]), moved), work_of(function, weights, state, inputs)
        self.ratios[kind].append((work.flops / max(products.flops, 1), work.bytes / least_bytes, main_memory_bytes(text) / least_bytes))
        return work


def compile_all(compiler: Compiler, corners: Sequence[int], contexts: Sequence[int], advance: Callable[[], None]) -> Compiled:
    """Compile every program at each number of requests in `corners`, the layers at each context.

    Args:
      advance: called after every compilation, `num_compilations` times in all.
    """
    most = compiler.pair.drafter.block_size + 1

    def found(function: Callable[..., Work], *args: int) -> Work:
        work = function(*args)
        advance()
        return work

    layer = {
        (context, rows, each): found(compiler.layer, context, rows, each) for context in contexts for rows in corners for each in (1, most)
    }
    plain_layer = {(context, rows): found(compiler.plain_layer, context, rows) for context in contexts for rows in corners}
    head = {size: found(compiler.output_head, size) for size in _head_sizes(corners, most)}
    propose = {rows: found(compiler.propose, contexts[-1], rows) for rows in corners}
    commit = {rows: found(compiler.commit, contexts[-1], rows) for rows in corners}
    return Compiled(layer, plain_layer, head, propose, commit, compiler.ratios)


def num_compilations(corners: Sequence[int], contexts: Sequence[int], block_size: int) -> int:
    """How often `compile_all` compiles."""
    return len(corners) * (3 * len(contexts) + 2) + len(_head_sizes(corners, block_size + 1))


def _head_sizes(corners: Sequence[int], most: int) -> list[int]:
    return sorted({rows * each for rows in corners for each in (1, most)})


def _bytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
