"""The dense baseline of mod_1b: every block computes every token.

    python train.py --config mod_1b_baseline --workdir runs/mod_1b_baseline

Hardware: TPU v5e:8x8. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.mod_baseline("1b")
