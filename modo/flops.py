"""Analytic FLOP counts: the matrix products that a model really computes.

A product of [M, K] and [K, N] counts 2 M K N; elementwise work is left out, as is what
rematerialisation computes again. Routed layers count their C tokens, MoBA the blocks it attends
to and the scores that choose them. The counts equal the dot_general FLOPs of the jaxpr.
"""

import dataclasses
import math

import jax

from kernels_pallas.moba import dot_flops as moba_dot_flops
from modo.config import ModelConfig
from modo.nn.decoder import layer_kinds
from modo.nn.depth import default_predictor_width
from modo.ops.routing import capacity_slots

# Dense bf16 peak of one device by `device_kind`, FLOP/s, from the makers' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


def peak_flops(device: jax.Device) -> float:
    """Dense bf16 peak of a device in FLOP/s, NaN where it is not known."""
    kind = device.device_kind
    names = [name for name in PEAK_FLOPS if kind == name or kind.startswith(f"{name} ")]
    names += [name for name in PEAK_FLOPS if name.startswith("NVIDIA") and kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else math.nan


@dataclasses.dataclass(frozen=True)
class _Count:
    """Forward FLOPs, and those of the backward pass of the same products."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other):
        return _Count(self.forward + other.forward, self.backward + other.backward)


def _product(m: int, k: int, n: int, *, input_gradient: bool = True) -> _Count:
    """x [M, K] times w [K, N]; backward makes w's gradient and, mostly, x's."""
    return _Count(2 * m * k * n, 2 * m * k * n * (2 if input_gradient else 1))


def _predictor_width(config: ModelConfig) -> int:
    return config.depth.predictor_width or default_predictor_width(config.d_model)


def _block(config: ModelConfig, moba: bool, batch: int, length: int, segments: bool) -> _Count:
    rows, d_model = batch * length, config.d_model
    heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_width
    count = _product(rows, d_model, heads * width) + _product(rows, heads * width, d_model)
    count += _product(rows, d_model, 2 * kv_heads * width)
    count += _product(rows, d_model, 2 * config.ff_width)
    count += _product(rows, config.ff_width, d_model)
    if moba:
        forward, both = moba_dot_flops(
            batch=batch,
            length=length,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            block_size=config.moba.block_size,
            top_k=config.moba.top_k,
            sink_blocks=config.moba.sink_blocks,
            window_blocks=config.moba.window_blocks,
            segments=segments,
        )
        return count + _Count(forward, both - forward)
    scores = 2 * batch * heads * length * length * width
    return count + _Count(2 * scores, 4 * scores)


def _model(config: ModelConfig, batch: int, length: int, segments: bool) -> _Count:
    rows = batch * length
    count = _product(rows, config.d_model, config.vocab_size)
    for kind in layer_kinds(config):
        if kind.capacity is None:
            count += _block(config, kind.moba, batch, length, segments)
            continue
        count += _product(rows, config.d_model, 1)
        if config.depth.predictor:
            width = _predictor_width(config)
            count += _product(rows, config.d_model + 1, width, input_gradient=False)
            count += _product(rows, width, 1)
        # A routed block always gets segment ids: its slots may be empty.
        slots = capacity_slots(kind.capacity, length)
        count += _block(config, kind.moba, batch, slots, segments=True)
    return count


def forward(config: ModelConfig, length: int, *, batch: int = 1, segments: bool = False) -> int:
    """FLOPs of one forward pass with top-k routing.

    Args:
      config: the model.
      length: tokens a row.
      batch: rows.
      segments: whether rows hold documents or padding, told apart by segment ids.
    """
    return _model(config, batch, length, segments).forward


def train_step(config: ModelConfig, batch: int, length: int, *, segments: bool = False) -> int:
    """FLOPs of a forward and backward pass over a batch, without the optimizer's."""
    count = _model(config, batch, length, segments)
    return count.forward + count.backward


def decode_step(config: ModelConfig, batch: int, length: int) -> int:
    """FLOPs of one more token a row of `batch`, when a row has `length` tokens.

    MoBA layers score all blocks that are held and attend to top_k; a routed layer holds, and
    computes, its capacity's share of the tokens.
    """
    d_model, heads, width = config.d_model, config.num_heads, config.head_width
    count = 2 * d_model * config.vocab_size
    for kind in layer_kinds(config):
        share = 1.0 if kind.capacity is None else kind.capacity
        keys, blocks = share * length, 0
        if kind.moba:
            blocks = keys / config.moba.block_size
            keys = min(keys, config.moba.block_size * config.moba.top_k)
        block = 4 * d_model * width * (heads + config.kv_heads) + 6 * d_model * config.ff_width
        block += heads * width * (4 * keys + 2 * blocks)
        count += share * block
        if kind.capacity is not None:
            count += 2 * d_model
            if config.depth.predictor:
                count += 2 * (d_model + 2) * _predictor_width(config)
    return round(batch * count)


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The dense model of the same depth and width: every block computes every token, in full."""
    return dataclasses.replace(config, depth=None, moba=None)


def parameter_count(config: ModelConfig) -> int:
    """Parameters, embeddings, routers and predictors included."""
    d_model, width = config.d_model, config.head_width
    block = 2 * d_model * width * (config.num_heads + config.kv_heads)
    block += 3 * d_model * config.ff_width + 2 * d_model + (2 * width if config.qk_norm else 0)
    count = config.num_layers * block + d_model
    if config.moba is not None and config.moba.key_convolution is not None:
        taps = config.moba.key_convolution * config.kv_heads * width
        count += len(config.moba_layers) * taps
    count += config.vocab_size * d_model * (1 if config.tied_embeddings else 2)
    if config.depth is not None:
        hidden = _predictor_width(config)
        predictor = (d_model + 1) * hidden + hidden + hidden + 1 if config.depth.predictor else 0
        count += len(config.routed_layers) * (d_model + predictor)
    return count
