"""Tokenizers that are files: of Hugging Face `tokenizers`, and of sentencepiece."""

import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from modo.errors import UserError

# Special tokens that start a document, the likeliest first; where there are only those that end
# one, they stand between documents just as well.
BOS_NAMES = (
    "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>", "[BOS]", "<|bos|>",
    "<｜begin▁of▁sentence｜>", "[CLS]", "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>",
    "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# Special tokens that are for something else.
OTHER_NAMES = ("<unk>", "[UNK]", "<|unk|>", "<pad>", "[PAD]", "<|pad|>", "<mask>", "[MASK]")

# Regular expressions of pre-tokenizers that take a line's end with the line and never anything
# before a letter that follows it: those of GPT-2, Llama 3 and Qwen.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LINE_REGEXES = (_GPT2, _LLAMA3, _LLAMA3.replace("{1,3}", ""))
_LINE_START = re.compile(r"(?<=\S)\n(?=[A-Za-z])")
PIECE, BATCH = 16_384, 64  # characters of a piece at least, pieces encoded at once


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8 of `text`."""
    # A shell argument that is not UTF-8 reaches Python as surrogates: give back its bytes.
    return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text


def line_pieces(text: str, least: int = PIECE) -> Iterator[str]:
    """`text` in order, cut between a line's end and a letter, into pieces of `least` or more."""
    start = 0
    while (match := _LINE_START.search(text, start + least)) is not None:
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


class HuggingFaceTokenizer:
    """A tokenizer.json of Hugging Face `tokenizers`, of any kind, without what varies in it.

    Truncation, padding and dropout are off, and no special token is added. Threads may share it.

    Args:
      content: of the file.
      bos_name: which of its added tokens starts a document; None: the likeliest special one by
        name, or, where it has none at all, one token after the last.

    Attributes:
      vocab_size: one more than the largest token, the document-start token included.
      bos_token: starts a document; no text encodes to it.
      fingerprint: of content, document-start token and library version.
      content, bos_name: as given.
      file_name: what a run calls its copy.

    Raises:
      UserError: content is not such a file, the package is missing, or there is no such token.
    """

    file_name = "tokenizer.json"

    def __init__(self, content: bytes, bos_name: str | None = None):
        try:
            import tokenizers
        except ImportError:
            raise UserError(missing_package("tokenizers")) from None
        self.content, self.bos_name = content, bos_name
        try:
            values = json.loads(content.decode())
            values |= {"truncation": None, "padding": None}
            values["model"] |= {"dropout": None} if "dropout" in values["model"] else {}
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(values))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(_no_file("Hugging Face tokenizers", content, error)) from None
        # Text that spells a special token is text.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = values.get("added_tokens") or []
        names = [t["content"] for t in added if t.get("special") or t["content"] == bos_name]
        bos = choose_bos(names, bos_name)
        size = max(vocabulary.values(), default=-1) + 1  # numbers may be missing in between
        self.bos_token = size if bos is None else vocabulary[bos]
        self.vocab_size = max(size, self.bos_token + 1)
        unknown = _unknown_token(values["model"])
        self._specials = [
            vocabulary[t["content"]] for t in added if t.get("special") and t["content"] != unknown
        ]
        self._specials.append(self.bos_token)
        self._lines = _cuts_at_lines(values)
        fallback = "ByteFallback" in json.dumps(values.get("decoder"))
        self._no_character = self._tokenizer.token_to_id("<0xFF>") if fallback else None
        self.fingerprint = _fingerprint("tokenizers", tokenizers.__version__, content, self)

    def __reduce__(self):
        return type(self), (self.content, self.bos_name)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`, uint16 or uint32 [T], without the document-start token.

        Bytes that are not UTF-8 are read as U+FFFD.
        """
        text = as_bytes(text).decode("utf-8", errors="replace")
        # In pieces, where that is the same: the library holds about 100 bytes a token.
        pieces = line_pieces(text) if self._lines else iter((text,))
        parts = []
        while batch := list(itertools.islice(pieces, BATCH)):
            # Unlike `encode`, this lets other threads run.
            encoded = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            parts += [np.array(e.ids, token_dtype(self.vocab_size)) for e in encoded]
        return _spell_out(np.concatenate(parts), self._specials, self._spelling)

    def decode(self, tokens) -> str:
        """The text of `tokens` (any integer sequence), without document-start tokens.

        Bytes that are not UTF-8, and numbers that are no token, become U+FFFD.
        """
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        return _decode(tokens, self, decode)

    def decode_settled(self, tokens) -> str:
        """The part of `decode(tokens)` that stays as it is whatever tokens follow."""
        if self._no_character is not None:
            # A byte that ends wrongly spoils all the bytes before it.
            tokens = [*tokens, self._no_character]
        return self.decode(tokens).rstrip("\ufffd")

    def _spelling(self, token: int) -> np.ndarray:
        text = self._tokenizer.id_to_token(token)
        encoded = self._tokenizer.encode_batch_fast(list(text), add_special_tokens=False)
        return np.array([i for e in encoded for i in e.ids], token_dtype(self.vocab_size))


class SentencePieceTokenizer:
    """A *.model of sentencepiece. Threads may share it.

    Args:
      content: of the file.
      bos_name: which of its control tokens starts a document; None: the file's own, or the
        likeliest by name, or, where it has none at all, one token after the last.

    Attributes, encode, decode, decode_settled and errors are those of HuggingFaceTokenizer.
    """

    file_name = "tokenizer.model"

    def __init__(self, content: bytes, bos_name: str | None = None):
        try:
            import sentencepiece
        except ImportError:
            raise UserError(missing_package("sentencepiece")) from None
        self.content, self.bos_name = content, bos_name
        try:
            if not content:
                raise ValueError("it is empty")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(_no_file("sentencepiece", content, error)) from None
        size = self._processor.vocab_size()
        # Text never becomes a control token, whatever it spells.
        control = [i for i in range(size) if self._processor.is_control(i)]
        names = {self._processor.id_to_piece(i): i for i in control}
        if bos_name is None and self._processor.bos_id() >= 0:
            self.bos_token = self._processor.bos_id()
        else:
            bos = choose_bos(list(names), bos_name)
            self.bos_token = size if bos is None else names[bos]
        self.vocab_size = max(size, self.bos_token + 1)
        self.fingerprint = _fingerprint("sentencepiece", sentencepiece.__version__, content, self)

    def __reduce__(self):
        return type(self), (self.content, self.bos_name)

    def encode(self, text: str | bytes) -> np.ndarray:
        text = as_bytes(text).decode("utf-8", errors="replace")
        return np.array(self._processor.encode(text), token_dtype(self.vocab_size))

    def decode(self, tokens) -> str:
        return _decode(tokens, self, self._processor.decode)

    def decode_settled(self, tokens) -> str:
        return self.decode(tokens).rstrip("\ufffd")


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file so that a reader, or a kill, finds the old one or the new one whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def choose_bos(names: Sequence[str], wanted: str | None) -> str | None:
    """Which special token of `names` starts a document; None: there is none to choose from.

    Raises:
      UserError: `wanted` is not among them, or none is known to be one.
    """
    if wanted is None:
        found = [name for name in BOS_NAMES if name in names]
        names = [name for name in names if name not in OTHER_NAMES]
        if found or not names:
            return found[0] if found else None
        problem = "none of its special tokens is known to start a document; set data.bos_token"
    elif wanted in names:
        return wanted
    else:
        problem = f"data.bos_token {wanted!r} is none of its special tokens"
    few = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    raise UserError(f"{problem}; it has {few or 'none'}")


def missing_package(package: str) -> str:
    """What to say where `package` cannot be imported."""
    return f"needs the package {package}, which is not installed: pip install 'modo[bpe]'"


def _no_file(kind: str, content: bytes, error: Exception) -> str:
    why = " ".join(str(error).split()) or type(error).__name__
    return f"is no file of {kind}, or a damaged one ({len(content)} bytes): {why[:200]}"


def _fingerprint(library: str, version: str, content: bytes, tokenizer) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return f"{library} {version} {digest} {tokenizer.bos_token}"


def _unknown_token(model: dict) -> str | None:
    """What stands for text that the model has no token for."""
    if model.get("unk_id") is not None:
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _cuts_at_lines(values: dict) -> bool:
    """Whether pieces of `line_pieces` certainly have the tokens of the whole text.

    They do where a pre-tokenizer always cuts between a line's end and a letter, and nothing that
    comes before it looks beyond.
    """
    if values.get("normalizer") not in (None, {"type": "NFC"}):
        return False
    added = [token for token in values.get("added_tokens") or [] if not token.get("special")]
    if any(token.get("lstrip") or "\n" in token["content"] for token in added):
        return False
    first = values.get("pre_tokenizer") or {}
    cuts = False
    for step in first["pretokenizers"] if first.get("type") == "Sequence" else [first]:
        kind = step.get("type")
        if kind == "ByteLevel" and not step["add_prefix_space"]:
            cuts |= step.get("use_regex", True)
        elif kind == "Split" and (step["behavior"], step["invert"]) == ("Isolated", False):
            if step["pattern"].get("Regex") not in _LINE_REGEXES:
                return False
            cuts = True
        elif kind != "Digits":
            return False
    return cuts


def _spell_out(
    tokens_T: np.ndarray, specials: Sequence[int], spelling: Callable[[int], np.ndarray]
) -> np.ndarray:
    """The tokens with special ones, that a text spelled, as those of their single characters."""
    at = np.flatnonzero(np.isin(tokens_T, specials))
    if not len(at):
        return tokens_T
    spelled = {token: spelling(token) for token in np.unique(tokens_T[at]).tolist()}
    spelled = {token: s[~np.isin(s, specials)] for token, s in spelled.items()}
    first, *rest = np.split(tokens_T, at)
    parts = [first]
    for part in rest:
        parts += [spelled[int(part[0])], part[1:]]
    return np.concatenate(parts)


def _decode(tokens, tokenizer, decode: Callable[[list[int]], str]) -> str:
    """`decode` of what a tokenizer's library has tokens for, U+FFFD for each other number."""
    tokens = np.asarray(tokens, np.int64).reshape(-1)
    tokens = tokens[tokens != tokenizer.bos_token]
    at = np.flatnonzero((tokens < 0) | (tokens >= tokenizer.vocab_size))
    first, *rest = np.split(tokens, at)
    return "\ufffd".join([decode(first.tolist()), *(decode(part[1:].tolist()) for part in rest)])
