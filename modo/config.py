"""Frozen dataclasses that describe an experiment, checked when they are made.

Every check raises `modo.errors.UserError` with one line that names the field and its value.
`configs/NAME.py` holds `get_config() -> Config`; `modo.train.cli` adds command-line overrides.
"""

import dataclasses
import json
import math
import types
import typing
from typing import Literal

from modo.errors import UserError

Gate = Literal["linear", "sigmoid", "tanh"]
Routing = Literal["top_k", "predictor", "router", "random"]
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**32 - 1  # JAX would drop the bits above without a word


def _matches(value, hint) -> bool:
    """Whether `value` is an instance of a (possibly nested) type hint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, a) for a in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(v, args[0]) for v in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _check_types(config) -> None:
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _matches(value, hint):
            wanted = getattr(hint, "__name__", None) if not typing.get_args(hint) else None
            wanted = wanted or str(hint).replace("typing.", "")
            raise UserError(
                f"{type(config).__name__}.{name} must be {wanted}, got {value!r} "
                f"({type(value).__name__})"
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_at_least(config, least, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            _require(
                least <= value < math.inf,
                f"{type(config).__name__}.{name} must be finite and at least {least}, got {value}",
            )


def _require_int32(config, *names: str) -> None:
    """For numbers that become int32 on the device."""
    for name in names:
        value = getattr(config, name)
        _require(
            value <= MAX_INT32,
            f"{type(config).__name__}.{name} must be at most {MAX_INT32}, got {value}",
        )


def _require_layers(config) -> None:
    layers = config.layers
    _require(
        layers is None or (list(layers) == sorted(set(layers)) and min(layers, default=0) >= 0),
        f"{type(config).__name__}.layers must be increasing block numbers, got {layers}",
    )


@dataclasses.dataclass(frozen=True)
class DepthConfig:
    """Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258).

    Attributes:
      every: every `every`-th block is routed: blocks every - 1, 2 * every - 1, ... The first
        block stays full unless every is 1.
      layers: the routed blocks by number, instead of `every`.
      capacity: the fraction of tokens that a routed block computes, or one a routed block.
      gate: activation of the router's value before it multiplies the block's output, or one a
        routed block: "linear" (Eq. 1), "sigmoid", "tanh" (1 + 0.2 tanh r).
      gate_on: what the gate multiplies: "block", the whole residual update (Eq. 1), or "mlp",
        the MLP's output only (the paper's Fig. 1).
      predictor: whether a small MLP learns to predict the top-k, for causal routing.
      predictor_width: hidden width of the predictor; None: d_model // 4, at least 16.
      predictor_loss_weight: weight of the predictor's loss; it trains the predictor alone.
      router_loss_weight: weight of the auxiliary loss on the router's own logits. Routing
        "router" means something only where this is positive.
      noise: standard deviation of Gaussian noise on the router's logits when the top-k is taken
        in training; the gate never sees it.
      per_document: take each document's own top-k instead of the row's.
    """

    every: int = 2
    layers: tuple[int, ...] | None = None
    capacity: float | tuple[float, ...] = 0.125
    gate: Gate | tuple[Gate, ...] = "linear"
    gate_on: Literal["block", "mlp"] = "block"
    predictor: bool = True
    predictor_width: int | None = None
    predictor_loss_weight: float = 0.01
    router_loss_weight: float = 0.0
    noise: float = 0.0
    per_document: bool = False

    def __post_init__(self):
        _check_types(self)
        _require_at_least(self, 1, "every", "predictor_width")
        _require_at_least(self, 0, "predictor_loss_weight", "router_loss_weight", "noise")
        for c in self.capacity if isinstance(self.capacity, tuple) else (self.capacity,):
            _require(
                0 < c <= 1,
                f"DepthConfig.capacity is a fraction of the tokens in (0, 1], got {c}",
            )
        _require_layers(self)


@dataclasses.dataclass(frozen=True)
class MobaConfig:
    """Mixture of Block Attention (Lu et al. 2025, arXiv 2502.13189).

    Attributes:
      block_size: keys a block.
      top_k: blocks a query attends to, its own included.
      sink_blocks: of those, so many are a document's first, whatever their scores.
      window_blocks: of those, so many are the last before the query's own, whatever their scores.
        Where sinks, window and the own block are all, attention is to a sliding window of blocks
        with sinks, and nothing is scored.
      key_convolution: keys that each key is convolved with, its own included (FlashMoBA, arXiv
        2511.11571, has 3 and 5); None: none.
      last_full: this many of the last blocks use full attention (the paper's layer hybrid).
      layers: the blocks that use MoBA by number; None: all but the last `last_full`.
      implementation: of `modo.moba_attention`; None picks by platform.
    """

    block_size: int = 512
    top_k: int = 3
    sink_blocks: int = 0
    window_blocks: int = 0
    key_convolution: int | None = None
    last_full: int = 0
    layers: tuple[int, ...] | None = None
    implementation: Literal["reference", "xla", "pallas_tpu", "pallas_gpu"] | None = None

    def __post_init__(self):
        _check_types(self)
        _require_at_least(self, 1, "block_size", "top_k", "key_convolution")
        _require_int32(self, "block_size", "top_k")
        _require_at_least(self, 0, "last_full", "sink_blocks", "window_blocks")
        _require(
            self.sink_blocks + self.window_blocks < self.top_k,
            f"MobaConfig.sink_blocks {self.sink_blocks} + window_blocks {self.window_blocks} are "
            f"more than the {self.top_k - 1} blocks that top_k {self.top_k} leaves beside a "
            "query's own",
        )
        _require_layers(self)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: pre-norm blocks of attention and a gated MLP.

    Attributes:
      vocab_size: rows of the embedding.
      d_model: width of the residual stream.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads, which divide num_heads; None: num_heads.
      head_dim: width of a head, even; None: d_model // num_heads.
      d_ff: hidden width of the MLP; None: 8 / 3 of d_model, rounded up to a multiple of 64.
      depth: Mixture-of-Depths; None: every block computes every token.
      moba: Mixture of Block Attention; None: full attention everywhere.
      compute_dtype: dtype of activations and matrix products; parameters stay float32.
      tied_embeddings: whether the output layer is the embedding.
      qk_norm: RMSNorm on every head's queries and keys, before the rotary embedding.
      attention_soft_cap: attention scores become c tanh(scores / c).
      logit_soft_cap: output logits become c tanh(logits / c).
      rope_theta: base of the rotary embedding.
      norm_eps: epsilon of every RMSNorm.
      scan_layers: run repeating layers as one `lax.scan`: compiles once a kind of layer.
      remat: what the backward pass recomputes: "none", "dots" (all but matrix products), or
        "block" (everything inside a block). Chosen tokens and blocks are always kept.
      loss_chunk: tokens of a row whose logits training and evaluation hold at once, float32
        [batch, loss_chunk, vocab_size]; the backward pass computes them again. None: all.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    depth: DepthConfig | None = None
    moba: MobaConfig | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    scan_layers: bool = False
    remat: Literal["none", "dots", "block"] = "none"
    loss_chunk: int | None = None

    def __post_init__(self):
        _check_types(self)
        _require_at_least(
            self, 1, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff",
            "loss_chunk",
        )  # fmt: skip
        _require_at_least(self, 2, "head_dim")
        if self.head_dim is None:
            _require(
                self.d_model % self.num_heads == 0,
                f"ModelConfig: num_heads {self.num_heads} does not divide d_model {self.d_model}; "
                "set head_dim or choose another number of heads",
            )
        _require(
            self.head_width % 2 == 0,
            f"ModelConfig: head_dim {self.head_width} must be even for the rotary embedding",
        )
        _require(
            self.num_heads % self.kv_heads == 0,
            f"ModelConfig: num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}",
        )
        for name in ("attention_soft_cap", "logit_soft_cap", "rope_theta", "norm_eps"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value < math.inf,
                f"ModelConfig.{name} must be positive, got {value}",
            )
        for name in ("depth", "moba"):
            layers = getattr(getattr(self, name), "layers", None) or ()
            _require(
                max(layers, default=0) < self.num_layers,
                f"ModelConfig.{name}.layers names block {max(layers, default=0)}, but num_layers "
                f"is {self.num_layers}",
            )
        if self.moba is not None:
            _require(
                len(self.moba_layers) > 0 or self.moba.layers is not None,
                f"MobaConfig.last_full {self.moba.last_full} leaves none of {self.num_layers} "
                "blocks to MoBA; moba=None is a model without it",
            )
        if self.depth is not None:
            routed = len(self.routed_layers)
            _require(
                routed > 0 or self.depth.layers is not None,
                f"DepthConfig.every {self.depth.every} routes none of {self.num_layers} blocks; "
                "depth=None is a model without routing",
            )
            for name in ("capacity", "gate"):
                value = getattr(self.depth, name)
                _require(
                    not isinstance(value, tuple) or len(value) == routed,
                    f"DepthConfig.{name} has {len(value) if isinstance(value, tuple) else 1} "
                    f"values for {routed} routed blocks",
                )

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff if self.d_ff is not None else -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks wrapped in Mixture-of-Depths."""
        if self.depth is None:
            return ()
        if self.depth.layers is not None:
            return self.depth.layers
        return tuple(range(self.depth.every - 1, self.num_layers, self.depth.every))

    @property
    def moba_layers(self) -> tuple[int, ...]:
        """Numbers of the blocks whose attention is MoBA."""
        if self.moba is None:
            return ()
        if self.moba.layers is not None:
            return self.moba.layers
        return tuple(range(max(0, self.num_layers - self.moba.last_full)))


# The sources that each field of CorpusConfig says something about; the others say it about all.
_SOURCES_OF_FIELD = {
    "path": ("text", "jsonl"),
    "validation_path": ("text", "jsonl"),
    "text_field": ("jsonl", "tfds"),
    "name": ("tfds",),
    "data_dir": ("tfds", "pysrc"),
    "train_split": ("tfds",),
    "validation_split": ("tfds", "pysrc"),
    "documents": ("pysrc",),
}


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Where the text of one corpus comes from and what of it is held out.

    Attributes:
      source: "shakespeare", the built-in corpus; "text", local UTF-8 files, each a document;
        "jsonl", local files with a JSON object a line, each a document; "tfds", a prepared
        tensorflow-datasets set; "pysrc", Python sources, made by `python -m modo.prepare pysrc`.
      path: for "text" and "jsonl": a file, a directory (its *.txt or *.jsonl files, recursively) or
        a glob. Files whose names end in .gz are decompressed.
      validation_path: likewise, held out, and not trained on where `path` names the same files;
        None: `validation_fraction` of `path`.
      validation_fraction: share of the text held out where nothing else says what is. Of "text",
        the last part of each document. Of "jsonl" and "tfds", whole documents, chosen by a hash
        of their text so that more documents never move one; where there are fewer than
        10 / validation_fraction documents, the last part of each.
      text_field: for "jsonl" and "tfds": the field that holds the text.
      name: for "tfds": NAME, NAME/CONFIG or either with :VERSION; without a version the newest.
      data_dir: for "tfds": where it was prepared, None: $TFDS_DATA_DIR or ~/tensorflow_datasets;
        without `name`, the directory of the prepared files themselves. For "pysrc": where it was
        made; None: where token files are kept by default.
      train_split: for "tfds": a split, or a slice such as "train[:90%]".
      validation_split: for "tfds": likewise; None: "validation" or else "test", where the set has
        such a split and it is not trained on, or else `validation_fraction` of train_split. For
        "pysrc": "validation" or "test"; None: "validation".
      documents: for "pysrc": a document is one of the "files", or of the "directories", whose files
        follow each other in it (for long rows).
      weight: in a mixture, the share of rows that come from this corpus is its weight over the
        sum of weights.
    """

    source: Literal["shakespeare", "text", "jsonl", "tfds", "pysrc"] = "shakespeare"
    path: str | None = None
    validation_path: str | None = None
    validation_fraction: float = 0.05
    text_field: str = "text"
    name: str | None = None
    data_dir: str | None = None
    train_split: str = "train"
    validation_split: str | None = None
    documents: Literal["files", "directories"] = "files"
    weight: float = 1.0

    def __post_init__(self):
        _check_types(self)
        cls = type(self).__name__
        _require(
            0 < self.validation_fraction < 1,
            f"{cls}.validation_fraction must be in (0, 1), got {self.validation_fraction}",
        )
        _require(
            0 < self.weight < math.inf,
            f"{cls}.weight must be positive and finite, got {self.weight}",
        )
        defaults = {field.name: field.default for field in dataclasses.fields(CorpusConfig)}
        for name, sources in _SOURCES_OF_FIELD.items():
            value = getattr(self, name)
            _require(
                value == defaults[name] or self.source in sources,
                f"{cls}.{name} is {value!r}, but source {self.source!r} does not use it; "
                f"{' and '.join(map(repr, sources))} would",
            )
            _require(value != "", f"{cls}.{name} is empty")
        if self.source in ("text", "jsonl"):
            _require(
                self.path is not None,
                f"{cls}.path must name a file, directory or glob when source is {self.source!r}",
            )
        if self.source == "tfds":
            _require(
                self.name is not None or self.data_dir is not None,
                f"{cls}.name must name a tensorflow-datasets set, or data_dir the directory of its "
                "prepared files, when source is 'tfds'",
            )
        if self.source == "pysrc":
            _require(
                self.validation_split in (None, "validation", "test"),
                f"{cls}.validation_split must be 'validation' or 'test' when source is 'pysrc', "
                f"got {self.validation_split!r}",
            )


@dataclasses.dataclass(frozen=True)
class DataConfig(CorpusConfig):
    """A corpus, or a mixture of several, and how it is cut into rows.

    Attributes:
      mixture: corpora beside this one. Every row is of one corpus; each corpus is repeated as
        often as its weight needs. All that they hold out is evaluated on.
      tokenizer: "bytes": 256 byte values and a document-start token; or the path of a *.json file
        of Hugging Face `tokenizers`, or of a *.model file of sentencepiece.
      bos_token: the special token of that file that starts every document, such as "<s>"; None:
        the file's own.
      packing: "stream": documents end to end, cut every `length` tokens; "documents": documents
        (cut only where longer than a row) packed whole into rows, the rest padding.
      mask_documents: tokens attend within their own document only, positions start at 0 in each.
        "documents" packing always does.
      cache_dir: where token files are kept; None: $XDG_CACHE_HOME/modo or ~/.cache/modo.
    """

    mixture: tuple[CorpusConfig, ...] = ()
    tokenizer: str = "bytes"
    bos_token: str | None = None
    packing: Literal["stream", "documents"] = "stream"
    mask_documents: bool = True
    cache_dir: str | None = None

    @property
    def corpora(self) -> tuple[CorpusConfig, ...]:
        """All that rows come from."""
        return self, *self.mixture

    @property
    def separates_documents(self) -> bool:
        """Whether rows tell documents, or padding, apart by their segment ids."""
        return self.mask_documents or self.packing == "documents"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule: linear warm-up, then cosine over the run's steps.

    Attributes:
      name: "adamw", or "muon" (optax.contrib.muon on the blocks' matrices, AdamW on the rest).
      learning_rate: peak learning rate; Muon's for the matrices it takes.
      adam_learning_rate: with Muon, the peak for everything else; None: learning_rate.
      warmup_steps: steps of linear warm-up.
      final_fraction: the last step's learning rate over the peak.
      weight_decay: decoupled, on matrices only.
      b1: decay of Adam's moving average of gradients.
      b2: decay of Adam's moving average of their squares.
      eps: added to the denominators of Adam, and of Muon.
      momentum: of Muon.
      mu_dtype: what the moving averages of gradients (Adam's and Muon's) are kept in between
        steps; they are updated in float32.
      nu_dtype: likewise of their squares (Adam's).
      clip_norm: largest global gradient norm; None: no clipping. Predictors are left out, so
        that training them changes nothing else.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    adam_learning_rate: float | None = None
    warmup_steps: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    nu_dtype: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float | None = 1.0

    def __post_init__(self):
        _check_types(self)
        _require_at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay", "eps")
        _require_at_least(self, 0, "adam_learning_rate")
        for name in ("b1", "b2", "momentum"):
            _require(
                0 <= getattr(self, name) < 1,
                f"OptimizerConfig.{name} must be in [0, 1), got {getattr(self, name)}",
            )
        _require(
            0 <= self.final_fraction <= 1,
            f"OptimizerConfig.final_fraction must be in [0, 1], got {self.final_fraction}",
        )
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            f"OptimizerConfig.clip_norm must be positive, got {self.clip_norm}",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one axis may be -1: all devices that are left.

    Attributes:
      data: copies of the model, each with its own rows of the batch.
      fsdp: rows of the batch as well, and parameters are cut along it.
      tensor: heads, hidden and vocabulary dimensions are cut along it.
      context: the tokens of a row are cut along it.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        _check_types(self)
        sizes = dataclasses.astuple(self)
        _require(
            all(s == -1 or s >= 1 for s in sizes) and sizes.count(-1) <= 1,
            f"MeshConfig sizes must be positive, at most one of them -1, got data {self.data}, "
            f"fsdp {self.fsdp}, tensor {self.tensor}, context {self.context}",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run.

    Attributes:
      steps: optimizer updates. Raising it extends a finished run.
      batch_size: rows an update, over all devices and processes.
      length: tokens a row that the model sees.
      accumulation: microbatches an update; each token weighs the same whatever the number.
      accumulation_dtype: what the sum of their gradients is kept in.
      seed: of initialisation, data order and routing noise.
      routing: how routed blocks choose in training: "top_k", or the "random" control.
      z_loss: weight of the squared log-partition.
      eval_every: steps between evaluations; 0: only after the last step.
      eval_batch_size: rows a device batch of evaluation; results do not depend on it.
      eval_rows: held-out rows that an evaluation reads, evenly spaced, where there are more; None:
        all. `modo.evaluate` reads all.
      eval_routings: routings to evaluate in training; the first names the loss that "best" means.
      checkpoint_every: steps between checkpoints; the last step is always saved.
      keep_checkpoints: the newest checkpoints kept, beside the best.
      log_every: steps between lines of metrics.jsonl and of the plain log.
      tensorboard: also write the metrics as TensorBoard's event files (extra "tensorboard").
      profile_start: the first step to trace with jax.profiler; None: no profile. A session's first
        step compiles.
      profile_steps: how many steps are traced.
    """

    steps: int = 1000
    batch_size: int = 8
    length: int = 256
    accumulation: int = 1
    accumulation_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    routing: Literal["top_k", "random"] = "top_k"
    z_loss: float = 0.0
    eval_every: int = 0
    eval_batch_size: int = 16
    eval_rows: int | None = None
    eval_routings: tuple[Routing, ...] = ("predictor", "top_k")
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    log_every: int = 10
    tensorboard: bool = False
    profile_start: int | None = None
    profile_steps: int = 3

    def __post_init__(self):
        _check_types(self)
        _require_at_least(
            self, 1, "steps", "batch_size", "length", "accumulation", "eval_batch_size",
            "eval_rows", "checkpoint_every", "keep_checkpoints", "log_every", "profile_start",
            "profile_steps",
        )  # fmt: skip
        _require_at_least(self, 0, "z_loss", "eval_every")
        _require_int32(self, "steps")
        _require(
            0 <= self.seed <= MAX_SEED,
            f"TrainConfig.seed must be in [0, {MAX_SEED}], got {self.seed}",
        )
        _require(
            self.batch_size % self.accumulation == 0,
            f"TrainConfig: accumulation {self.accumulation} does not divide batch_size "
            f"{self.batch_size}",
        )
        _require(len(self.eval_routings) > 0, "TrainConfig.eval_routings is empty")
        if self.profile_start is not None:
            last = self.profile_start + self.profile_steps - 1
            _require(
                last <= self.steps,
                f"TrainConfig: profile_start {self.profile_start} and profile_steps "
                f"{self.profile_steps} end at step {last}, past steps {self.steps}",
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self):
        _check_types(self)


def to_json(config: Config) -> str:
    """The config as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def _from_value(hint, value):
    """Rebuilds dataclasses and tuples from what `json` reads."""
    if isinstance(value, dict):
        for cls in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(cls):
                return _from_dict(cls, value)
    if isinstance(value, list):
        item_hint = next(iter(typing.get_args(hint)), None)
        return tuple(_from_value(item_hint, item) for item in value)
    return value


def _from_dict(cls, values: dict):
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    _require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}")
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    _require(not missing, f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: _from_value(hints[name], value) for name, value in values.items()})


def from_json(text: str) -> Config:
    """Reads what `to_json` wrote.

    Raises:
      UserError: not JSON, a field that is missing or that this version does not know, or a
        value that fails a check.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config is not JSON: {error}") from None
    _require(isinstance(values, dict) and "model" in values, "config has no 'model'")
    return _from_dict(Config, values)
