"""Llama 3 8B's shape with MoBA on rows of 1M tokens, the last three layers full.

    python train.py --config llama_8b_1m --workdir runs/llama_8b_1m

Hardware: TPU v5p:8x8x16. Time and held-out loss: not run. Data: see modo/papers.py.
"""

from modo import papers
from modo.config import Config


def get_config() -> Config:
    return papers.llama_8b_1m()
