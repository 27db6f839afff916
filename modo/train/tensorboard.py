"""Metrics as TensorBoard's event files, by tensorboardX: without TensorFlow."""

import importlib.util
import os
import pathlib
import time

from modo.errors import UserError


def check_installed() -> None:
    """Raises UserError where the extra is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError(
            "train.tensorboard needs the package tensorboardX: pip install 'modo[tensorboard]'"
        )


class EventLog:
    """Appends records of metrics.jsonl to event files; what it has taken is on the disk.

    tensorboardX's SummaryWriter hands them to a thread, whose errors nobody would see.

    Args:
      directory: what `tensorboard --logdir` takes.
      start_step: updates made so far; TensorBoard drops what earlier files say of later steps.

    Raises:
      OSError: the file cannot be written; of `write` and `close` too.
    """

    def __init__(self, directory: pathlib.Path, *, start_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory.mkdir(exist_ok=True)
        # The name already holds the time and the host.
        self._file = EventsWriter(str(directory / "events"), f".{os.getpid()}.{start_step}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(start_step + 1, session_log=start)

    def write(self, record: dict) -> None:
        """Writes a record's numbers as train/NAME, or eval/ROUTING/NAME."""
        prefix = "/".join(record[name] for name in ("split", "routing") if name in record)
        values = [
            self._summary.Value(tag=f"{prefix}/{name}", simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float))
        ]
        self._write(record["step"], summary=self._summary(value=values))

    def _write(self, step: int, **what) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **what))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
