"""The dense baseline of mod_220m: every block computes every token.

    python train.py --config mod_220m_baseline --workdir runs/mod_220m_baseline

Hardware: TPU v5e:2x4. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod_baseline("220m")
