"""The training run: open data, make or restore the state, step, evaluate, save, report."""

import contextlib
import dataclasses
import math
import pathlib
import time

import jax

from modo import flops
from modo.config import Config
from modo.data import Data, open_data, train_batches
from modo.errors import UserError
from modo.train import checkpoint, run_directory
from modo.train.evaluation import Evaluation, evaluate
from modo.train.mesh import batch_sharding, check_divides, make_mesh, place_batch
from modo.train.metrics import MetricsLog
from modo.train.optimizer import learning_rate_schedule
from modo.train.report import write_report
from modo.train.run_tokenizer import check_same_tokenizer, write_tokenizer
from modo.train.step import TrainState, init_state, make_state, make_train_step


class LossNotFinite(UserError):
    """The loss or a gradient became infinite or NaN; the last checkpoint is kept."""


def run(config: Config, workdir: str | pathlib.Path) -> TrainState:
    """Trains `config` in `workdir`, going on from the newest checkpoint there is.

    Args:
      config: the experiment.
      workdir: gets config.json, metrics.jsonl, checkpoints/, figures/ and the tokenizer's file.

    Returns:
      The state after the last step.

    Raises:
      UserError: config, data, mesh or workdir do not fit together, or another run is writing to
        workdir: then nothing there has changed. Or a loss that is not finite.
    """
    workdir = pathlib.Path(workdir)
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
        return _run(config, workdir, mesh, data)


def _run(config: Config, workdir: pathlib.Path, mesh, data: Data) -> TrainState:
    """Restores, trains and reports, in a workdir that is locked and fits the config."""
    graphdef, abstract_state = make_state(config, mesh)
    state = checkpoint.restore_newest(workdir, abstract_state)
    start = 0 if state is None else int(state.step)
    if start > config.train.steps:
        raise UserError(
            f"workdir {workdir} is at step {start}, past train.steps {config.train.steps}"
        )
    log = MetricsLog(
        workdir, start_step=start, steps=config.train.steps, enabled=jax.process_index() == 0
    )
    with contextlib.closing(log):
        # Nothing refuses the run any more: only now does the workdir become this config's.
        write_tokenizer(workdir, data.tokenizer)
        run_directory.write_config(workdir, config)
        for line in checkpoint.set_aside_broken_steps(workdir):
            log.say(line)
        if state is None:
            state = init_state(config, abstract_state)
        log.say(_describe(config, workdir, mesh, data, start))
        step = make_train_step(graphdef, config, mesh, abstract_state)
        with checkpoint.open_manager(
            workdir, keep=config.train.keep_checkpoints, best_metric=eval_routings(config)[0]
        ) as manager:
            state, seconds = _train(config, mesh, data, graphdef, state, step, manager, log)
            manager.wait_until_finished()
        write_report(config, workdir, data, graphdef, state, mesh, log, seconds)
    return state


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
    begin = f"resuming at step {start}" if start else "starting"
    return "\n".join([*lines, f"{begin} in {workdir}, {train.steps} steps"])


def _train(config, mesh, data, graphdef, state, train_step, manager, log):
    """(state after the last step, seconds a step of each line but the one with compilation)."""
    train = config.train
    start = int(state.step)
    batches = train_batches(
        data.train,
        seed=train.seed,
        batch_size=train.batch_size,
        start_step=start,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    sharding = batch_sharding(mesh)
    schedule = learning_rate_schedule(config.optimizer, config.optimizer.learning_rate, train.steps)
    peak = flops.peak_flops(mesh.devices.flatten()[0]) * mesh.devices.size
    segments = config.data.separates_documents
    step_flops = flops.train_step(config.model, train.batch_size, train.length, segments=segments)
    pending, clock, since = None, time.perf_counter(), start
    all_seconds = []

    with contextlib.closing(batches):
        for number in range(start + 1, train.steps + 1):
            batch = next(batches)
            if not segments:  # one document a row, no padding: plain causal attention
                del batch["positions_BT"], batch["segment_ids_BT"]
            batch = place_batch(batch, sharding)
            with jax.transfer_guard("disallow"):
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

            evaluate_now = number == train.steps or (
                train.eval_every and number % train.eval_every == 0
            )
            losses = None
            if evaluate_now:
                losses = {
                    routing: _evaluate(config, mesh, data, graphdef, state, routing, log).loss
                    for routing in eval_routings(config)
                }
            if number % train.checkpoint_every == 0 or number == train.steps or evaluate_now:
                _check_finite(jax.device_get(pending), number)
                checkpoint.save(manager, state, losses)
            if evaluate_now:  # its time is not the step's
                clock, since = time.perf_counter(), number
    return state, all_seconds


def _check_finite(metrics: dict, step: int) -> None:
    if not float(metrics["finite"]):
        raise LossNotFinite(
            f"loss or gradients are not finite at step {step} (loss {float(metrics['loss'])}, "
            f"gradient norm {float(metrics['gradient_norm'])}); the last checkpoint is kept; "
            "try a smaller optimizer.learning_rate in another workdir"
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


def _evaluate(config, mesh, data, graphdef, state, routing, log) -> Evaluation:
    result = evaluate(
        graphdef,
        state.params,
        data.validation,
        mesh,
        routing=routing,
        batch_size=config.train.eval_batch_size,
        seed=config.train.seed,
    )
    step = int(state.step)
    record = dataclasses.asdict(result)
    record |= record.pop("statistics")
    log.write({"step": step, "split": "eval", **record})
    log.say(f"step {step}  held-out loss {result.loss:.4f} nats a token, routing {routing}")
    return result
