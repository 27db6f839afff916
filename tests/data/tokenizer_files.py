"""Tokenizer files trained on the spot, with vocabularies of a few hundred tokens."""

import io
import json
import pathlib

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from modo.data.source import read_plays
from modo.train_tokenizer import train_bpe

TEXT = read_plays()["the-tempest"][:30_000]


def byte_bpe() -> bytes:
    return train_bpe([TEXT], 400).encode()


def sentence_piece(**options) -> bytes:
    """A unigram model that loses nothing: bytes for characters it does not know."""
    model = io.BytesIO()
    options = {
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    } | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.decode().splitlines()),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


def byte_fallback() -> bytes:
    """As Llama 2 in `tokenizers`: BPE over characters, bytes for the rest, spaces as "▁"."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghilnorstu", "▁a"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


def words(specials=("[UNK]", "[CLS]", "[SEP]")) -> bytes:
    """Whole words in the vocabulary, its special tokens among them."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "to", "be", "or"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer.to_str().encode()


def changed(content: bytes, **fields) -> bytes:
    """A tokenizer.json with other top-level fields."""
    return json.dumps(json.loads(content) | fields).encode()


def write(path: pathlib.Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)
