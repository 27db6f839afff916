"""SIGTERM, which a machine about to go away sends: a run saves what it has and ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax


class Stopped(SystemExit):
    """A run that SIGTERM ended, everything saved; where nothing catches it, the status is 0."""

    def __init__(self):
        super().__init__(0)


class StopRequest:
    """Whether a run has been asked to end.

    Where there is nothing to save, as while data are opened, the request ends the run at once, by
    raising `Stopped`; inside `deferred` it is noted, and the run asks for it between steps.

    Attributes:
      step: the last that the run made, for the message; None: it does not train yet.
    """

    def __init__(self):
        self.step: int | None = None
        self._noted = False
        self._deferred = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While it is open, a request is noted and nothing is raised."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def noted_at(self, step: int) -> bool:
        """Whether to stop after `step`. Every process of a run asks once a step, at the same step.

        So that an agreement between processes, which stops all at one step, can take the place of
        this process's own note.
        """
        del step
        return self._noted

    def noted(self) -> bool:
        """The same in the middle of a step, of this process alone."""
        return self._noted

    def _on_signal(self, number, frame) -> None:
        del number, frame
        # Whoever asks a second time, by SIGTERM or Ctrl-C, does not want to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._noted = True
        if not self._deferred:
            raise Stopped


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Turns SIGTERM into a StopRequest while a run runs, and says so when it has stopped.

    In a thread other than the main one, where Python has no signals, nobody asks to stop.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, stop._on_signal)
    try:
        yield stop
    except Stopped:
        if jax.process_index() == 0:
            where = f"at step {stop.step}" if stop.step else "before its first step"
            print(f"stopped by SIGTERM {where}; run again to go on", flush=True)
        raise
    except KeyboardInterrupt:
        if jax.process_index() == 0:
            print("Ctrl-C saves nothing; run again to go on from the last checkpoint", flush=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
