"""The twin of moba_2b_8k with full attention.

    python train.py --config moba_2b_8k_full --workdir runs/moba_2b_8k_full

Hardware: TPU v5p:8x8x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.full_attention("2b", papers.SHORT)
