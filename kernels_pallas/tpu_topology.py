"""TPUs to compile for, without a TPU: libtpu knows the chips of every generation.

Programs compiled for these devices can be read and measured, but not run. Importing this module
loads neither libtpu nor a backend.
"""

import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Four chips of each generation, the fewest that libtpu describes of all of them.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Or libtpu waits for the metadata server of a machine in the cloud.
    "TPU_SKIP_MDS_QUERY": "1",
    # No device is taken, so that another process may have libtpu open as well.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def set_environment() -> None:
    """Lets libtpu load where there is no TPU, unless its variables say otherwise already.

    libtpu reads them when it loads, so anything that starts a TPU backend earlier must come after
    this; `devices` calls it.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def devices(name: str) -> list[jax.Device]:
    """Devices that programs can be compiled for, but that do not run them.

    Args:
      name: a generation, "v5e", "v5p", "v6e" or "tpu7x", for four chips of it; or a topology as
        libtpu names it, such as "v5e:4x4" or "v5p:2x2x4".

    Returns:
      Its devices; a chip of tpu7x is two.

    Raises:
      ValueError: no such topology.
      RuntimeError: libtpu is not installed.
    """
    set_environment()
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES.get(name, name)
        )
    except jax.errors.JaxRuntimeError as error:
        known = ", ".join(TOPOLOGIES)
        raise ValueError(
            f"{name!r} is neither a generation of TPU ({known}) nor a topology like 'v5e:4x4': "
            f"{error}"
        ) from None
    return list(topology.devices)


def one_chip(name: str) -> NamedSharding:
    """Everything on the first device of `devices(name)`."""
    return NamedSharding(Mesh(np.array(devices(name)[:1]), ("x",)), PartitionSpec())
