"""Text to tokens and back."""

import os

import numpy as np

from modo.data.tokenizer_file import HuggingFaceTokenizer, SentencePieceTokenizer, as_bytes
from modo.errors import UserError


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and token 256 at the start of every document.

    Attributes:
      vocab_size: 257.
      bos_token: 256, which no text encodes to.
      fingerprint: identifies the mapping; token files made with another one are not reused.
      file_name: None: there is no file that a run would have to keep.
    """

    vocab_size = 257
    bos_token = 256
    fingerprint = "bytes"
    file_name = None

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`, uint16 [T], without the document-start token."""
        return np.frombuffer(as_bytes(text), np.uint8).astype(np.uint16)

    def decode(self, tokens) -> str:
        """The text of `tokens` (any integer sequence), without document-start tokens.

        Bytes that are not UTF-8, and numbers that are no token, become U+FFFD.
        """
        tokens = np.asarray(tokens, np.int64).reshape(-1)
        tokens = tokens[tokens != self.bos_token]
        # Byte 0xFF never occurs in UTF-8, so it decodes to U+FFFD.
        tokens = np.where((tokens < 0) | (tokens > 255), 0xFF, tokens)
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decode_settled(self, tokens) -> str:
        """The part of `decode(tokens)` that stays as it is whatever tokens follow."""
        return self.decode(tokens).rstrip("\ufffd")


Tokenizer = ByteTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer


def get_tokenizer(name: str, bos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` and `bos_token` name.

    Args:
      name: "bytes", or the path of a *.json file of Hugging Face `tokenizers` or of a *.model
        file of sentencepiece.
      bos_token: which of the file's special tokens starts a document; None: the file's own.

    Raises:
      UserError: there is none of that name, the file is missing, unreadable, damaged or of another
        kind, its package is not installed, or it has no such document-start token.
    """
    if name == "bytes":
        if bos_token is not None:
            raise UserError(
                f"data.bos_token is {bos_token!r}, but the tokenizer 'bytes' has its own"
            )
        return ByteTokenizer()
    kinds = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is None:
        raise UserError(
            f"unknown tokenizer {name!r}; there is 'bytes', or the path of a *.json file of "
            "Hugging Face tokenizers or of a *.model file of sentencepiece"
        )
    try:
        with open(os.path.expanduser(name), "rb") as file:
            content = file.read()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {name}: {error.strerror}") from None
    try:
        return kind(content, bos_token)
    except UserError as error:
        raise UserError(f"tokenizer {name}: {error}") from None


class TextStream:
    """Text as tokens come, each character once no later token can change it.

    A character may be split over tokens, and a token may mean something else after others: what
    `add` has returned is, after the last call, exactly the `decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.written = 0

    def add(self, tokens, *, last: bool = False) -> str:
        """The text that `tokens` (any integer sequence) complete; all that is left with `last`."""
        self.tokens.extend(int(token) for token in tokens)
        decode = self.tokenizer.decode if last else self.tokenizer.decode_settled
        text = decode(self.tokens)
        new = text[self.written :]
        self.written = max(self.written, len(text))
        return new
