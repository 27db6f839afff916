"""The twin of moba_822m with full attention.

    python train.py --config moba_822m_full --workdir runs/moba_822m_full

Hardware: TPU v5p:4x4x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.full_attention("822m", papers.LONG)
