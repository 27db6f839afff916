"""Every test runs on CPU, whatever the machine has, and compiles a program once a session."""

import contextlib
import os
import tempfile

# Before jax is imported. Subprocesses inherit all of it, and so do the workers of pytest -n, which
# share what is compiled.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="modo-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PLATFORMS"] = "cpu"
# Code for tiny shapes takes longer to optimise than to run.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _programs_are_dropped():
    """A process may map 65,530 pieces of memory on Linux, and ends where it needs one more.

    A compiled program takes some of them, and all that are compiled here would take more.
    """
    yield
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        if sum(1 for _ in maps) > 20_000:
            jax.clear_caches()
