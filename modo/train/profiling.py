"""A window of steps under jax.profiler."""

import pathlib
from collections.abc import Callable

import jax

from modo.errors import UserError


class ProfilingWindow:
    """Traces steps first to first + steps - 1 of a run into a directory.

    A session that starts past `first` traces nothing: an earlier one has.

    Args:
      directory: gets plugins/profile/TIME/, which TensorBoard's profile plugin and Perfetto read.
      first: the first step traced; None: none.
      steps: how many.
      say: prints a line.
    """

    def __init__(
        self, directory: pathlib.Path, first: int | None, steps: int, say: Callable[[str], None]
    ):
        self._directory, self._first, self._steps, self._say = directory, first, steps, say
        self._tracing = False

    def before(self, step: int, state) -> bool:
        """Starts the trace where the window does, once what computes `state` has ended.

        Returns:
          Whether it did, which takes time that is not the step's.
        """
        if step != self._first:
            return False
        jax.block_until_ready(state)
        self._directory.mkdir(exist_ok=True)
        jax.profiler.start_trace(str(self._directory))
        self._tracing = True
        return True

    def after(self, step: int, state) -> bool:
        """Ends the trace where the window does, and returns whether it did.

        Raises:
          UserError: it could not be written.
        """
        if not self._tracing or step != self._first + self._steps - 1:
            return False
        jax.block_until_ready(state)
        self.close()
        self._say(f"profile of steps {self._first} to {step}: {self._directory}")
        return True

    def close(self) -> None:
        """Ends a trace that is open, as where the run stops inside the window."""
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"profile in {self._directory} was not written: {reason}") from error
