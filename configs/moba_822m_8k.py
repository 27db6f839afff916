"""MoBA of 822M parameters on rows of 8K tokens (arXiv 2502.13189).

    python train.py --config moba_822m_8k --workdir runs/moba_822m_8k

Hardware: TPU v5p:4x4x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.moba("822m", papers.SHORT)
