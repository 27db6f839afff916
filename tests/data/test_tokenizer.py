import numpy as np
import pytest

from modo.data import get_tokenizer
from modo.errors import UserError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("text", ["", "To be, or not", "naïve — 蔵 🎭\r\n\0"])
def test_text_survives_a_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16 and tokens.tolist() == list(text.encode())
    assert np.array_equal(tokenizer.encode(text.encode()), tokens)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([256, *tokens.tolist(), 256]) == text


def test_every_byte_has_a_token_and_the_document_start_is_none_of_them():
    tokenizer = get_tokenizer("bytes")
    tokens = tokenizer.encode(bytes(range(256)))
    assert tokens.tolist() == list(range(256))
    assert tokenizer.bos_token == 256 and tokenizer.vocab_size == 257


def test_what_is_no_text_decodes_to_the_replacement_character():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode([0xFF, 65, 0xE2, 0x82]) == "\ufffdA\ufffd"
    assert tokenizer.decode(np.array([65, 257, 100_000, -1])) == "A\ufffd\ufffd\ufffd"
    # A shell argument that is not UTF-8, as Python hands it over.
    assert tokenizer.encode("caf\udce9").tolist() == [99, 97, 102, 0xE9]


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="unknown tokenizer 'gpt2'; there is 'bytes'"):
        get_tokenizer("gpt2")
