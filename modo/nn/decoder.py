"""The decoder: embedding, blocks, output layer."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from modo.config import ModelConfig, Routing
from modo.nn.attention import Attention
from modo.nn.depth import DepthAux, MixtureOfDepths
from modo.nn.mlp import GatedMLP
from modo.nn.partition import (
    PARAMETER_AXES,
    constrain,
    gather_parameter,
    gather_parameters,
    partition_spec,
    spec_axes,
)
from modo.ops.losses import chunked_cross_entropy
from modo.ops.routing import ROUTED_TOKENS
from modo.ops.segments import document_runs


class Block(nnx.Module):
    """Attention, then an MLP, each behind an RMSNorm; returns the residual update.

    Args:
      attention: called as `attention(x, positions_BT=, segment_ids_BT=)`.
      mlp: called as `mlp(x)`.
      d_model: width.
    """

    def __init__(self, attention, mlp, d_model: int, *, norm_eps=1e-6, dtype=jnp.float32, rngs):
        norm = dict(epsilon=norm_eps, dtype=dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(d_model, **norm)
        self.attention = attention
        self.mlp_norm = nnx.RMSNorm(d_model, **norm)
        self.mlp = mlp

    def __call__(
        self,
        x_BCD: Array,
        *,
        positions_BC: Array,
        segment_ids_BC: Array | None,
        gate_BC: Array | None = None,
    ) -> Array:
        """The update [B, C, D] without the residual; `gate_BC` multiplies the MLP's output."""
        attended_BCD = self.attention(
            self.attention_norm(x_BCD), positions_BT=positions_BC, segment_ids_BT=segment_ids_BC
        )
        return self.after_attention(x_BCD, attended_BCD, gate_BC)

    def after_attention(
        self, x_BCD: Array, attended_BCD: Array, gate_BC: Array | None = None
    ) -> Array:
        """The update [B, C, D], given what attention makes of the tokens."""
        mlp_BCD = self.mlp(self.mlp_norm(x_BCD + attended_BCD))
        if gate_BC is not None:
            mlp_BCD = (gate_BC[..., None] * mlp_BCD).astype(mlp_BCD.dtype)
        return attended_BCD + mlp_BCD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderAux:
    """What the decoder returns beside its logits; L counts the routed layers, from the input up.

    Attributes:
      routed_LBT: bool, the tokens that each routed layer computed.
      router_logits_LBT: float32.
      predictor_logits_LBT: float32, or None without predictors.
      router_loss: float32 scalar, mean over layers.
      predictor_loss: float32 scalar, mean over layers.
      statistics: float32 scalars, means over layers (see `routing_statistics`), and
        "layer_overlap": of the tokens that one of two consecutive routed layers computed, the
        share that both did. Empty without routed layers.
    """

    routed_LBT: Array
    router_logits_LBT: Array
    predictor_logits_LBT: Array | None
    router_loss: Array
    predictor_loss: Array
    statistics: dict[str, Array]


class LayerKind(NamedTuple):
    """All that makes two layers different but for their parameters."""

    moba: bool
    capacity: float | None
    gate: str | None


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """What each layer is, from the input up."""
    kinds = []
    for layer in range(config.num_layers):
        capacity = gate = None
        if layer in config.routed_layers:
            number = config.routed_layers.index(layer)
            capacity, gate = config.depth.capacity, config.depth.gate
            capacity = capacity[number] if isinstance(capacity, tuple) else capacity
            gate = gate[number] if isinstance(gate, tuple) else gate
        kinds.append(LayerKind(layer in config.moba_layers, capacity, gate))
    return kinds


class Stretch(NamedTuple):
    """Consecutive layers that repeat: `repeats` times a group of `period` layers."""

    start: int
    period: int
    repeats: int


def repeating_stretches(kinds: list) -> list[Stretch]:
    """Cuts the layers into stretches that repeat, each as long as can be."""
    stretches, start = [], 0
    while start < len(kinds):
        best = Stretch(start, 1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            group, repeats = kinds[start : start + period], 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == group:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = Stretch(start, period, repeats)
        stretches.append(best)
        start += best.period * best.repeats
    return stretches


def _make_block(config: ModelConfig, kind: LayerKind, mesh: Mesh | None, rngs: nnx.Rngs):
    dtype = jnp.dtype(config.compute_dtype)
    # Two outputs a block add to the residual stream: keep its scale whatever the depth.
    depth_scale = (2 * config.num_layers) ** -0.5
    attention = Attention(
        config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_width,
        block_size=config.moba.block_size if kind.moba else None,
        top_k=config.moba.top_k if kind.moba else 1,
        sink_blocks=config.moba.sink_blocks if kind.moba else 0,
        window_blocks=config.moba.window_blocks if kind.moba else 0,
        key_convolution=config.moba.key_convolution if kind.moba else None,
        implementation=config.moba.implementation if kind.moba else None,
        qk_norm=config.qk_norm,
        soft_cap=config.attention_soft_cap,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        out_std=depth_scale * (config.num_heads * config.head_width) ** -0.5,
        dtype=dtype,
        mesh=mesh,
        rngs=rngs,
    )
    mlp = GatedMLP(
        config.d_model,
        config.ff_width,
        out_std=depth_scale * config.ff_width**-0.5,
        dtype=dtype,
        rngs=rngs,
    )
    block = Block(attention, mlp, config.d_model, norm_eps=config.norm_eps, dtype=dtype, rngs=rngs)
    if kind.capacity is None:
        return block
    depth = config.depth
    return MixtureOfDepths(
        block,
        config.d_model,
        capacity=kind.capacity,
        gate=kind.gate,
        gate_on=depth.gate_on,
        predictor=depth.predictor,
        predictor_width=depth.predictor_width,
        noise=depth.noise,
        per_document=depth.per_document,
        rngs=rngs,
    )


def apply_block(block, x_BTD, positions_BT, segment_ids_BT, *, routing="top_k", key=None):
    """Runs one block, routed or not: (x_BTD, DepthAux or None)."""
    if isinstance(block, MixtureOfDepths):
        return block(
            x_BTD,
            positions_BT=positions_BT,
            segment_ids_BT=segment_ids_BT,
            routing=routing,
            key=key,
        )
    return x_BTD + block(x_BTD, positions_BC=positions_BT, segment_ids_BC=segment_ids_BT), None


def _remat(function, remat: str):
    """Recomputes in the backward pass, but never what was chosen: it might come out otherwise."""
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(ROUTED_TOKENS, "moba_chosen_blocks")
    if remat == "dots":
        policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, policy)
    return jax.checkpoint(function, policy=policy)


class Decoder(nnx.Module):
    """A decoder language model with full or block-sparse attention and Mixture-of-Depths.

    `blocks` holds the layers; with `config.scan_layers` it holds instead, for each repeating
    stretch, one group of layers whose parameters have a leading axis of repetitions.

    Args:
      config: the shape of the model.
      rngs: initialises it; scanned or not, the parameters are the same.
      mesh: the devices that share the work, with the axes of `modo.nn.partition.MESH_AXES`; None:
        one, or the compiler is left to choose where activations lie.
    """

    def __init__(self, config: ModelConfig, *, mesh: Mesh | None = None, rngs: nnx.Rngs):
        self.config, self.mesh = config, mesh
        dtype = jnp.dtype(config.compute_dtype)
        kinds = layer_kinds(config)
        self.stretches = tuple(repeating_stretches(kinds)) if config.scan_layers else ()
        embedding_std = config.d_model**-0.5 if config.tied_embeddings else 1.0
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(embedding_std),
            rngs=rngs,
        )
        blocks = [_make_block(config, kind, mesh, rngs) for kind in kinds]
        if config.scan_layers:
            self.blocks = nnx.List([_stack(blocks, stretch) for stretch in self.stretches])
        else:
            self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        head_init = nnx.initializers.normal(1.0 / config.d_model)
        head = dict(use_bias=False, dtype=dtype, kernel_init=head_init, rngs=rngs)
        self.head = (
            None
            if config.tied_embeddings
            else nnx.Linear(config.d_model, config.vocab_size, **head)
        )

    def block(self, layer: int):
        """The module of one layer, scanned or not."""
        if not self.config.scan_layers:
            return self.blocks[layer]
        for stretch, group in zip(self.stretches, self.blocks, strict=True):
            repeat, place = divmod(layer - stretch.start, stretch.period)
            if repeat < stretch.repeats:
                graphdef, state = nnx.split(group[place])
                return nnx.merge(graphdef, jax.tree.map(lambda p: p[repeat], state))  # noqa: B023
        raise IndexError(f"layer {layer} of {self.config.num_layers}")

    def unstacked(self) -> "Decoder":
        """The same model with a module a layer; without scanned layers itself.

        It shares the parameters, but for those of scanned layers, which are copied.
        """
        if not self.config.scan_layers:
            return self
        config = dataclasses.replace(self.config, scan_layers=False)
        model = nnx.eval_shape(lambda: Decoder(config, mesh=self.mesh, rngs=nnx.Rngs(0)))
        model.embedding, model.norm, model.head = self.embedding, self.norm, self.head
        model.blocks = nnx.List([self.block(layer) for layer in range(config.num_layers)])
        return model

    def __call__(
        self,
        tokens_BT: Array,
        *,
        positions_BT: Array | None = None,
        segment_ids_BT: Array | None = None,
        routing: Routing = "top_k",
        key: Array | None = None,
    ) -> tuple[Array, DecoderAux]:
        """Next-token logits.

        Args:
          tokens_BT: int, in [0, vocab_size).
          positions_BT: int; None: 0 .. T - 1.
          segment_ids_BT: int, documents as runs of equal values; 0 is padding. None: one document.
          routing: how routed layers choose, see `MixtureOfDepths`.
          key: for routing "random" and for noise; one, or one a row [B].

        Returns:
          (float32 [B, T, V], DecoderAux).
        """
        x_BTD, aux = self._hidden(tokens_BT, positions_BT, segment_ids_BT, routing, key)
        return self.logits(x_BTD), aux

    def token_losses(
        self,
        tokens_BT: Array,
        targets_BT: Array,
        *,
        positions_BT: Array | None = None,
        segment_ids_BT: Array | None = None,
        routing: Routing = "top_k",
        key: Array | None = None,
    ) -> tuple[Array, Array, DecoderAux]:
        """Cross-entropy of each target, holding the logits of `config.loss_chunk` tokens a row.

        Args:
          targets_BT: int, in [0, vocab_size); the rest are those of `__call__`.

        Returns:
          (nats [B, T], log-partition [B, T], DecoderAux), float32.
        """
        x_BTD, aux = self._hidden(tokens_BT, positions_BT, segment_ids_BT, routing, key)
        if self.mesh is None:
            losses = chunked_cross_entropy(self.logits, x_BTD, targets_BT, self.config.loss_chunk)
        else:
            losses = self._losses_on_mesh(self.norm(x_BTD), targets_BT)
        return *losses, aux

    def _losses_on_mesh(self, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array]:
        """The same, every device for its tokens and its part of the vocabulary.

        Left to the compiler, the gradient of the output matrix would be summed over devices once
        for every chunk.
        """
        tied = self.head is None
        name, weight = ("embedding", self.embedding.embedding[...]) if tied else (
            "kernel", self.head.kernel[...]
        )  # fmt: skip
        axes = PARAMETER_AXES["embedding" if tied else "head", name]
        weight_spec = partition_spec(self.mesh, weight.shape, axes)
        x_spec = partition_spec(self.mesh, x_BTD.shape, ("batch", "length", None))
        embed, vocab = axes.index("embed"), axes.index("vocab")
        x_axes = [axis for part in x_spec for axis in spec_axes(part)]
        gathered, vocab_axes = spec_axes(weight_spec[embed]), spec_axes(weight_spec[vocab])
        new_axes = tuple(axis for axis in x_axes if axis not in gathered)

        def losses(x_BTD, weight, targets_BT):
            # Before the loop over chunks, so that gradients are summed over devices after it.
            weight = lax.pcast(weight, new_axes, to="varying").astype(x_BTD.dtype)
            if gathered:
                weight = lax.all_gather(weight, gathered, axis=embed, tiled=True)
            return chunked_cross_entropy(
                functools.partial(self._project, weight.T if tied else weight),
                x_BTD,
                targets_BT,
                self.config.loss_chunk,
                vocab_axes=vocab_axes,
            )

        token_spec = PartitionSpec(*x_spec[:2])
        return jax.shard_map(
            losses,
            mesh=self.mesh,
            in_specs=(x_spec, weight_spec, token_spec),
            out_specs=(token_spec, token_spec),
        )(x_BTD, weight, targets_BT)

    def _hidden(self, tokens_BT, positions_BT, segment_ids_BT, routing, key):
        """The last block's output and DecoderAux."""
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(
                jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
            )
        if segment_ids_BT is not None:
            segment_ids_BT = document_runs(segment_ids_BT)
        x_BTD = self._placed(self._embed(tokens_BT))
        x_BTD, auxes = self._run_blocks(x_BTD, positions_BT, segment_ids_BT, routing, key)
        return x_BTD, _collect(auxes, tokens_BT.shape)

    def _placed(self, x_BTD: Array) -> Array:
        """The residual stream where it lies between blocks."""
        return constrain(x_BTD, self.mesh, "batch", "length", None)

    def _embed(self, tokens_BT: Array) -> Array:
        if self.mesh is None:
            return self.embedding(tokens_BT)
        return jnp.take(
            self._gathered("embedding", self.embedding.embedding[...]), tokens_BT, axis=0
        )

    def _gathered(self, name: str, x: Array) -> Array:
        names = (name, "embedding" if name == "embedding" else "kernel")
        return gather_parameter(x, names, self.mesh, self.config.compute_dtype)

    def logits(self, x_BTD: Array) -> Array:
        """Logits [B, T, V] float32 of the last block's output."""
        if self.head is None:
            weight_DV = self._gathered("embedding", self.embedding.embedding[...]).T
        else:
            weight_DV = self._gathered("head", self.head.kernel[...])
        logits_BTV = self._project(weight_DV, self.norm(x_BTD))
        return constrain(logits_BTV, self.mesh, "batch", "length", "vocab")

    def _project(self, weight_DV: Array, x_BTD: Array) -> Array:
        logits_BTV = jnp.einsum(
            "btd,dv->btv",
            x_BTD,
            weight_DV.astype(x_BTD.dtype),
            preferred_element_type=jnp.float32,
        )
        cap = self.config.logit_soft_cap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

    def _run_blocks(self, x_BTD, positions_BT, segment_ids_BT, routing, key):
        """The last block's output, and each layer's DepthAux, None where it is not routed."""

        def run(graphdef, state, x_BTD, layer):
            layer_key = None if key is None else _layer_key(key, layer)
            state = gather_parameters(state, self.mesh, self.config.compute_dtype)
            block = nnx.merge(graphdef, state)
            x_BTD, aux = apply_block(
                block, x_BTD, positions_BT, segment_ids_BT, routing=routing, key=layer_key
            )
            return self._placed(x_BTD), aux

        def remat_run(graphdef, state, x_BTD, layer):
            return _remat(functools.partial(run, graphdef), self.config.remat)(state, x_BTD, layer)

        auxes = []
        if not self.config.scan_layers:
            for layer, block in enumerate(self.blocks):
                x_BTD, aux = remat_run(*nnx.split(block), x_BTD, layer)
                auxes.append(aux)
            return x_BTD, auxes
        for stretch, group in zip(self.stretches, self.blocks, strict=True):
            graphdefs, states = zip(*(nnx.split(block) for block in group), strict=True)

            def body(x_BTD, xs, graphdefs=graphdefs):
                states, layers = xs
                group_auxes = []
                for graphdef, state, layer in zip(graphdefs, states, layers, strict=True):
                    x_BTD, aux = remat_run(graphdef, state, x_BTD, layer)
                    group_auxes.append(aux)
                return x_BTD, group_auxes

            layers = stretch.start + jnp.arange(stretch.repeats * stretch.period)
            layers = tuple(layers.reshape(stretch.repeats, stretch.period).T)
            x_BTD, group_auxes = lax.scan(body, x_BTD, (states, layers))
            for repeat in range(stretch.repeats):
                auxes += [jax.tree.map(lambda a: a[repeat], aux) for aux in group_auxes]  # noqa: B023
        return x_BTD, auxes


def _layer_key(key: Array, layer) -> Array:
    if key.ndim == 0:
        return jax.random.fold_in(key, layer)
    return jax.vmap(lambda row_key: jax.random.fold_in(row_key, layer))(key)


def _stack(blocks: list, stretch: Stretch) -> nnx.List:
    """One group of layers with the parameters of all repetitions stacked."""
    groups = [
        nnx.split(nnx.List(blocks[start : start + stretch.period]))
        for start in range(
            stretch.start, stretch.start + stretch.repeats * stretch.period, stretch.period
        )
    ]
    states = [state for _, state in groups]
    return nnx.merge(groups[0][0], jax.tree.map(lambda *p: jnp.stack(p), *states))


def _collect(auxes: list[DepthAux | None], shape) -> DecoderAux:
    auxes = [aux for aux in auxes if aux is not None]
    if not auxes:
        return DecoderAux(
            routed_LBT=jnp.zeros((0, *shape), bool),
            router_logits_LBT=jnp.zeros((0, *shape), jnp.float32),
            predictor_logits_LBT=None,
            router_loss=jnp.zeros((), jnp.float32),
            predictor_loss=jnp.zeros((), jnp.float32),
            statistics={},
        )
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *auxes)
    statistics = {name: jnp.mean(value) for name, value in stacked.statistics.items()}
    below_LBT, above_LBT = stacked.routed_BT[:-1], stacked.routed_BT[1:]
    both, either = jnp.sum(below_LBT & above_LBT), jnp.sum(below_LBT | above_LBT)
    statistics["layer_overlap"] = both / jnp.maximum(either, 1)
    return DecoderAux(
        routed_LBT=stacked.routed_BT,
        router_logits_LBT=stacked.router_logits_BT,
        predictor_logits_LBT=stacked.predictor_logits_BT,
        router_loss=jnp.mean(stacked.router_loss),
        predictor_loss=jnp.mean(stacked.predictor_loss),
        statistics=statistics,
    )
