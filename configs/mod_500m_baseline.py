"""The dense baseline of mod_500m: every block computes every token.

    python train.py --config mod_500m_baseline --workdir runs/mod_500m_baseline

Hardware: TPU v5e:4x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod_baseline("500m")
