"""Mixture-of-Depths of 3B parameters (arXiv 2404.02258).

    python train.py --config mod_3b --workdir runs/mod_3b

Hardware: TPU v5e:16x16. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod("3b")
