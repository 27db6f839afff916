"""Every test runs on CPU, whatever the machine has, and compiles a program once a session."""

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


@pytest.fixture(autouse=True, scope="module")
def _programs_are_dropped():
    """A compiled program takes some of the 65,530 pieces of memory that a process may map on Linux.

    All of the suite's would take more, which ends the process.
    """
    yield
    jax.clear_caches()
