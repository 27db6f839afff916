"""The dense baseline of mod_3b: every block computes every token.

    python train.py --config mod_3b_baseline --workdir runs/mod_3b_baseline

Hardware: TPU v5e:16x16. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod_baseline("3b")
