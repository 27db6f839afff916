"""Opening a trained run: its model and its tokenizer."""

import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from modo.data.tokenizer import Tokenizer, get_tokenizer
from modo.errors import UserError
from modo.nn.decoder import Decoder
from modo.train import checkpoint, run_directory
from modo.train.run_tokenizer import own_tokenizer


def load(workdir: str | pathlib.Path, *, step: int | None = None) -> Decoder:
    """The Decoder of a run, with the parameters of one of its checkpoints, on the first device.

    Args:
      workdir: of a run of train.py.
      step: which checkpoint; None: the newest.

    Raises:
      UserError: workdir holds no run, or no whole checkpoint of that step.
    """
    workdir = pathlib.Path(workdir)
    config = run_directory.read_config(workdir)
    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"{workdir} has no checkpoint yet")
    abstract_model = nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract_model)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding), params
    )
    with checkpoint.open_manager(workdir, read_only=True) as manager:
        steps = checkpoint.complete_steps(manager)
        if not steps:
            raise UserError(f"{workdir} has no whole checkpoint")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise UserError(
                f"{workdir} has no checkpoint of step {step}; there are "
                f"{', '.join(map(str, steps))}"
            )
        return nnx.merge(graphdef, checkpoint.restore_params(manager, step, params))


def load_tokenizer(workdir: str | pathlib.Path) -> Tokenizer:
    """The tokenizer that a run was trained with, from the copy in its workdir.

    Raises:
      UserError: workdir holds no run, the copy is missing or damaged, or its package is.
    """
    workdir = pathlib.Path(workdir)
    config = run_directory.read_config(workdir)
    data = own_tokenizer(workdir, config.data)
    tokenizer = get_tokenizer(data.tokenizer, data.bos_token)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{data.tokenizer} has {tokenizer.vocab_size} tokens, more than the model's "
            f"{config.model.vocab_size}: it is not the one that the run was trained with"
        )
    return tokenizer
