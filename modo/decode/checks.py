"""What `prefill` and `step` refuse."""

from typing import Literal, get_args

import numpy as np
from jax import Array

from modo.decode.cache import Cache
from modo.decode.inputs import known
from modo.nn.decoder import Decoder, layer_kinds
from modo.ops.cached_attention import block_slots

CachedAttention = Literal["sparse", "full"]


def check_call(model: Decoder, cache: Cache, routing: str, attention: str) -> None:
    if routing not in ("predictor", "router"):
        raise ValueError(f"routing must be causal, predictor or router, got {routing!r}")
    if attention not in get_args(CachedAttention):
        raise ValueError(f"attention must be sparse or full, got {attention!r}")
    config, kinds = model.config, layer_kinds(model.config)
    depth = config.depth
    if routing == "predictor" and config.routed_layers and not depth.predictor:
        raise ValueError("routing 'predictor' needs a model with DepthConfig.predictor")
    if len(cache.layers) != len(kinds):
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model has {len(kinds)}")
    heads = (config.kv_heads, config.head_width)
    for number, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        shape = layer.k_BKSH.shape
        if (shape[1], shape[3]) != heads:
            raise ValueError(
                f"layer {number} has {heads[0]} key heads of width {heads[1]}, but its cache is "
                f"for {shape[1]} of width {shape[3]}"
            )
        if layer.k_BKSH.dtype != config.compute_dtype:
            raise ValueError(
                f"layer {number} computes in {config.compute_dtype}, but its cache holds "
                f"{layer.k_BKSH.dtype}"
            )
        convolves = kind.moba and config.moba.key_convolution is not None
        if (layer.raw_keys_BKSH is not None) != convolves:
            raise ValueError(f"of layer {number}, only one of cache and model convolves keys")
        if (layer.wanted_BT is not None) != (kind.capacity is not None):
            raise ValueError(f"of layer {number}, only one of cache and model is routed")
        block = block_slots(layer.slots, config.moba.block_size)[1] if kind.moba else None
        if block != layer.block:
            raise ValueError(
                f"layer {number} attends in blocks of {block}, but its cache has blocks of "
                f"{layer.block}"
            )


def check_chunk(model: Decoder, cache: Cache, tokens_BT: Array, lengths_B: Array) -> None:
    batch = cache.batch
    if tokens_BT.ndim != 2 or tokens_BT.shape[0] != batch:
        raise ValueError(f"tokens must be [B, T] with B {batch}, got {tokens_BT.shape}")
    if lengths_B.shape != (batch,):
        raise ValueError(f"lengths must be [B] = ({batch},), got {lengths_B.shape}")
    if not known(lengths_B):
        return
    lengths_B, length = np.asarray(lengths_B), tokens_BT.shape[1]
    shortest, longest = lengths_B.min(), lengths_B.max()
    if shortest < 0 or longest > length:
        raise ValueError(f"lengths must be in [0, {length}], got {shortest} to {longest}")
    _check_room(cache, lengths_B)
    _check_tokens(model, tokens_BT, np.arange(length) < lengths_B[:, None])


def check_step(model: Decoder, cache: Cache, tokens_B: Array, active_B: Array) -> None:
    batch = cache.batch
    if tokens_B.shape != (batch,):
        raise ValueError(f"tokens must be [B] = ({batch},), got {tokens_B.shape}")
    if active_B.shape != (batch,) or active_B.dtype != bool:
        raise ValueError(
            f"active must be bool [B] = ({batch},), got {active_B.dtype} {active_B.shape}"
        )
    if known(active_B):
        _check_room(cache, np.asarray(active_B).astype(np.int32))
        _check_tokens(model, tokens_B, np.asarray(active_B))


def _check_room(cache: Cache, added_B: np.ndarray) -> None:
    if not known(cache.length_B):
        return
    length_B = np.asarray(cache.length_B)
    row = np.argmax(length_B + added_B)
    if length_B[row] + added_B[row] > cache.max_length:
        raise ValueError(
            f"row {row} has {length_B[row]} tokens and gets {added_B[row]} more, but the cache "
            f"holds {cache.max_length}"
        )


def _check_tokens(model: Decoder, tokens: Array, used: np.ndarray) -> None:
    if not known(tokens):
        return
    tokens, vocab = np.asarray(tokens), model.config.vocab_size
    bad = used & ((tokens < 0) | (tokens >= vocab))
    if bad.any():
        raise ValueError(f"tokens must be in [0, {vocab}), got {tokens[bad][0]}")
