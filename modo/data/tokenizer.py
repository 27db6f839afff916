"""Text to tokens and back."""

import numpy as np

from modo.errors import UserError


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and token 256 at the start of every document.

    Attributes:
      vocab_size: 257.
      bos_token: 256, which no text encodes to.
      fingerprint: identifies the mapping; token files made with another one are not reused.
    """

    vocab_size = 257
    bos_token = 256
    fingerprint = "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`, uint16 [T], without the document-start token."""
        if isinstance(text, str):
            # A shell argument that is not UTF-8 reaches Python as surrogates: give back its bytes.
            text = text.encode("utf-8", errors="surrogateescape")
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, tokens) -> str:
        """The text of `tokens` (any integer sequence), without document-start tokens.

        Bytes that are not UTF-8, and numbers that are no token, become U+FFFD.
        """
        tokens = np.asarray(tokens, np.int64).reshape(-1)
        tokens = tokens[tokens != self.bos_token]
        # Byte 0xFF never occurs in UTF-8, so it decodes to U+FFFD.
        tokens = np.where((tokens < 0) | (tokens > 255), 0xFF, tokens)
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def get_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer that `DataConfig.tokenizer` names.

    Raises:
      UserError: there is none of that name.
    """
    if name != "bytes":
        raise UserError(f"unknown tokenizer {name!r}; there is 'bytes'")
    return ByteTokenizer()
