"""Text to batches: `open_data`, then `train_batches` and `eval_batches`."""

from modo.data.pipeline import Data, eval_batches, open_data, train_batches
from modo.data.tokenizer import ByteTokenizer, TextStream, Tokenizer, get_tokenizer
from modo.data.tokenizer_file import HuggingFaceTokenizer, SentencePieceTokenizer

__all__ = [
    "ByteTokenizer",
    "Data",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TextStream",
    "Tokenizer",
    "eval_batches",
    "get_tokenizer",
    "open_data",
    "train_batches",
]
