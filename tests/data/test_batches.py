import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from modo.config import DataConfig
from modo.data import eval_batches, open_data, train_batches
from modo.data.rows import StreamRows
from modo.data.source import read_plays
from modo.data.token_file import open_token_file
from modo.data.tokenizer import ByteTokenizer
from modo.errors import UserError
from tests.data.splits import split_of

NAMES = ["tokens_BT", "targets_BT", "weights_BT", "positions_BT", "segment_ids_BT"]


def take(number, rows, **arguments):
    batches = train_batches(rows, **{"seed": 0, "batch_size": 8, **arguments})
    taken = list(islice(batches, number))
    batches.close()
    return taken


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert list(a) == list(b) == NAMES
        assert all(np.array_equal(a[name], b[name]) for name in NAMES)


def joined(shares):
    """Global batches from each process's batches."""
    return [
        {name: np.concatenate([batch[name] for batch in step]) for name in NAMES}
        for step in zip(*shares, strict=True)
    ]


@pytest.fixture
def few_rows(tmp_path):
    """13 rows of 8 distinct tokens: an epoch ends inside a batch."""
    file = open_token_file(split_of([bytes(range(8 * 13))]), ByteTokenizer(), str(tmp_path))
    rows = StreamRows(file, 8, mask_documents=True, keep_remainder=False)
    assert len(rows) == 13
    return rows


@pytest.fixture(params=["stream", "documents"])
def rows(request, cache_dir):
    return open_data(DataConfig(cache_dir=cache_dir, packing=request.param), 256).train


@pytest.mark.quick
def test_a_batch_has_constant_names_shapes_and_types(rows):
    for batch in take(3, rows):
        assert list(batch) == NAMES
        for name, array in batch.items():
            assert array.shape == (8, 256)
            assert array.dtype == (np.float32 if name == "weights_BT" else np.int32)


@pytest.mark.quick
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_batches(few_rows, processes):
    wanted = take(10, few_rows)
    shares = [
        take(10, few_rows, process_index=p, process_count=processes) for p in range(processes)
    ]
    assert shares[0][0]["tokens_BT"].shape == (8 // processes, 8)
    assert_same(joined(shares), wanted)


@pytest.mark.quick
@pytest.mark.parametrize("start", [0, 1, 2, 3, 7, 100])
def test_a_run_goes_on_from_any_step_on_any_number_of_processes(few_rows, start):
    wanted = take(start + 4, few_rows)[start:]
    assert_same(take(4, few_rows, start_step=start), wanted)
    shares = [
        take(4, few_rows, start_step=start, process_index=p, process_count=2) for p in range(2)
    ]
    assert_same(joined(shares), wanted)


def test_a_far_step_is_reached_at_once(few_rows):
    (batch,) = take(1, few_rows, start_step=10**9)
    assert batch["tokens_BT"].shape == (8, 8)


@pytest.mark.parametrize("prefetch", [0, 1, 3, 50])
def test_prefetching_changes_nothing(rows, prefetch):
    assert_same(take(20, rows, prefetch=prefetch), take(20, rows))


@pytest.mark.quick
@pytest.mark.parametrize("batch_size", [1, 4, 8, 32])
def test_every_row_comes_once_an_epoch_in_a_new_order(few_rows, batch_size):
    batches = take(-(-4 * 13 // batch_size), few_rows, batch_size=batch_size)
    first_T = np.concatenate([batch["tokens_BT"][:, 0] for batch in batches])[: 4 * 13]
    epochs = first_T.reshape(4, 13)
    wanted = sorted(few_rows[np.arange(13)]["tokens"][:, 0])
    assert all(sorted(epoch) == wanted for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4


def test_the_order_depends_on_the_seed(few_rows):
    def epochs(seed):
        taken = take(6 * 13, few_rows, batch_size=1, seed=seed)
        order = np.array([batch["tokens_BT"][0, 0] for batch in taken])
        return {tuple(epoch) for epoch in order.reshape(6, 13).tolist()}

    # No order in common: epochs of one seed are not epochs of the next, shifted.
    assert len(epochs(0) | epochs(1) | epochs(2)) == 18
    assert_same(take(5, few_rows, seed=3), take(5, few_rows, seed=3))


def test_one_row_is_enough_to_train_on(tmp_path):
    file = open_token_file(split_of([b"12345678"]), ByteTokenizer(), str(tmp_path))
    rows = StreamRows(file, 8, mask_documents=True, keep_remainder=False)
    (batch,) = take(1, rows, batch_size=3)
    assert (batch["targets_BT"] == np.frombuffer(b"12345678", np.uint8)).all()


@pytest.mark.quick
@pytest.mark.parametrize("length", [100, 256, 4096, 96_240, 200_000])
def test_evaluation_counts_every_held_out_byte_once(shakespeare, cache_dir, length):
    text = open_data(DataConfig(cache_dir=cache_dir), length)
    counted = []
    for batch in eval_batches(text.validation, batch_size=16):
        assert all(array.shape == (16, length) for array in batch.values())
        counted.append(batch["targets_BT"][batch["weights_BT"] == 1])
    counted = np.concatenate(counted)
    assert len(counted) == 96_240
    assert counted.astype(np.uint8).tobytes() == read_plays()["the-tempest"]


@pytest.mark.quick
@pytest.mark.parametrize("batch_size", [1, 3, 16, 1000])
def test_evaluation_does_not_depend_on_batch_size_or_processes(shakespeare, batch_size):
    rows = shakespeare.validation
    whole = rows[np.arange(len(rows))]
    for processes in (1, 2, 4):
        size = batch_size * processes
        shares = [
            list(eval_batches(rows, batch_size=size, process_index=p, process_count=processes))
            for p in range(processes)
        ]
        batches = joined(shares)
        assert len(batches) == -(-len(rows) // size)
        for name in NAMES:
            array = np.concatenate([batch[name] for batch in batches])
            assert array.dtype == batches[0][name].dtype
            assert np.array_equal(array[: len(rows)], whole[name.removesuffix("_BT")])
            assert not array[len(rows) :].any()


def test_evaluation_counts_the_end_of_every_document_but_the_last(tmp_path):
    held_out = [b"one", b"two and", b"three"]
    (tmp_path / "train.txt").write_bytes(b"training text")
    for i, text in enumerate(held_out):
        (tmp_path / f"held-{i}.txt").write_bytes(text)
    for packing in ("stream", "documents"):
        config = DataConfig(
            source="text",
            path=str(tmp_path / "train.txt"),
            validation_path=str(tmp_path / "held-*.txt"),
            packing=packing,
            cache_dir=str(tmp_path / "cache"),
        )
        (batch,) = eval_batches(open_data(config, 4).validation, batch_size=5)
        counted = batch["targets_BT"][batch["weights_BT"] == 1]
        assert counted.tolist() == [*b"one", 256, *b"two and", 256, *b"three"]


def test_packed_training_masks_documents_whatever_the_config_says(cache_dir):
    config = DataConfig(cache_dir=cache_dir, packing="documents", mask_documents=False)
    assert open_data(config, 256).validation.mask_documents


@pytest.mark.quick
def test_a_batch_that_processes_cannot_share_is_refused(few_rows):
    with pytest.raises(UserError) as error:
        train_batches(few_rows, seed=0, batch_size=6, process_index=1, process_count=4)
    assert str(error.value) == (
        "train.batch_size 6 cannot be split over 4 processes; make it a multiple of 4"
    )
    with pytest.raises(UserError, match="^train.eval_batch_size 6 cannot be split over 4 proc"):
        eval_batches(few_rows, batch_size=6, process_count=4)


def test_an_iterator_left_open_ends_silently_and_no_backend_starts(cache_dir):
    program = """if True:
        import sys
        from modo.config import DataConfig
        from modo.data import open_data, train_batches
        data = open_data(DataConfig(cache_dir=sys.argv[1]), 256)
        left_open = train_batches(data.train, seed=0, batch_size=8, prefetch=50)
        print(next(left_open)["tokens_BT"].shape)
        import jax
        assert not jax._src.xla_bridge.backends_are_initialized()
        assert "tensorflow" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", program, cache_dir], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(8, 256)\n", "")
