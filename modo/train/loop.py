"""The training run: open data, make or restore the state, step, evaluate, save, report."""

import contextlib
import dataclasses
import math
import pathlib
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from orbax.checkpoint import CheckpointManager

from modo import flops
from modo.config import Config, TrainConfig
from modo.data import Data, open_data, train_batches
from modo.errors import UserError
from modo.train import checkpoint, run_directory, tensorboard
from modo.train.evaluation import evaluate
from modo.train.mesh import batch_sharding, check_divides, make_mesh, place_batch
from modo.train.metrics import MetricsLog, read_metrics, select
from modo.train.optimizer import learning_rate_schedule
from modo.train.profiling import ProfilingWindow
from modo.train.report import write_report
from modo.train.run_tokenizer import check_same_tokenizer, write_tokenizer
from modo.train.step import TrainState, init_state, make_state, make_train_step
from modo.train.stop import Stopped, StopRequest, stop_on_sigterm


class LossNotFinite(UserError):
    """The loss or a gradient became infinite or NaN; the last checkpoint is kept."""


def run(config: Config, workdir: str | pathlib.Path) -> TrainState:
    """Trains `config` in `workdir`, going on from the newest checkpoint there is.

    While it runs in the main thread, SIGTERM finishes the step in flight, saves it and raises
    `modo.train.stop.Stopped`, a SystemExit of status 0; a second one ends the process at once.

    Args:
      config: the experiment.
      workdir: gets config.json, metrics.jsonl, checkpoints/, figures/ and the tokenizer's file;
        where asked for, tensorboard/ and profile/.

    Returns:
      The state after the last step.

    Raises:
      UserError: config, data, mesh or workdir do not fit together, or another run is writing to
        workdir: then nothing there has changed. Or something that is not finite, or a disk that
        takes no more: then the last checkpoint is there still.
    """
    with stop_on_sigterm() as stop:
        return _open_and_run(config, pathlib.Path(workdir), stop)


def _open_and_run(config: Config, workdir: pathlib.Path, stop: StopRequest) -> TrainState:
    if config.train.tensorboard:
        tensorboard.check_installed()
    mesh = make_mesh(config.mesh)
    check_divides(config, mesh)
    data = open_data(config.data, config.train.length)
    if data.tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's "
            f"{data.tokenizer.vocab_size}"
        )
    eval_routings(config)  # raises where there is none
    config = run_directory.with_absolute_paths(config)
    run_directory.make_workdir(workdir)
    with run_directory.locked(workdir):
        run_directory.check_same_training(workdir, config)
        check_same_tokenizer(workdir, config.data.tokenizer, data.tokenizer)
        run_directory.check_same_data(workdir, data.digests)
        return _run(config, workdir, mesh, data, stop)


def _run(config: Config, workdir: pathlib.Path, mesh, data: Data, stop: StopRequest) -> TrainState:
    """Restores, trains and reports, in a workdir that is locked and fits the config."""
    graphdef, abstract_state = make_state(config, mesh)
    state = checkpoint.restore_newest(workdir, abstract_state)
    start = 0 if state is None else int(state.step)
    if start > config.train.steps:
        raise UserError(
            f"workdir {workdir} is at step {start}, past train.steps {config.train.steps}; set "
            f"--train.steps to {start} or more, or use another workdir"
        )
    log = MetricsLog(
        workdir,
        start_step=start,
        steps=config.train.steps,
        enabled=jax.process_index() == 0,
        events=config.train.tensorboard,
    )
    with contextlib.closing(log):
        # Nothing refuses the run any more: only now does the workdir become this config's.
        run_directory.write_data(workdir, data.digests)
        write_tokenizer(workdir, data.tokenizer)
        run_directory.write_config(workdir, config)
        for line in checkpoint.set_aside_broken_steps(workdir):
            log.say(line)
        if state is None:
            state = init_state(config, abstract_state)
        log.say(_describe(config, workdir, mesh, data, start))
        step = make_train_step(graphdef, config, mesh, abstract_state)
        with (
            stop.deferred(),
            checkpoint.saving(
                workdir, keep=config.train.keep_checkpoints, best_metric=eval_routings(config)[0]
            ) as manager,
        ):
            session = _Session(config, workdir, mesh, data, graphdef, manager, log, stop)
            state, seconds = _train(session, state, step)
            stop.step = int(state.step)
        if stop.noted():
            raise Stopped
        write_report(config, workdir, data, graphdef, state, mesh, log, seconds)
    return state


@dataclasses.dataclass(frozen=True)
class _Session:
    """What a run has open while it trains."""

    config: Config
    workdir: pathlib.Path
    mesh: Mesh
    data: Data
    graphdef: nnx.GraphDef
    manager: CheckpointManager
    log: MetricsLog
    stop: StopRequest


def eval_routings(config: Config) -> tuple[str, ...]:
    """The routings to evaluate: those asked for that the model can do, one where all are the same.

    Raises:
      UserError: none is left.
    """
    asked, depth = config.train.eval_routings, config.model.depth
    if depth is None:
        return asked[:1]
    able = tuple(r for r in asked if r != "predictor" or depth.predictor)
    if not able:
        raise UserError("train.eval_routings asks for predictor alone, and the model has none")
    return able


def _describe(config: Config, workdir, mesh, data: Data, start: int) -> str:
    train = config.train
    devices = mesh.devices.flatten()
    lines = [
        f"{flops.parameter_count(config.model):,} parameters, "
        f"{flops.forward(config.model, train.length) / train.length / 1e6:.2f} MFLOPs a token "
        f"forward; {len(devices)} x {devices[0].device_kind}",
        f"{len(data.train) * train.length:,} training tokens, {len(data.validation):,} held-out "
        f"rows of {train.length}; {train.batch_size} rows a step",
    ]
    if train.batch_size > len(data.train):
        lines.append(
            f"note: train.batch_size {train.batch_size} is more than the {len(data.train)} rows to "
            "train on: a step sees some of them more than once"
        )
    if start == train.steps:
        begin = f"already trained, all {start} steps, in {workdir}; --train.steps would extend it"
    else:
        begin = f"resuming at step {start}" if start else "starting"
        begin += f" in {workdir}, {train.steps} steps"
    return "\n".join([*lines, begin])


def _train(session: _Session, state, train_step):
    """(state after the last step, seconds a step of each line but the one with compilation)."""
    config, log, stop = session.config, session.log, session.stop
    train = config.train
    start = saved = int(state.step)
    batches = train_batches(
        session.data.train,
        seed=train.seed,
        batch_size=train.batch_size,
        weights=session.data.weights,
        start_step=start,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    sharding = batch_sharding(session.mesh)
    schedule = learning_rate_schedule(config.optimizer, config.optimizer.learning_rate, train.steps)
    peak = flops.peak_flops(session.mesh.devices.flatten()[0]) * session.mesh.devices.size
    segments = config.data.separates_documents
    step_flops = flops.train_step(config.model, train.batch_size, train.length, segments=segments)
    profile = ProfilingWindow(
        session.workdir / "profile", train.profile_start, train.profile_steps, log.say
    )
    if missing := _lacking_evaluations(session.workdir, config, start):
        _evaluate(session, state, missing)
    pending, clock, since = None, time.perf_counter(), start
    all_seconds = []

    with contextlib.closing(batches), contextlib.closing(profile):
        for number in range(start + 1, train.steps + 1):
            if stop.noted_at(number - 1):
                break
            batch = next(batches)
            if not segments:  # one document a row, no padding: plain causal attention
                del batch["positions_BT"], batch["segment_ids_BT"]
            batch = place_batch(batch, sharding)
            if profile.before(number, state):
                clock, since = time.perf_counter(), number - 1
            with (
                jax.profiler.StepTraceAnnotation("train", step_num=number),
                jax.transfer_guard("disallow"),
            ):
                state, metrics = train_step(state, batch)
            if pending is not None:  # a step behind, so that the device never waits for us
                _check_finite(pending, number - 1)
            pending = metrics

            text = None
            if number % train.log_every == 0 or number in (start + 1, train.steps):
                metrics = jax.device_get(metrics)
                _check_finite(metrics, number)
                seconds = (time.perf_counter() - clock) / (number - since)
                record = _record(metrics, number, schedule, seconds, train, step_flops, peak)
                if number % train.log_every == 0 or number in (1, train.steps):
                    log.write(record)
                text = _progress(record)
                if number == start + 1:
                    text += "  (includes compilation)"
                else:
                    all_seconds.append(seconds)
                clock, since = time.perf_counter(), number
            log.advance(number, text)
            if profile.after(number, state):
                clock, since = time.perf_counter(), number

            losses = None
            if _evaluates_at(train, number):
                _check_finite(jax.device_get(pending), number)
                losses = _evaluate(session, state, eval_routings(config))
                clock, since = time.perf_counter(), number  # its time is not the step's
            if number % train.checkpoint_every == 0 or _evaluates_at(train, number):
                _save(session, pending, state, losses)
                saved = number
            checkpoint.check(session.manager)
    if int(state.step) != saved:
        _save(session, pending, state, None)
    return state, all_seconds


def _evaluates_at(train: TrainConfig, step: int) -> bool:
    return step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)


def _lacking_evaluations(workdir: pathlib.Path, config: Config, step: int) -> tuple[str, ...]:
    """Routings of `step`'s evaluation that SIGTERM came before, or that were not asked for then."""
    if step == 0 or not _evaluates_at(config.train, step):
        return ()
    made = {r["routing"] for r in select(read_metrics(workdir), "eval") if r["step"] == step}
    return tuple(routing for routing in eval_routings(config) if routing not in made)


def _save(session: _Session, metrics: dict, state, losses: dict | None) -> None:
    """Saves what is finite, and nothing else."""
    step = int(state.step)
    _check_finite(jax.device_get(metrics), step)
    if not _all_finite(state):
        raise _not_finite(f"parameters or the optimizer's state are not finite after step {step}")
    checkpoint.save(session.manager, state, losses)


@jax.jit
def _all_finite(state: TrainState) -> Array:
    """A bool scalar."""
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _check_finite(metrics: dict, step: int) -> None:
    if not float(metrics["finite"]):
        raise _not_finite(
            f"loss or gradients are not finite at step {step} (loss {float(metrics['loss'])}, "
            f"gradient norm {float(metrics['gradient_norm'])})"
        )


def _not_finite(what: str) -> LossNotFinite:
    return LossNotFinite(
        f"{what}; the last checkpoint is kept; try a smaller optimizer.learning_rate in another "
        "workdir"
    )


def _record(metrics, step, schedule, seconds, train, step_flops, peak) -> dict:
    record = {"step": step, "split": "train"}
    record |= {name: float(value) for name, value in metrics.items() if name != "finite"}
    record["learning_rate"] = float(schedule(step - 1))
    record["step_seconds"] = seconds
    record["tokens_per_second"] = train.batch_size * train.length / seconds
    if math.isfinite(peak):
        record["mfu"] = step_flops / seconds / peak
    return record


def _progress(record: dict) -> str:
    text = (
        f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"{1e3 * record['step_seconds']:.0f} ms/step"
    )
    return text + (f"  MFU {record['mfu']:.1%}" if "mfu" in record else "")


def _evaluate(session: _Session, state, routings: tuple[str, ...]) -> dict[str, float] | None:
    """Held-out losses under each routing; None, and no line of them, where the run is to stop."""
    config, step = session.config, int(state.step)
    results = []
    for routing in routings:
        results.append(
            evaluate(
                session.graphdef,
                state.params,
                session.data.validation,
                session.mesh,
                routing=routing,
                batch_size=config.train.eval_batch_size,
                most_rows=config.train.eval_rows,
                seed=config.train.seed,
                stop=session.stop.noted,
            )
        )
        if results[-1] is None:
            return None
        if not math.isfinite(results[-1].loss):
            raise _not_finite(f"held-out loss is not finite at step {step}, routing {routing}")
    for result in results:
        record = dataclasses.asdict(result)
        record |= record.pop("statistics")
        session.log.write({"step": step, "split": "eval", **record})
        session.log.say(
            f"step {step}  held-out loss {result.loss:.4f} nats a token, routing {result.routing}"
        )
    return {result.routing: result.loss for result in results}
