"""A split as one flat file of tokens, made once and kept.

KEY.tokens holds, for every document, the document-start token and then its tokens, as uint16
(uint32 if the vocabulary needs it) in native byte order. KEY.documents.npy holds int64 offsets:
where each document starts, then the number of tokens. KEY.json holds a digest of the tokens and
the bytes of text they came from. KEY is a hash of what identifies the text, the tokenizer and the
format. KEY.parts/ holds the shards done so far while they are made, or after a kill. Deleting any
of these is safe when no run is using them.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from modo.data.split import Shard, Split
from modo.data.tokenizer import Tokenizer
from modo.errors import UserError

FORMAT = f"modo tokens 2 {sys.byteorder}"
_COPY_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """A tokenised split, read through a memory map that is not pickled.

    Attributes:
      path: the file of tokens.
      dtype: "uint16" or "uint32".
      bos_token: the token that starts every document.
      offsets: int64 [documents + 1], where each document starts, then the number of tokens.
      num_bytes: of the text, UTF-8.
      digest: of the tokens, the same on every machine.
    """

    path: str
    dtype: str
    bos_token: int
    offsets: np.ndarray
    num_bytes: int
    digest: str

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
        return TokenFile, tuple(getattr(self, f.name) for f in dataclasses.fields(self))


def default_cache_dir() -> str:
    """$XDG_CACHE_HOME/modo, or ~/.cache/modo."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(base), "modo")


def open_token_file(split: Split, tokenizer: Tokenizer, cache_dir: str | None = None) -> TokenFile:
    """The token file of `split`, made first if `cache_dir` does not hold it whole.

    Shards are tokenised at the same time, as many as there are cores, and those that were done
    before an interruption are not done again. Other processes that want the same file wait for it.

    Args:
      split: the text; read only when the file has to be made.
      tokenizer: turns each document into tokens, in several threads at once.
      cache_dir: None: `default_cache_dir()`.

    Raises:
      UserError: `cache_dir` cannot be written to, the text changed meanwhile, or those of `split`.
    """
    cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    identities = [shard.identify() for shard in split.shards]
    name = json.dumps([FORMAT, tokenizer.fingerprint, identities])
    stem = os.path.join(cache_dir, hashlib.blake2b(name.encode(), digest_size=16).hexdigest())
    found = _open(stem, dtype, tokenizer.bos_token)
    if found is not None:
        return found
    try:
        with _making(stem + ".parts") as parts:
            found = _open(stem, dtype, tokenizer.bos_token)  # made while we waited
            try:
                if found is None:
                    _tokenise(split, identities, tokenizer, dtype, parts)
                    _join(len(identities), dtype, parts, stem, split.when_empty)
            except UserError:  # the text has to change, and is then another
                shutil.rmtree(parts)
                raise
            shutil.rmtree(parts)
    except OSError as error:
        raise UserError(f"cannot write to data.cache_dir {cache_dir}: {error.strerror}") from None
    found = found or _open(stem, dtype, tokenizer.bos_token)
    if found is None:
        raise UserError(f"{stem}.tokens changed while it was written; run again")
    return found


def _open(stem: str, dtype: str, bos_token: int) -> TokenFile | None:
    """The token file, or None where it is missing, truncated or visibly damaged."""
    try:
        offsets = np.load(stem + ".documents.npy")
        size = os.path.getsize(stem + ".tokens")
        with open(stem + ".json", encoding="utf-8") as file:
            about = json.load(file)
        num_bytes, digest = int(about["bytes"]), str(about["digest"])
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2:
        return None
    if offsets[0] != 0 or np.any(np.diff(offsets) < 1):
        return None
    if size != offsets[-1] * np.dtype(dtype).itemsize:
        return None
    file = TokenFile(stem + ".tokens", dtype, bos_token, offsets, num_bytes, digest)
    # Every document starts with its token: a file of zeros, after a power cut, does not.
    return file if np.all(file.tokens[offsets[:-1]] == bos_token) else None


@contextlib.contextmanager
def _making(parts: str) -> Iterator[str]:
    """The directory `parts`, for this process alone; waits until no other has it."""
    path = os.path.join(parts, "lock")
    with contextlib.ExitStack() as stack:
        while True:
            os.makedirs(parts, exist_ok=True)
            try:
                file = stack.enter_context(open(path, "a"))
                fcntl.flock(file, fcntl.LOCK_EX)
                # Who had it before may have removed the directory with the lock.
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    break
            except FileNotFoundError:
                continue
        yield parts


def _tokenise(split: Split, identities: list[str], tokenizer, dtype: str, parts: str) -> None:
    """Makes the part of every shard that has none yet."""
    stems = [os.path.join(parts, f"{number:05}") for number in range(len(split.shards))]
    work = list(zip(split.shards, identities, stems, strict=True))
    todo = [item for item in work if not os.path.exists(item[2] + ".documents.npy")]
    total = sum(shard.size for shard in split.shards)
    left = sum(shard.size for shard, _, _ in todo)
    bar = tqdm(
        desc="tokenising", total=total, initial=total - left, unit="B", unit_scale=True,
        dynamic_ncols=True, delay=1, disable=None,
    )  # fmt: skip

    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [
            pool.submit(_write_part, shard, identity, tokenizer, dtype, stem, bar.update)
            for shard, identity, stem in todo
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_part(
    shard: Shard, identity: str, tokenizer, dtype: str, stem: str, progress: Callable[[int], None]
) -> None:
    bos = np.array([tokenizer.bos_token], dtype)
    sizes = []  # of each document, in tokens and bytes

    def write_tokens(file: BinaryIO) -> None:
        for text in shard.read():
            tokens = tokenizer.encode(text).astype(dtype, copy=False)
            file.write(bos.data)
            file.write(tokens.data)
            sizes.append((1 + len(tokens), len(text)))
            progress(len(text))
        if shard.identify() != identity:
            raise UserError("the text files changed while they were read; run again")

    _write_atomically(stem + ".tokens", write_tokens)
    sizes_2D = np.array(sizes, np.int64).reshape(-1, 2).T
    # Last, because it says that the part is done.
    _write_atomically(stem + ".documents.npy", lambda file: np.save(file, sizes_2D))


def _join(number: int, dtype: str, parts: str, stem: str, when_empty: str) -> None:
    """One file of all parts, in order."""
    stems = [os.path.join(parts, f"{part:05}") for part in range(number)]
    sizes_2D = np.concatenate([np.load(part + ".documents.npy") for part in stems], axis=1)
    if not sizes_2D.shape[1]:
        raise UserError(when_empty)
    hasher = hashlib.blake2b(dtype.encode(), digest_size=16)

    def write_tokens(file: BinaryIO) -> None:
        for part in stems:
            with open(part + ".tokens", "rb") as source:
                while piece := source.read(_COPY_BYTES):
                    hasher.update(piece)
                    file.write(piece)

    _write_atomically(stem + ".tokens", write_tokens)
    about = {"digest": hasher.hexdigest(), "bytes": int(sizes_2D[1].sum())}
    _write_atomically(stem + ".json", lambda file: file.write(json.dumps(about).encode()))
    offsets = np.concatenate([[0], np.cumsum(sizes_2D[0])])
    # Last, because it says how long the tokens must be.
    _write_atomically(stem + ".documents.npy", lambda file: np.save(file, offsets))


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
