"""Checkpoints in a workdir; Orbax behind one small surface."""

import contextlib
import errno
import itertools
import math
import os
import pathlib
import textwrap
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from modo.errors import UserError

ITEMS = ("params", "rest")


def open_manager(
    workdir: pathlib.Path, *, keep: int = 1, best_metric: str | None = None, read_only: bool = False
) -> ocp.CheckpointManager:
    """A manager that keeps the newest `keep` checkpoints and the one of the lowest best_metric.

    Orbax deletes the others once the new one is whole, and none where that fails.
    """

    def metric(metrics: dict) -> float:
        value = metrics.get(best_metric, math.inf)
        return value if math.isfinite(value) else math.inf  # NaN would sort anywhere

    directory = workdir.absolute() / "checkpoints"
    policies = [LatestN(n=keep)]
    if best_metric is not None:
        policies.append(
            BestN(
                get_metric_fn=metric,
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=AnyPreservationPolicy(policies),
        # Without it metrics are not stored, and after a resume no earlier step could be the best.
        best_fn=None if best_metric is None else metric,
        best_mode="min",
        cleanup_tmp_directories=not read_only,
        read_only=read_only,
        enable_async_checkpointing=not read_only,
    )
    return ocp.CheckpointManager(directory, options=options, item_names=ITEMS)


@contextlib.contextmanager
def saving(
    workdir: pathlib.Path, *, keep: int, best_metric: str | None
) -> Iterator[ocp.CheckpointManager]:
    """`open_manager` to save with; leaving it waits for the save under way.

    Raises:
      UserError: that save failed.
    """
    with _one_line(workdir / "checkpoints"):
        manager = open_manager(workdir, keep=keep, best_metric=best_metric)
    try:
        yield manager
        wait(manager)
    finally:
        with contextlib.suppress(Exception):  # what a failed save raises again
            manager.close()


def wait(manager: ocp.CheckpointManager) -> None:
    """Waits for the save under way.

    Raises:
      UserError: it failed, as on a full disk; earlier checkpoints are there still.
    """
    with _one_line(manager.directory):
        manager.wait_until_finished()


def check(manager: ocp.CheckpointManager) -> None:
    """Raises the error of a save that has ended meanwhile, waiting for none."""
    if not manager.is_saving_in_progress():
        wait(manager)


@contextlib.contextmanager
def _one_line(directory) -> Iterator[None]:
    """Errors of writing checkpoints as a UserError: Orbax raises what the file system said."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # of the device, not of the disk
        raise
    except Exception as error:
        raise UserError(
            f"a checkpoint could not be saved in {directory}: {_reason(error)}; earlier ones are "
            "kept: mend it and run again"
        ) from error


def _reason(error: Exception) -> str:
    """What the system said, out of an error that may hold it under a page of other words."""
    text = str(error).strip()
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    first = (text.splitlines() or [type(error).__name__])[0]
    return textwrap.shorten(first, 120, placeholder=" ...")


def set_aside_broken_steps(workdir: pathlib.Path) -> list[str]:
    """Renames steps that lack a part, so that Orbax saves theirs again; says so in lines.

    Older ones than the newest whole step stay: they were being deleted, and will be. Empty
    directories are removed.
    """
    directory, lines = workdir / "checkpoints", []
    if not directory.is_dir() or jax.process_index() != 0:
        return lines
    whole = (p.name for p in directory.iterdir() if all((p / item).is_dir() for item in ITEMS))
    newest = max((int(name) for name in whole if name.isdigit()), default=-1)
    for path in sorted(directory.iterdir()):
        missing = [f"{item}/" for item in ITEMS if not (path / item).is_dir()]
        if not path.name.isdigit() or not missing:
            continue
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
            continue
        if int(path.name) < newest:
            continue
        names = (f"{path.name}.broken-{number}" for number in itertools.count(1))
        aside = next(directory / name for name in names if not (directory / name).exists())
        path.rename(aside)
        lines.append(f"checkpoint {path} lacks {' and '.join(missing)}: set aside as {aside}")
    return lines


def complete_steps(manager: ocp.CheckpointManager) -> list[int]:
    """Steps with a whole checkpoint, oldest first."""
    directory = pathlib.Path(str(manager.directory))
    return sorted(
        step
        for step in manager.all_steps()
        if all((directory / str(step) / item).is_dir() for item in ITEMS)
    )


def save(manager: ocp.CheckpointManager, state, metrics: dict | None) -> None:
    """Starts an asynchronous save of a TrainState; best-checkpoint rules compare `metrics`.

    Raises:
      UserError: this save, or the one before it, failed.
      RuntimeError: Orbax did not save, because the step is there already.
    """
    step = int(state.step)
    rest = {"step": state.step, "opt_state": state.opt_state}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params), rest=ocp.args.StandardSave(rest)
    )
    with _one_line(manager.directory):
        saved = manager.save(step, args=items, metrics=metrics)
    if not saved:
        raise RuntimeError(f"checkpoint of step {step} was not saved: it is there already")


def restore_newest(workdir: pathlib.Path, abstract_state):
    """The TrainState of the newest whole checkpoint, or None; changes nothing in workdir.

    Raises:
      UserError: those of `restore`.
    """
    if not (workdir / "checkpoints").is_dir():
        return None
    with open_manager(workdir, read_only=True) as manager:
        steps = complete_steps(manager)
        return restore(manager, steps[-1], abstract_state) if steps else None


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
    except jax.errors.JaxRuntimeError:  # of the device, such as its memory, not of the file
        raise
    except Exception as error:  # Orbax raises a bare Exception for a damaged file
        path = f"{manager.directory}/{step}"
        earlier = max((s for s in complete_steps(manager) if s < step), default=None)
        advice = "there is no earlier step"
        if earlier is not None:
            advice = f"to go on from step {earlier}, move {path} away"
        raise UserError(f"checkpoint {path} cannot be read ({_reason(error)}); {advice}") from error
