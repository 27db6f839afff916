import dataclasses
import json
import math

import pytest

from modo import Config, DepthConfig, MobaConfig, ModelConfig
from modo.config import (
    CorpusConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    from_json,
    to_json,
)
from modo.errors import UserError


def model(**changes) -> ModelConfig:
    return ModelConfig(**{**dict(vocab_size=32, d_model=16, num_layers=4, num_heads=2), **changes})


def depth_model(num_layers=4, **depth) -> ModelConfig:
    return model(num_layers=num_layers, depth=DepthConfig(**depth))


BAD = [
    # Out of range: the message holds the number.
    (lambda: DepthConfig(capacity=0), "0"),
    (lambda: DepthConfig(capacity=2), "2"),
    (lambda: DepthConfig(capacity=-0.5), "-0.5"),
    (lambda: DepthConfig(capacity=math.nan), "nan"),
    (lambda: DepthConfig(capacity=math.inf), "inf"),
    (lambda: DepthConfig(capacity=(0.5, 1.5)), "1.5"),
    (lambda: DepthConfig(every=0), "0"),
    (lambda: DepthConfig(noise=-0.1), "-0.1"),
    (lambda: DepthConfig(noise=math.nan), "nan"),
    (lambda: DepthConfig(noise=math.inf), "inf"),
    (lambda: DepthConfig(predictor_width=0), "0"),
    (lambda: DepthConfig(predictor_loss_weight=-1.0), "-1.0"),
    (lambda: DepthConfig(router_loss_weight=math.nan), "nan"),
    (lambda: DepthConfig(layers=(2, 1)), "(2, 1)"),
    (lambda: DepthConfig(layers=(1, 1)), "(1, 1)"),
    (lambda: DepthConfig(layers=(-1, 2)), "(-1, 2)"),
    (lambda: MobaConfig(top_k=0), "0"),
    (lambda: MobaConfig(block_size=0), "0"),
    (lambda: MobaConfig(last_full=-1), "-1"),
    (lambda: MobaConfig(key_convolution=0), "0"),
    (lambda: MobaConfig(sink_blocks=-1), "-1"),
    (lambda: MobaConfig(top_k=3, sink_blocks=1, window_blocks=2), "the 2 blocks that top_k 3"),
    (lambda: MobaConfig(layers=(2, 1)), "(2, 1)"),
    (lambda: MobaConfig(layers=(-1,)), "(-1,)"),
    (lambda: model(num_layers=0), "0"),
    (lambda: model(vocab_size=0), "0"),
    (lambda: model(d_ff=0), "0"),
    (lambda: model(head_dim=0), "0"),
    (lambda: model(head_dim=5), "5"),
    (lambda: model(num_heads=3), "3"),
    (lambda: model(num_heads=16), "1"),  # a head of width 1 has no pairs to rotate
    (lambda: model(num_heads=4, num_kv_heads=3), "3"),
    (lambda: model(num_heads=2, num_kv_heads=4), "4"),
    (lambda: model(num_kv_heads=0), "0"),
    (lambda: model(attention_soft_cap=0.0), "0.0"),
    (lambda: model(attention_soft_cap=math.inf), "inf"),
    (lambda: model(logit_soft_cap=-30.0), "-30.0"),
    (lambda: model(rope_theta=0), "0"),
    (lambda: model(norm_eps=math.nan), "nan"),
    (lambda: depth_model(layers=(1, 4)), "4"),
    (lambda: model(moba=MobaConfig(layers=(7,))), "7"),
    (lambda: model(moba=MobaConfig(last_full=99)), "99"),
    (lambda: MobaConfig(block_size=10**13), "at most 2147483647, got 10000000000000"),
    (lambda: MobaConfig(top_k=2**31), "at most 2147483647, got 2147483648"),
    (lambda: TrainConfig(steps=2**31), "at most 2147483647, got 2147483648"),
    (lambda: TrainConfig(seed=-1), "[0, 4294967295], got -1"),
    (lambda: TrainConfig(seed=2**32), "[0, 4294967295], got 4294967296"),
    (lambda: depth_model(every=99), "99"),
    (lambda: depth_model(capacity=(0.5,)), "1"),
    (lambda: depth_model(capacity=(0.5, 0.5, 0.5)), "3"),
    (lambda: depth_model(gate=("linear",) * 3), "3"),
    (lambda: depth_model(layers=(0, 1, 2), gate=("linear", "tanh")), "2"),
    (lambda: OptimizerConfig(learning_rate=math.nan), "nan"),
    (lambda: OptimizerConfig(learning_rate=-1e-3), "-0.001"),
    (lambda: OptimizerConfig(b2=1.0), "1.0"),
    (lambda: OptimizerConfig(clip_norm=0.0), "0.0"),
    (lambda: OptimizerConfig(final_fraction=1.5), "1.5"),
    (lambda: MeshConfig(data=-1, fsdp=-1), "-1"),
    (lambda: MeshConfig(tensor=0), "0"),
    (lambda: TrainConfig(steps=0), "0"),
    (lambda: TrainConfig(batch_size=8, accumulation=3), "3"),
    (lambda: TrainConfig(z_loss=-1.0), "-1.0"),
    (lambda: DataConfig(validation_fraction=1.0), "1.0"),
    (lambda: DataConfig(source="json"), "'json'"),
    (lambda: DataConfig(source="jsonl"), "DataConfig.path must name a file"),
    (lambda: CorpusConfig(source="text"), "CorpusConfig.path must name a file"),
    (lambda: DataConfig(source="text", path=""), "DataConfig.path is empty"),
    (lambda: DataConfig(source="tfds"), "DataConfig.name must name"),
    (lambda: DataConfig(source="pysrc", validation_split="dev"), "'dev'"),
    (lambda: DataConfig(source="pysrc", documents="lines"), "'lines'"),
    (lambda: DataConfig(path="x"), "'shakespeare' does not use it; 'text' and 'jsonl' would"),
    (lambda: DataConfig(source="text", path="x", text_field="body"), "'jsonl' and 'tfds' would"),
    (lambda: DataConfig(source="pysrc", name="pg19"), "'pysrc' does not use it; 'tfds' would"),
    (lambda: DataConfig(source="tfds", name="pg19", documents="directories"), "'pysrc' would"),
    # Wrong types and unknown names: the message holds the value.
    (lambda: DepthConfig(capacity="half"), "'half'"),
    (lambda: DepthConfig(capacity=None), "None"),
    (lambda: DepthConfig(capacity=True), "True"),
    (lambda: DepthConfig(gate="softmax"), "'softmax'"),
    (lambda: DepthConfig(gate=("linear", "relu")), "'relu'"),
    (lambda: DepthConfig(gate_on="attention"), "'attention'"),
    (lambda: DepthConfig(every=2.0), "2.0"),
    (lambda: DepthConfig(layers=[1]), "[1]"),
    (lambda: DepthConfig(predictor=1), "1"),
    (lambda: MobaConfig(top_k=1.5), "1.5"),
    (lambda: MobaConfig(implementation="xxl"), "'xxl'"),
    (lambda: model(num_heads="2"), "'2'"),
    (lambda: model(d_model=True), "True"),
    (lambda: model(depth={"every": 2}), "every"),
    (lambda: model(compute_dtype="float16"), "'float16'"),
    (lambda: model(remat="all"), "'all'"),
    (lambda: TrainConfig(routing="predictor"), "'predictor'"),
    (lambda: TrainConfig(eval_routings=("top_k", "best")), "'best'"),
    (lambda: TrainConfig(eval_routings=()), "empty"),
    (lambda: Config(model=None), "None"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("make", "value"), BAD)
def test_a_bad_value_is_named_in_one_line(make, value):
    with pytest.raises(UserError) as error:
        make()
    message = str(error.value)
    assert value in message and "Config" in message and "\n" not in message


EVERYTHING = Config(
    model=model(
        num_kv_heads=1,
        head_dim=6,
        d_ff=40,
        depth=DepthConfig(layers=(0, 3), capacity=(0.25, 1.0), gate=("tanh", "sigmoid"), noise=0.5),
        moba=MobaConfig(block_size=4, top_k=2, layers=(1, 2)),
        compute_dtype="bfloat16",
        logit_soft_cap=30.0,
    ),
    optimizer=OptimizerConfig(name="muon", clip_norm=None),
    mesh=MeshConfig(data=2, tensor=2),
    train=TrainConfig(eval_routings=("router", "random"), routing="random"),
)


@pytest.mark.quick
@pytest.mark.parametrize("config", [Config(model()), Config(depth_model()), EVERYTHING])
def test_json_round_trip(config):
    text = to_json(config)
    assert from_json(text) == config
    assert json.loads(text) == json.loads(json.dumps(dataclasses.asdict(config)))


def _changed(**changes) -> str:
    """The JSON of a config with fields set, or taken out where the value is None."""
    values = json.loads(to_json(EVERYTHING))
    for path, value in changes.items():
        *parents, name = path.split("__")
        inner = values
        for parent in parents:
            inner = inner[parent]
        if value is None:
            del inner[name]
        else:
            inner[name] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no 'model'"),
        ("3", "no 'model'"),
        ("{}", "no 'model'"),
        ('{"model": 3}', "3"),
        ('{"model": {}}', "vocab_size"),
        (_changed(model__d_model=None), "d_model"),
        (_changed(widht=3), "widht"),
        (_changed(model__widht=3), "widht"),
        (_changed(model__depth__widht=3), "widht"),
        (_changed(model__depth__capacity=[0.5, 2]), "2"),
        (_changed(model__depth__layers=[0, 4]), "4"),
        (_changed(model__d_model={"size": 3}), "size"),
        (_changed(model__moba__top_k="3"), "'3'"),
        (_changed(train__steps=1.5), "1.5"),
    ],
)
def test_bad_json_is_a_user_error(text, message):
    with pytest.raises(UserError) as error:
        from_json(text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.quick
def test_which_layers_are_routed_and_which_are_moba():
    assert model().routed_layers == ()
    assert depth_model(num_layers=5).routed_layers == (1, 3)
    assert depth_model(num_layers=5, every=1).routed_layers == (0, 1, 2, 3, 4)
    assert depth_model(num_layers=5, every=3).routed_layers == (2,)
    assert depth_model(num_layers=5, layers=(0, 4)).routed_layers == (0, 4)
    assert depth_model(num_layers=5, layers=()).routed_layers == ()
    assert model().moba_layers == ()
    assert model(moba=MobaConfig()).moba_layers == (0, 1, 2, 3)
    assert model(moba=MobaConfig(last_full=3)).moba_layers == (0,)
    assert model(moba=MobaConfig(layers=())).moba_layers == ()
    assert model(moba=MobaConfig(layers=(1, 3))).moba_layers == (1, 3)


def test_widths_that_are_not_given():
    config = model(d_model=48, num_heads=4)
    assert (config.head_width, config.kv_heads, config.ff_width) == (12, 4, 128)
    config = model(d_model=50, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=7)
    assert (config.head_width, config.kv_heads, config.ff_width) == (8, 2, 7)


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        model().d_model = 32
