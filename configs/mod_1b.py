"""Mixture-of-Depths of 1B parameters (arXiv 2404.02258).

    python train.py --config mod_1b --workdir runs/mod_1b

Hardware: TPU v5e:8x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod("1b")
