"""The twin of moba_1b1 with full attention.

    python train.py --config moba_1b1_full --workdir runs/moba_1b1_full

Hardware: TPU v5p:4x4x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.full_attention("1b1", papers.LONG)
