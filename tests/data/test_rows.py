import pickle

import numpy as np
import pytest

from modo.data import ByteTokenizer
from modo.data.rows import StreamRows, pack, plan_rows, train_rows
from modo.data.token_file import TokenFile, open_token_file
from tests.data.splits import split_of

NAMES = ["tokens", "targets", "weights", "positions", "segment_ids"]


def numbered_file(path, sizes, bos=None):
    """A file whose token at place i is i (from 1 on), but `bos` at document starts if given."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32)
    if bos is not None:
        tokens[offsets[:-1]] = bos
    tokens.tofile(path)
    return TokenFile(str(path), "uint32", 0 if bos is None else bos, offsets, 0, "")


def all_rows(rows):
    batch = rows[np.arange(len(rows))]
    assert list(batch) == NAMES
    for name, array in batch.items():
        assert array.shape == (len(rows), rows.length)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
    return batch


def assert_padding_is_empty(batch):
    padding = batch["segment_ids"] == 0
    assert np.array_equal(batch["weights"] == 0, padding)
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    for array in batch.values():
        assert not array[padding].any()


@pytest.mark.quick
@pytest.mark.parametrize("length", [1, 3, 8, 17, 100])
@pytest.mark.parametrize("seed", range(5))
def test_stream_rows_against_a_loop_over_documents(tmp_path, seed, length):
    sizes = np.random.default_rng(seed).integers(1, 30, 40)
    file = numbered_file(tmp_path / "f", sizes, bos=0)
    document = np.repeat(np.arange(40), sizes)
    last = len(document) - 1
    rows = StreamRows(file, length, mask_documents=True, keep_remainder=True)
    batch = all_rows(rows)
    assert_padding_is_empty(batch)
    for b in range(len(rows)):
        for t in range(length):
            place = b * length + t
            got = [int(batch[name][b, t]) for name in NAMES]
            if place >= last:
                assert got == [0, 0, 0, 0, 0]
                continue
            begin = max(file.offsets[document[place]], b * length)
            segment = document[place] - document[b * length] + 1
            target = file.tokens[place + 1]
            assert got == [file.tokens[place], target, 1, place - begin, segment]
    unmasked = all_rows(StreamRows(file, length, mask_documents=False, keep_remainder=True))
    assert_padding_is_empty(unmasked)
    for name in ("tokens", "targets", "weights"):
        assert np.array_equal(unmasked[name], batch[name])
    whole = unmasked["weights"].all(axis=1)
    assert (unmasked["positions"][whole] == np.arange(length)).all()
    assert (unmasked["segment_ids"][whole] == 1).all()


@pytest.mark.quick
def test_training_drops_the_remainder_and_evaluation_keeps_it(tmp_path):
    for tokens, whole, padded in [(2, 0, 1), (16, 0, 1), (17, 1, 1), (18, 1, 2), (33, 2, 2)]:
        file = numbered_file(tmp_path / "f", [tokens])
        assert len(StreamRows(file, 16, True, keep_remainder=False)) == whole
        rows = StreamRows(file, 16, True, keep_remainder=True)
        assert len(rows) == padded
        assert rows[np.arange(padded)]["weights"].sum() == tokens - 1


def check_packing(rows, file):
    batch = all_rows(rows)
    assert_padding_is_empty(batch)
    end = file.num_tokens
    document_ends = set(file.offsets[1:].tolist())
    real = batch["segment_ids"] > 0
    # Every token is read once, and every target is the token that follows it.
    assert np.array_equal(np.sort(batch["tokens"][real]), np.arange(1, end + 1))
    following = np.where(batch["tokens"] == end, file.bos_token, batch["tokens"] + 1)
    assert np.array_equal(batch["targets"][real], following[real])
    for b in range(len(rows)):
        segments = batch["segment_ids"][b]
        used = int((segments > 0).sum())
        assert (segments[:used] > 0).all()  # padding comes last
        assert np.isin(np.diff(segments[:used]), [0, 1]).all() and segments[0] == 1
        for s in range(1, segments.max() + 1):
            places = batch["tokens"][b, segments == s] - 1
            n = len(places)
            assert np.array_equal(places, np.arange(places[0], places[0] + n))
            assert np.array_equal(batch["positions"][b, segments == s], np.arange(n))
            # Of one document, from its start or a cut, to its end or a cut.
            document = np.searchsorted(file.offsets, places[0], "right") - 1
            assert places[-1] < file.offsets[document + 1]
            assert (places[0] - file.offsets[document]) % rows.length == 0
            assert n == rows.length or places[-1] + 1 in document_ends
    return batch


@pytest.mark.parametrize("seed", range(30))
def test_packed_rows_hold_every_document_once(tmp_path, seed):
    rng = np.random.default_rng(seed)
    length = int(rng.choice([1, 2, 7, 16, 64]))
    sizes = rng.integers(1, int(rng.choice([2, 3, length + 2, 3 * length + 2])), 60)
    file = numbered_file(tmp_path / "f", sizes)
    check_packing(pack(file, length), file)


@pytest.mark.quick
@pytest.mark.parametrize("sizes", [[1], [2], [1, 1, 1], [8], [9], [16], [7, 1], [8, 8, 1], [17, 3]])
def test_packing_at_the_edges(tmp_path, sizes):
    file = numbered_file(tmp_path / "f", sizes)
    rows = pack(file, 8)
    check_packing(rows, file)
    assert len(rows) == -(-sum(sizes) // 8)


def test_packing_text_ends_each_document_with_its_end(tmp_path):
    file = open_token_file(split_of([b"ab", b"", b"cde"]), ByteTokenizer(), str(tmp_path))
    row = pack(file, 12)[0]
    assert row["tokens"].tolist() == [256, *b"cde", 256, *b"ab", 256, 0, 0, 0, 0]
    assert row["targets"].tolist() == [*b"cde", 256, *b"ab", 256, 256, 0, 0, 0, 0]
    assert row["weights"].tolist() == [1] * 8 + [0] * 4
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 0, 0, 0, 0]


def first_fit_decreasing(lengths, capacity):
    rows = []
    for piece in np.argsort(-lengths, kind="stable"):
        for row in rows:
            if lengths[row].sum() + lengths[piece] <= capacity:
                row.append(piece)
                break
        else:
            rows.append([piece])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_first_fit_decreasing(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 60))
    lengths = rng.integers(1, capacity + 1, 200)
    order, first_piece = plan_rows(lengths, capacity)
    assert sorted(order.tolist()) == list(range(200))
    plan = [sorted(lengths[row].tolist()) for row in np.split(order, first_piece[1:-1])]
    wanted = [sorted(lengths[row].tolist()) for row in first_fit_decreasing(lengths, capacity)]
    assert plan == wanted
    again = plan_rows(lengths, capacity)
    assert np.array_equal(again[0], order) and np.array_equal(again[1], first_piece)


def test_packing_wastes_little_on_realistic_lengths():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).astype(np.int64) + 1
    for capacity in (512, 2048):
        pieces = lengths % capacity  # a document's last piece: the others fill rows
        pieces = pieces[pieces > 0]
        _, first_piece = plan_rows(pieces, capacity)
        assert pieces.sum() / ((len(first_piece) - 1) * capacity) > 0.97


@pytest.mark.quick
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_index_like_arrays(shakespeare, packing):
    rows = train_rows(shakespeare.train.file, 256, packing=packing, mask_documents=True)
    batch = rows[np.array([[5, 0], [len(rows) - 1, 5]])]
    for name, array in batch.items():
        assert array.shape == (2, 2, 256)
        for place, number in [((0, 0), 5), ((0, 1), 0), ((1, 0), len(rows) - 1), ((1, 1), 5)]:
            assert np.array_equal(array[place], rows[number][name])
        assert rows[np.zeros(0, int)][name].shape == (0, 256)
    for bad in (-1, len(rows), [0, len(rows)]):
        with pytest.raises(IndexError, match=f"of {len(rows)}"):
            rows[bad]
    copy = pickle.loads(pickle.dumps(rows))
    assert all(np.array_equal(copy[7][name], rows[7][name]) for name in NAMES)


def test_stream_rows_cover_the_training_text(shakespeare):
    rows = shakespeare.train
    batch = all_rows(rows)
    used = len(rows) * 256
    assert rows.file.num_tokens - 256 - 1 < used < rows.file.num_tokens
    assert np.array_equal(batch["tokens"].reshape(-1), rows.file.tokens[:used])
    assert np.array_equal(batch["targets"].reshape(-1), rows.file.tokens[1 : used + 1])
    # One document start a play, and a row that holds one has a second segment.
    starts = (batch["tokens"] == 256).sum()
    assert starts == 37
    assert (batch["segment_ids"].max(axis=1) > 1).sum() == (batch["tokens"][:, 1:] == 256).any(
        1
    ).sum()
