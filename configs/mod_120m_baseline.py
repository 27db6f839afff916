"""The dense baseline of mod_120m: every block computes every token.

    python train.py --config mod_120m_baseline --workdir runs/mod_120m_baseline

Hardware: TPU v5e:2x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod_baseline("120m")
