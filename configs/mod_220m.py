"""Mixture-of-Depths of 220M parameters (arXiv 2404.02258).

    python train.py --config mod_220m --workdir runs/mod_220m

Hardware: TPU v5e:2x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod("220m")
