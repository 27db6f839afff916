"""Text to batches: `open_data`, then `train_batches` and `eval_batches`."""

from modo.data.pipeline import Data, eval_batches, open_data, train_batches
from modo.data.tokenizer import ByteTokenizer, get_tokenizer

__all__ = [
    "ByteTokenizer",
    "Data",
    "eval_batches",
    "get_tokenizer",
    "open_data",
    "train_batches",
]
