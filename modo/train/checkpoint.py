"""Checkpoints and the run's own files in a workdir; Orbax behind one small surface."""

import json
import os
import pathlib

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from modo import config as config_lib
from modo.config import Config
from modo.errors import UserError

CONFIG_FILE = "config.json"
# Fields of the model that change how it is computed, not what its parameters are.
FREE_FIELDS = ("model.remat", "model.compute_dtype", "model.moba.implementation")


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that a reader, or a kill, finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def open_manager(
    workdir: pathlib.Path, *, keep: int = 1, best_metric: str | None = None, read_only: bool = False
) -> ocp.CheckpointManager:
    """A manager that keeps the newest `keep` checkpoints and the one of the lowest best_metric."""
    directory = workdir.absolute() / "checkpoints"
    if not read_only:
        _remove_empty_steps(directory)
    policies = [LatestN(n=keep)]
    if best_metric is not None:
        policies.append(
            BestN(
                get_metric_fn=lambda metrics: metrics[best_metric],
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=AnyPreservationPolicy(policies),
        cleanup_tmp_directories=not read_only,
        read_only=read_only,
        enable_async_checkpointing=not read_only,
    )
    return ocp.CheckpointManager(directory, options=options, item_names=("params", "rest"))


def _remove_empty_steps(directory: pathlib.Path) -> None:
    """Orbax takes an empty directory named like a step for a checkpoint, and would not save it."""
    if directory.is_dir() and jax.process_index() == 0:
        for path in directory.iterdir():
            if path.name.isdigit() and path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def complete_steps(manager: ocp.CheckpointManager) -> list[int]:
    """Steps with a whole checkpoint, oldest first."""
    directory = pathlib.Path(str(manager.directory))
    return sorted(
        step
        for step in manager.all_steps()
        if all((directory / str(step) / item).is_dir() for item in ("params", "rest"))
    )


def save(manager: ocp.CheckpointManager, state, metrics: dict | None) -> None:
    """Starts an asynchronous save of a TrainState; best-checkpoint rules compare `metrics`.

    Raises:
      RuntimeError: Orbax did not save, because the step is there already.
    """
    step = int(state.step)
    rest = {"step": state.step, "opt_state": state.opt_state}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params), rest=ocp.args.StandardSave(rest)
    )
    if not manager.save(step, args=items, metrics=metrics):
        raise RuntimeError(f"checkpoint of step {step} was not saved: it is there already")


def restore(manager: ocp.CheckpointManager, step: int, abstract_state):
    """Reads a checkpoint into the shapes, dtypes and shardings of a TrainState.

    Raises:
      UserError: the checkpoint cannot be read, or holds another model.
    """
    rest = {"step": abstract_state.step, "opt_state": abstract_state.opt_state}
    items = _restore(manager, step, {"params": abstract_state.params, "rest": rest})
    return type(abstract_state)(params=items["params"], **items["rest"])


def restore_params(manager: ocp.CheckpointManager, step: int, abstract_params):
    """Reads the parameters of a checkpoint alone; errors as of `restore`."""
    return _restore(manager, step, {"params": abstract_params})["params"]


def _restore(manager, step: int, targets: dict):
    items = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except (ValueError, KeyError, TypeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {manager.directory}/{step} cannot be read: {first}") from error


def read_config(workdir: pathlib.Path) -> Config:
    """The config that a run was started with.

    Raises:
      UserError: there is no run in workdir, or its config cannot be read.
    """
    path = workdir / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{workdir} holds no run: {path} does not exist")
    return config_lib.from_json(path.read_text())


def claim_workdir(workdir: pathlib.Path, config: Config) -> None:
    """Writes config.json, or checks that the run there has the same model.

    Raises:
      UserError: workdir is not a directory that can be made, or holds another model.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}") from None
    if (workdir / CONFIG_FILE).exists():
        old, new = (json.loads(config_lib.to_json(c)) for c in (read_config(workdir), config))
        differences = [
            f"{name} was {before!r}, now {after!r}"
            for name, before, after in _differences(old, new, "")
            if name.startswith("model.") and name not in FREE_FIELDS
        ]
        if differences:
            raise UserError(
                f"workdir {workdir} holds a run of another model: {'; '.join(differences)}; "
                "choose another workdir"
            )
    if jax.process_index() == 0:
        write_atomically(workdir / CONFIG_FILE, config_lib.to_json(config))


def _differences(old, new, prefix: str):
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield prefix.rstrip("."), old, new
        return
    for name in sorted(set(old) | set(new)):
        yield from _differences(old.get(name), new.get(name), f"{prefix}{name}.")
