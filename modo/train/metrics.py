"""What a run reports: metrics.jsonl, a progress bar on a terminal, plain lines elsewhere."""

import json
import pathlib
import sys

from tqdm import tqdm

from modo.train.checkpoint import write_atomically

METRICS_FILE = "metrics.jsonl"


def read_metrics(workdir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    path = workdir / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class MetricsLog:
    """Appends to metrics.jsonl and shows progress.

    Args:
      workdir: of the run.
      start_step: updates made so far; later lines, of steps to be made again, are dropped.
      steps: updates of the whole run.
      enabled: False on all processes but the first.
    """

    def __init__(self, workdir: pathlib.Path, *, start_step: int, steps: int, enabled: bool = True):
        self.enabled = enabled
        self.bar = None
        if not enabled:
            return
        path = workdir / METRICS_FILE
        kept = [r for r in read_metrics(workdir) if r["step"] <= start_step]
        write_atomically(path, "".join(json.dumps(r) + "\n" for r in kept))
        self.file = path.open("a", buffering=1)
        if sys.stderr.isatty():
            self.bar = tqdm(initial=start_step, total=steps, unit="step", dynamic_ncols=True)
        self.steps = steps

    def write(self, record: dict) -> None:
        """Appends one line: "step", "split", then numbers."""
        if self.enabled:
            self.file.write(json.dumps(record) + "\n")

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
        if self.enabled:
            self.file.close()
        if self.bar is not None:
            self.bar.close()
