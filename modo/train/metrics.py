"""What a run reports: metrics.jsonl, a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import json
import pathlib
import sys

from tqdm import tqdm

from modo.errors import UserError
from modo.train import tensorboard
from modo.train.run_directory import write_atomically

METRICS_FILE = "metrics.jsonl"


def read_metrics(workdir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl; those that are no records, as a kill leaves, are left out.

    Raises:
      UserError: the file cannot be read.
    """
    path = workdir / METRICS_FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict | None:
    """A record: a JSON object with an integer "step"."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or brackets without end
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def select(records: list[dict], split: str) -> list[dict]:
    """The records of "train" or "eval" that hold the loss, and the routing, of their step."""
    return [
        r
        for r in records
        if r.get("split") == split
        and isinstance(r.get("loss"), float)
        and (split == "train" or isinstance(r.get("routing"), str))
    ]


class MetricsLog:
    """Appends to metrics.jsonl and shows progress.

    Args:
      workdir: of the run.
      start_step: updates made so far; later lines, of steps to be made again, are dropped.
      steps: updates of the whole run.
      enabled: False on all processes but the first.
      events: also write TensorBoard's event files, into workdir/tensorboard.

    Raises:
      UserError: metrics.jsonl cannot be read or written; of `write` too.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        start_step: int,
        steps: int,
        enabled: bool = True,
        events: bool = False,
    ):
        self.enabled = enabled
        self.bar = None
        self.files = contextlib.ExitStack()
        if not enabled:
            return
        self.path = workdir / METRICS_FILE
        kept = [r for r in read_metrics(workdir) if r["step"] <= start_step]
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        with self._one_line():
            self.file = self.files.enter_context(self.path.open("a", buffering=1))
        self.events = None
        if events:
            directory = workdir / "tensorboard"
            with self._one_line(directory):
                self.events = tensorboard.EventLog(directory, start_step=start_step)
                self.files.callback(self.events.close)
        if sys.stderr.isatty():
            self.bar = tqdm(initial=start_step, total=steps, unit="step", dynamic_ncols=True)
        self.steps = steps

    def write(self, record: dict) -> None:
        """Appends one line: "step", "split", then numbers."""
        if not self.enabled:
            return
        with self._one_line():
            self.file.write(json.dumps(record) + "\n")
        if self.events is not None:
            with self._one_line(self.path.parent / "tensorboard"):
                self.events.write(record)

    @contextlib.contextmanager
    def _one_line(self, path: pathlib.Path | None = None):
        """An OSError of `path`, or of metrics.jsonl, as a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{path or self.path}: {error.strerror}") from None

    def advance(self, step: int, text: str | None) -> None:
        """Moves the bar on; `text`, the newest figures, shows beside it or as a plain line."""
        if not self.enabled:
            return
        if self.bar is not None:
            if text is not None:
                self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif text is not None:
            print(f"step {step}/{self.steps}  {text}", flush=True)

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if not self.enabled:
            return
        if self.bar is not None:
            tqdm.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        # What a full disk did not take was reported when it was written.
        with contextlib.suppress(OSError):
            self.files.close()
        if self.bar is not None:
            self.bar.close()
