"""The experiments of the papers, at their sizes: what configs/ names one by one.

Both papers leave much unsaid; what is chosen here: the vocabulary of MoD's models, the width of
MoBA's MLPs (such that all parameters, tied embeddings included, come to the name), optimizers
and data. Text is C4, documents end to end; the 1M-token rows are of PG-19's books. It must be
prepared once (tensorflow-datasets says how), and a tokenizer be made of it:

    python -m modo.train_tokenizer --data.source tfds --data.name c4/en \\
        --vocab-size 32768 --output tokenizer.json

(65536 for MoBA's, 128256 for llama_8b_1m). Nothing here has been run; `python -m modo.aot` compiles
each for its hardware.
"""

import dataclasses

from modo.config import (
    Config,
    DataConfig,
    DepthConfig,
    MeshConfig,
    MobaConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


@dataclasses.dataclass(frozen=True)
class _ModSize:
    """parameters: about so many; mesh: of the slice that the config's docstring names."""

    parameters: float
    num_layers: int
    d_model: int
    num_heads: int
    mesh: MeshConfig


MOD_SIZES = {
    "60m": _ModSize(60e6, 8, 512, 8, MeshConfig(data=1, fsdp=8)),
    "120m": _ModSize(120e6, 10, 768, 12, MeshConfig(data=1, fsdp=8)),
    "220m": _ModSize(220e6, 12, 1024, 16, MeshConfig(data=1, fsdp=8)),
    "500m": _ModSize(500e6, 14, 1536, 12, MeshConfig(data=1, fsdp=16)),
    "1b": _ModSize(1e9, 20, 1920, 15, MeshConfig(data=1, fsdp=64)),
    "3b": _ModSize(3e9, 24, 3072, 24, MeshConfig(data=1, fsdp=128, tensor=2)),
}


def mod(size: str) -> Config:
    """Raposo et al. 2024, arXiv 2404.02258: every other block computes 12.5 % of the tokens.

    Batches are of 128 rows of 2048 tokens, as there; 20 tokens a parameter.

    Args:
      size: of MOD_SIZES.
    """
    s, batch_size, length = MOD_SIZES[size], 128, 2048
    return Config(
        model=ModelConfig(
            vocab_size=32_768,
            d_model=s.d_model,
            num_layers=s.num_layers,
            num_heads=s.num_heads,
            depth=DepthConfig(every=2, capacity=0.125),
            qk_norm=True,
            compute_dtype="bfloat16",
            scan_layers=True,
            remat="block",
            loss_chunk=512,
        ),
        data=_data("c4/en"),
        optimizer=OptimizerConfig(learning_rate=0.5 / s.d_model, warmup_steps=500),
        mesh=s.mesh,
        train=_train(round(20 * s.parameters / (batch_size * length)), batch_size, length),
    )


def mod_baseline(size: str) -> Config:
    """The model of `mod(size)` in which every block computes every token."""
    return _with_model(mod(size), depth=None)


@dataclasses.dataclass(frozen=True)
class _MobaSize:
    """layers: and heads of width 128; tokens: trained on, in the paper; mesh: by row length."""

    parameters: float
    layers: int
    d_ff: int
    tokens: float
    mesh: dict[int, MeshConfig]


SHORT, LONG = 8192, 32_768
_ON_64 = dict.fromkeys((SHORT, LONG), MeshConfig(data=1, fsdp=64))
_ON_128 = dict.fromkeys((SHORT, LONG), MeshConfig(data=1, fsdp=128))
_ON_512 = {SHORT: MeshConfig(data=4, fsdp=128), LONG: MeshConfig(data=4, fsdp=32, context=4)}
MOBA_SIZES = {
    "568m": _MobaSize(568e6, 14, 3584, 10.8e9, _ON_64),
    "822m": _MobaSize(822e6, 16, 4224, 15.3e9, _ON_64),
    "1b1": _MobaSize(1.1e9, 18, 4608, 20.6e9, _ON_128),
    "1b5": _MobaSize(1.5e9, 20, 5248, 27.4e9, _ON_128),
    "2b": _MobaSize(2.1e9, 22, 6528, 36.9e9, _ON_512),
}


def moba(size: str, length: int) -> Config:
    """Lu et al. 2025, arXiv 2502.13189, the scaling runs: blocks of 512 keys, 3 a query.

    Args:
      size: of MOBA_SIZES.
      length: tokens a row, SHORT or LONG; batches are of 4M tokens.
    """
    s, batch_size = MOBA_SIZES[size], (1 << 22) // length
    return Config(
        model=ModelConfig(
            vocab_size=65_536,
            d_model=128 * s.layers,
            num_layers=s.layers,
            num_heads=s.layers,
            d_ff=s.d_ff,
            moba=MobaConfig(block_size=512, top_k=3),
            tied_embeddings=True,
            qk_norm=True,
            compute_dtype="bfloat16",
            scan_layers=True,
            remat="block",
            loss_chunk=length // 2,
        ),
        data=_data("c4/en"),
        optimizer=OptimizerConfig(learning_rate=0.8 / (128 * s.layers), warmup_steps=200),
        mesh=s.mesh[length],
        train=_train(round(s.tokens / (batch_size * length)), batch_size, length),
    )


def full_attention(size: str, length: int) -> Config:
    """The model of `moba(size, length)` with full attention."""
    return _with_model(moba(size, length), moba=None)


def llama_8b_1m() -> Config:
    """MoBA in the shape of Llama 3 8B on rows of 1M tokens, the last three layers full.

    Blocks of 4096 keys, 12 a query, as arXiv 2502.13189 has it. Batches are of 8 rows.
    """
    return Config(
        model=ModelConfig(
            vocab_size=128_256,
            d_model=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            d_ff=14_336,
            moba=MobaConfig(block_size=4096, top_k=12, last_full=3),
            rope_theta=500_000.0,
            norm_eps=1e-5,
            compute_dtype="bfloat16",
            scan_layers=True,
            remat="block",
            loss_chunk=65_536,
        ),
        data=_data("pg19"),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=50),
        mesh=MeshConfig(data=1, fsdp=8, tensor=8, context=16),
        train=_train(1000, 8, 1 << 20),
    )


def _data(name: str) -> DataConfig:
    field = "book_text" if name == "pg19" else "text"
    return DataConfig(
        source="tfds",
        name=name,
        text_field=field,
        tokenizer="tokenizer.json",
        mask_documents=False,
    )


def _train(steps: int, batch_size: int, length: int) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        batch_size=batch_size,
        length=length,
        eval_every=1000,
        eval_batch_size=batch_size,
        checkpoint_every=500,
    )


def _with_model(config: Config, **changes) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
