"""What accelerators can do, by `device_kind`, for estimates: makers' numbers, not measurements."""

import dataclasses

from modo.errors import UserError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, as JAX counts them.

    Attributes:
      flops: dense bf16 peak, FLOP/s.
      memory: bytes of HBM that a program can have.
      memory_bandwidth: of HBM, bytes/s.
      link_bandwidth: to other devices of the slice or machine, bytes/s one way, over all links.
    """

    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float


# TPUs. Peak, HBM and link bandwidth a chip: the tables on cloud.google.com/tpu/docs (v5e, v5p, v6e,
# tpu7x), which give links both ways together. Memory: the HBM that libtpu 0.0.42 names when it
# refuses a program, 0.25 GiB or more below the data sheet's, which it keeps for itself. A chip of
# TPU7x is two devices, and each gets half of everything.
# GPUs: NVIDIA's data sheets; links are NVLink's (H200: 900 GB/s both ways, A100: 600), or PCIe 4.0
# x16 of the RTX 4090. CUDA's context and JAX's default leave a program about 0.9 of the memory.
HARDWARE = {
    "TPU v5 lite": Hardware(197e12, int(15.75 * GIB), 819e9, 200e9),
    "TPU v5": Hardware(459e12, int(95.74 * GIB), 2765e9, 600e9),
    "TPU v6 lite": Hardware(918e12, int(31.25 * GIB), 1640e9, 400e9),
    "TPU7x": Hardware(2307e12 / 2, int(94.75 * GIB), 7380e9 / 2, 600e9 / 2),
    "NVIDIA H200": Hardware(989e12, int(0.9 * 141e9), 4.8e12, 450e9),
    "NVIDIA A100": Hardware(312e12, int(0.9 * 80e9), 2.0e12, 300e9),
    "NVIDIA GeForce RTX 4090": Hardware(165e12, int(0.9 * 24e9), 1.0e12, 32e9),
}


def of_device(kind: str) -> Hardware:
    """The numbers for a `device_kind`.

    Raises:
      UserError: there are none.
    """
    if kind not in HARDWARE:
        raise UserError(f"no numbers for device {kind!r}; there are some for {', '.join(HARDWARE)}")
    return HARDWARE[kind]
