"""Tokenizers that are files, of kinds that differ in all that can go wrong."""

import dataclasses
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from modo.config import DataConfig
from modo.data import TextStream, get_tokenizer, open_data
from modo.data.tokenizer_file import (
    _GPT2,
    _LLAMA3,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    line_pieces,
)
from modo.errors import UserError
from modo.train_tokenizer import train_bpe
from tests.data import tokenizer_files

pytestmark = pytest.mark.quick

LOSSLESS = ("bytes", "byte_bpe", "sentence_piece", "byte_fallback")
AWKWARD = (
    "",
    "To be, or not to be",
    " leading and trailing \n",
    "\n\n  \t\r\n\r\n\0",
    "naïve — 蔵 🎭👩‍👩‍👧 e\u0301",
    "\ufffd",
    "<|begin_of_text|> <s></s> <unk> [CLS] <|endoftext|> ▁ <0x41>",
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizers")
    write = tokenizer_files.write
    return {
        "bytes": "bytes",
        "byte_bpe": write(directory / "bpe.json", tokenizer_files.byte_bpe()),
        "sentence_piece": write(directory / "sp.model", tokenizer_files.sentence_piece()),
        "byte_fallback": write(directory / "llama.json", tokenizer_files.byte_fallback()),
        "words": write(directory / "words.json", tokenizer_files.words()),
    }


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives(paths, kind, text):
    tokenizer = get_tokenizer(paths[kind])
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert np.array_equal(tokenizer.encode(text.encode()), tokens)
    assert tokenizer.bos_token not in tokens and (tokens < tokenizer.vocab_size).all()
    expected = text.replace("▁", " ") if kind in ("sentence_piece", "byte_fallback") else text
    assert tokenizer.decode(tokens) == expected
    bos = tokenizer.bos_token
    assert tokenizer.decode([bos, *tokens.tolist(), bos]) == expected


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
def test_bytes_that_are_no_text(paths, kind):
    tokenizer = get_tokenizer(paths[kind])
    assert tokenizer.decode(tokenizer.encode(b"")) == ""
    tokens = tokenizer.encode(b"to \xff\xfe be\xe2\x82")
    assert len(tokens) and tokenizer.bos_token not in tokens
    assert np.array_equal(tokenizer.encode("to \udcff\udcfe be\udce2\udc82"), tokens)
    if kind != "words":
        assert tokenizer.decode(tokens) == "to \ufffd\ufffd be\ufffd"


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
def test_numbers_that_are_no_token(paths, kind):
    tokenizer = get_tokenizer(paths[kind])
    tokens = tokenizer.encode("to be").tolist()
    text = tokenizer.decode([*tokens, tokenizer.vocab_size, -1, 2**40, *tokens])
    assert text == "to be\ufffd\ufffd\ufffdto be"


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
def test_threads_and_pickles_give_the_same(paths, kind):
    tokenizer = get_tokenizer(paths[kind])
    text = tokenizer_files.TEXT
    parts = [text[i : i + 3000] for i in range(0, len(text), 3000)] * 3
    expected = [tokenizer.encode(part) for part in parts]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(tokenizer.encode, parts), expected, strict=True):
            assert np.array_equal(got, want)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint and again.vocab_size == tokenizer.vocab_size
    spelled = "a <s><|begin_of_text|> [CLS] b"  # the pickle of the library's own object forgets
    assert np.array_equal(again.encode(spelled), tokenizer.encode(spelled))


def test_special_tokens_in_the_vocabulary_are_spelled_out(paths):
    tokenizer = get_tokenizer(paths["words"])
    assert tokenizer.bos_token == 1 and tokenizer.vocab_size == 6
    # Whole words, so the model itself finds "[CLS]": its five letters are unknown.
    assert tokenizer.encode("to [CLS] be [SEP]").tolist() == [3, *5 * [0], 4, *5 * [0]]


def test_document_starts_that_sentencepiece_finds_in_text_are_not_taken():
    content = tokenizer_files.sentence_piece(bos_id=-1, eos_id=-1, user_defined_symbols=["<s>"])
    own = SentencePieceTokenizer(content)
    assert own.vocab_size == 401 and own.bos_token == 400  # no control token: one more
    content = tokenizer_files.sentence_piece(user_defined_symbols=["<s>"])
    tokenizer = SentencePieceTokenizer(content)
    assert 1 in tokenizer.encode("a<s>") and tokenizer.bos_token == 2  # "</s>"


def test_the_document_start(paths):
    bpe = tokenizer_files.byte_bpe()
    assert HuggingFaceTokenizer(bpe).bos_token == 0
    none = tokenizer_files.changed(bpe, added_tokens=[])
    assert HuggingFaceTokenizer(none).bos_token == HuggingFaceTokenizer(none).vocab_size - 1 == 400
    words = tokenizer_files.words()
    assert HuggingFaceTokenizer(words, "[SEP]").bos_token == 2
    only_unknown = tokenizer_files.words(["[UNK]"])
    assert HuggingFaceTokenizer(only_unknown).bos_token == 6
    with pytest.raises(UserError, match=r"bos_token '<s>' is none .*; it has \[UNK\], \[CLS\], \["):
        get_tokenizer(paths["words"], "<s>")
    odd = tokenizer_files.words(["[UNK]", "[SEP]"])
    with pytest.raises(UserError, match=r"known to start a document; set .*; it has \[SEP\]$"):
        HuggingFaceTokenizer(odd)
    assert get_tokenizer(paths["sentence_piece"]).bos_token == 1
    assert get_tokenizer(paths["sentence_piece"], "</s>").bos_token == 2
    with pytest.raises(UserError, match="'<x>' is none of its special tokens; it has <s>, </s>$"):
        get_tokenizer(paths["sentence_piece"], "<x>")
    with pytest.raises(UserError, match="bos_token is '<s>', but the tokenizer 'bytes'"):
        get_tokenizer("bytes", "<s>")


def test_what_a_file_says_of_padding_truncation_and_dropout_is_off():
    content = tokenizer_files.byte_bpe()
    expected = HuggingFaceTokenizer(content).encode(tokenizer_files.TEXT)
    import tokenizers

    other = tokenizers.Tokenizer.from_str(content.decode())
    other.enable_padding(length=1000)
    other.enable_truncation(5)
    other.model.dropout = 0.5
    assert '"dropout":0.5' in other.to_str().replace(" ", "")
    tokens = HuggingFaceTokenizer(other.to_str().encode()).encode(tokenizer_files.TEXT)
    assert np.array_equal(tokens, expected)


def _pre_tokenizers():
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    plain = ByteLevel(add_prefix_space=False)
    behind = ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt2": plain,
        "digits": Sequence([Digits(individual_digits=True), plain]),
        "split": Sequence([Split(Regex(_GPT2), "isolated"), behind]),
        "llama3": Sequence([Split(Regex(_LLAMA3), "isolated"), behind]),
        "qwen": Sequence([Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), behind]),
    }


@pytest.mark.parametrize("name", ["gpt2", "digits", "split", "llama3", "qwen"])
def test_long_documents_in_pieces_have_the_tokens_of_the_whole(name):
    import tokenizers.trainers
    from tokenizers import normalizers

    rng = np.random.default_rng(0)
    odd = "".join(rng.choice([*"abC1 \n\n\n\t\r.,'/é\u0301\u00a0", "'s", "\r\n", "🎭"], 60_000))
    text = tokenizer_files.TEXT.decode() + odd
    raw = tokenizers.Tokenizer.from_str(train_bpe([], 257))
    raw.pre_tokenizer = _pre_tokenizers()[name]
    if name == "qwen":
        raw.normalizer = normalizers.NFC()
    # White space and line ends have tokens of several characters, or this would show little.
    raw.train_from_iterator([odd], tokenizers.trainers.BpeTrainer(vocab_size=1000))
    tokenizer = HuggingFaceTokenizer(raw.to_str().encode())
    assert tokenizer._lines and len(list(line_pieces(text))) > 3
    whole = raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == whole
    short = list(line_pieces(text, 1))
    assert "".join(short) == text and len(short) > 1000
    pieces = [tokenizer.encode(piece) for piece in short]
    assert np.concatenate(pieces).tolist() == whole


def test_what_might_look_over_a_line_is_encoded_whole():
    import tokenizers
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    def lines(change) -> bool:
        raw = tokenizers.Tokenizer.from_str(tokenizer_files.byte_bpe().decode())
        change(raw)
        return HuggingFaceTokenizer(raw.to_str().encode())._lines

    byte_level = pre_tokenizers.ByteLevel
    other = pre_tokenizers.Split(Regex(r"\s+\S+"), "isolated")
    behind = byte_level(add_prefix_space=False, use_regex=False)
    assert lines(lambda raw: None)
    assert lines(lambda raw: raw.add_tokens(["ZZ"]))
    assert not lines(lambda raw: raw.add_tokens([AddedToken("ZZ", lstrip=True)]))
    assert not lines(lambda raw: raw.add_tokens(["a\nb"]))
    assert not lines(lambda raw: setattr(raw, "normalizer", normalizers.Lowercase()))
    for pre_tokenizer in (
        behind,
        byte_level(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([other, byte_level(add_prefix_space=False)]),
    ):
        assert not lines(lambda raw, p=pre_tokenizer: setattr(raw, "pre_tokenizer", p))
    assert not HuggingFaceTokenizer(tokenizer_files.byte_fallback())._lines


@pytest.mark.parametrize("kind", [*LOSSLESS, "words"])
def test_text_as_it_comes_is_the_text_of_the_whole(paths, kind):
    tokenizer = get_tokenizer(paths[kind])
    rng = np.random.default_rng(0)
    samples = [tokenizer.encode(text).tolist() for text in AWKWARD]
    # What a model might say: mostly bytes that are no characters, and numbers that are no token.
    samples += rng.integers(0, tokenizer.vocab_size + 1, (200, 12)).tolist()
    samples += [tokenizer.encode("🎭🎭").tolist()[:-1]]  # a lone byte after a whole character
    for tokens in samples:
        stream = TextStream(tokenizer)
        pieces = [stream.add([token]) for token in tokens]
        assert "".join([*pieces, stream.add([], last=True)]) == tokenizer.decode(tokens)
    text = "to be 🎭 or"
    stream = TextStream(tokenizer)
    pieces = [stream.add([token]) for token in tokenizer.encode(text)]
    if kind != "words":
        assert pieces[0] or pieces[1]  # it does not wait for the end
        assert all("\ufffd" not in piece for piece in pieces)


def test_token_files_of_two_tokenizers_differ(paths, tmp_path):
    files = {}
    (tmp_path / "a.txt").write_bytes(tokenizer_files.TEXT)
    base = DataConfig(source="text", path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "c"))
    for name in ("byte_bpe", "sentence_piece"):
        for bos in (None, "</s>") if name == "sentence_piece" else (None,):
            config = dataclasses.replace(base, tokenizer=paths[name], bos_token=bos)
            data = open_data(config, 64)
            files[name, bos] = data.validation.file.path
            row = data.validation[0]["tokens"]
            assert row[0] == data.tokenizer.bos_token
    assert len(set(files.values())) == 3
    copy = tokenizer_files.write(tmp_path / "copy.json", tokenizer_files.byte_bpe())
    again = open_data(dataclasses.replace(base, tokenizer=copy), 64)
    assert again.validation.file.path == files["byte_bpe", None]


def test_bad_files_are_named_in_one_line(paths, tmp_path):
    bpe, model = tokenizer_files.byte_bpe(), tokenizer_files.sentence_piece()
    for name, content, message in (
        ("empty.json", b"", "is no file of Hugging Face tokenizers, or a damaged one .0 bytes"),
        ("cut.json", bpe[:-100], ".* or a damaged one"),
        ("list.json", b"[]", "is no file of Hugging Face tokenizers"),
        ("config.json", b'{"model_type": "llama"}', "is no file of Hugging Face tokenizers"),
        ("vocab.json", b'{"a": 1, "model": {"vocab": {}}}', "is no file of Hugging Face"),
        ("latin.json", b"\xff\xfe", "is no file of Hugging Face tokenizers"),
        ("sp.json", model, "is no file of Hugging Face tokenizers"),
        ("empty.model", b"", "is no file of sentencepiece, or a damaged one .0 bytes.: it is emp"),
        ("cut.model", model[: len(model) // 2], "is no file of sentencepiece"),
        ("bpe.model", bpe, "is no file of sentencepiece"),
    ):
        path = tokenizer_files.write(tmp_path / name, content)
        with pytest.raises(UserError, match=f"^tokenizer {path}: {message}") as caught:
            get_tokenizer(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(UserError, match="cannot read the tokenizer .*no.json: No such file"):
        get_tokenizer(str(tmp_path / "no.json"))
    (tmp_path / "directory.model").mkdir()
    with pytest.raises(UserError, match="directory.model: Is a directory"):
        get_tokenizer(str(tmp_path / "directory.model"))


@pytest.mark.parametrize(
    ("package", "kind"), [("tokenizers", "byte_bpe"), ("sentencepiece", "sentence_piece")]
)
def test_a_missing_package_names_the_extra(paths, monkeypatch, package, kind):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}, .*pip install 'modo.bpe.'"):
        get_tokenizer(paths[kind])
