"""Mixture-of-Depths of 500M parameters (arXiv 2404.02258).

    python train.py --config mod_500m --workdir runs/mod_500m

Hardware: TPU v5e:4x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod("500m")
