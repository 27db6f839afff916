"""A split as one flat file of tokens, made once and kept.

KEY.tokens holds, for every document, the document-start token and then its tokens, as uint16
(uint32 if the vocabulary needs it) in native byte order. KEY.documents.npy holds int64 offsets:
where each document starts, then the number of tokens. KEY is a hash of the text, the tokenizer
and the format. Deleting any of these files is safe when no run is using them.
"""

import dataclasses
import functools
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np

from modo.data.tokenizer import Tokenizer
from modo.errors import UserError

FORMAT = f"modo tokens 1 {sys.byteorder}"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """A tokenised split, read through a memory map that is not pickled.

    Attributes:
      path: the file of tokens.
      dtype: "uint16" or "uint32".
      bos_token: the token that starts every document.
      offsets: int64 [documents + 1], where each document starts, then the number of tokens.
    """

    path: str
    dtype: str
    bos_token: int
    offsets: np.ndarray

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, a read-only array."""
        # A plain array over the map: indexing the np.memmap subclass costs several times more.
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self):
        return TokenFile, (self.path, self.dtype, self.bos_token, self.offsets)


def default_cache_dir() -> str:
    """$XDG_CACHE_HOME/modo, or ~/.cache/modo."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(base), "modo")


def open_token_file(
    documents: Iterable[bytes], tokenizer: Tokenizer, cache_dir: str | None = None
) -> TokenFile:
    """The token file of `documents`, made first if `cache_dir` does not hold it whole.

    Any number of processes may do this at once. An interrupted one leaves at most a *.tmp file.

    Args:
      documents: UTF-8 texts; iterated over once, or twice when the file has to be made.
      tokenizer: turns each into tokens.
      cache_dir: None: `default_cache_dir()`.

    Raises:
      UserError: `cache_dir` cannot be written to, or the documents changed meanwhile.
    """
    cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    hasher = _new_hasher(tokenizer)
    for text in documents:
        _hash_document(hasher, text)
    stem = os.path.join(cache_dir, hasher.hexdigest())
    found = _open(stem, dtype, tokenizer.bos_token)
    if found is not None:
        return found
    try:
        os.makedirs(cache_dir, exist_ok=True)
        _write(stem, documents, tokenizer, dtype)
    except OSError as error:
        raise UserError(f"cannot write to data.cache_dir {cache_dir}: {error.strerror}") from None
    found = _open(stem, dtype, tokenizer.bos_token)
    if found is None:
        raise UserError(f"{stem}.tokens changed while it was written; run again")
    return found


def _new_hasher(tokenizer: Tokenizer):
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(f"{FORMAT} {tokenizer.fingerprint}".encode())
    return hasher


def _hash_document(hasher, text: bytes) -> None:
    hasher.update(len(text).to_bytes(8, "little"))  # or two documents would hash like one
    hasher.update(text)


def _open(stem: str, dtype: str, bos_token: int) -> TokenFile | None:
    """The token file, or None where it is missing, truncated or visibly damaged."""
    try:
        offsets = np.load(stem + ".documents.npy")
        size = os.path.getsize(stem + ".tokens")
    except (OSError, ValueError, EOFError):
        return None
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2:
        return None
    if offsets[0] != 0 or np.any(np.diff(offsets) < 1):
        return None
    if size != offsets[-1] * np.dtype(dtype).itemsize:
        return None
    file = TokenFile(stem + ".tokens", dtype, bos_token, offsets)
    # Every document starts with its token: a file of zeros, after a power cut, does not.
    return file if np.all(file.tokens[offsets[:-1]] == bos_token) else None


def _write(stem: str, documents: Iterable[bytes], tokenizer: Tokenizer, dtype: str) -> None:
    bos = np.array([tokenizer.bos_token], dtype)
    offsets = [0]
    hasher = _new_hasher(tokenizer)

    def write_tokens(file: BinaryIO) -> None:
        for text in documents:
            _hash_document(hasher, text)
            tokens = tokenizer.encode(text).astype(dtype, copy=False)
            file.write(bos.data)
            file.write(tokens.data)
            offsets.append(offsets[-1] + 1 + len(tokens))
        if hasher.hexdigest() != os.path.basename(stem):
            raise UserError("the text files changed while they were read; run again")

    _write_atomically(stem + ".tokens", write_tokens)
    # Last, because it says how long the tokens must be.
    _write_atomically(stem + ".documents.npy", lambda f: np.save(f, np.array(offsets, np.int64)))


def _write_atomically(path: str, write: Callable[[BinaryIO], None]) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
