"""The twin of moba_1b5_8k with full attention.

    python train.py --config moba_1b5_8k_full --workdir runs/moba_1b5_8k_full

Hardware: TPU v5p:4x4x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.full_attention("1b5", papers.SHORT)
