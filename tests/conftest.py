"""Every test runs on CPU, whatever the machine has, and compiles a program once a session."""

import os
import tempfile

_COMPILED = tempfile.TemporaryDirectory(prefix="modo-tests-")

# Before jax is imported; subprocesses inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
# Code for tiny shapes takes longer to optimise than to run.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
