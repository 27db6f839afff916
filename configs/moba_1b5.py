"""MoBA of 1.5B parameters on rows of 32K tokens (arXiv 2502.13189).

    python train.py --config moba_1b5 --workdir runs/moba_1b5

Hardware: TPU v5p:4x4x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.moba("1b5", papers.LONG)
