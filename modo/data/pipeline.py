"""From a DataConfig to batches: a batch is a function of the seed and the step alone."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from modo.config import DataConfig
from modo.data.rows import JoinedRows, PackedRows, StreamRows, train_rows
from modo.data.source import open_corpus
from modo.data.token_file import open_token_file
from modo.data.tokenizer import Tokenizer, get_tokenizer
from modo.errors import UserError

Rows = StreamRows | PackedRows | JoinedRows
Batch = dict[str, np.ndarray]
# Of one read: about so many tokens, and at most so many batches.
_READ_TOKENS, _READ_BATCHES = 1 << 14, 16


@dataclasses.dataclass(frozen=True)
class Data:
    """An opened corpus, or a mixture.

    Attributes:
      tokenizer: what made the tokens.
      train: rows to train on.
      validation: consecutive windows over the whole held-out split, the last one padded.
      weights: of the parts of `train` in a mixture; None: one corpus.
      digests: of the tokens of each split, the same on every machine.
    """

    tokenizer: Tokenizer
    train: Rows
    validation: Rows
    weights: tuple[float, ...] | None
    digests: dict[str, str]


def open_data(config: DataConfig, length: int) -> Data:
    """Opens both splits, tokenising them if that was not done before.

    Args:
      config: where text comes from and how it is cut.
      length: tokens a row, `TrainConfig.length`.

    Raises:
      UserError: text is missing, unreadable or too short, or the cache cannot be written to.
    """
    tokenizer = get_tokenizer(config.tokenizer, config.bos_token)
    separate, train, validation, digests = config.separates_documents, [], [], {}
    for number, corpus_config in enumerate(config.corpora):
        corpus = open_corpus(corpus_config)
        files = {
            name: open_token_file(split, tokenizer, config.cache_dir)
            for name, split in (("train", corpus.train), ("validation", corpus.validation))
        }
        train.append(
            train_rows(files["train"], length, packing=config.packing, mask_documents=separate)
        )
        validation.append(StreamRows(files["validation"], length, separate, keep_remainder=True))
        suffix = f" {number}" if number else ""
        digests |= {name + suffix: file.digest for name, file in files.items()}
    if not config.mixture:
        return Data(tokenizer, train[0], validation[0], None, digests)
    weights = tuple(corpus.weight for corpus in config.corpora)
    return Data(
        tokenizer, JoinedRows(tuple(train)), JoinedRows(tuple(validation)), weights, digests
    )


def train_batches(
    rows: Rows,
    *,
    seed: int,
    batch_size: int,
    weights: tuple[float, ...] | None = None,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Batches for steps start_step, start_step + 1, ... without end.

    Rows come in a new order every epoch, each once; in a mixture that is so of every corpus. The
    batch of a step depends on seed, step and batch_size alone: a process takes its share of it, so
    a run goes on exactly from any step, on any number of processes.

    Args:
      rows: what to draw from.
      seed: of the order.
      batch_size: rows a step, B, over all processes.
      weights: of the parts of `rows` in a mixture, `Data.weights`.
      start_step: the first step wanted; counts updates made so far.
      process_index: which share of each batch is this process's.
      process_count: number of shares; divides batch_size.
      prefetch: reads made ahead by a background thread, each of one batch or, where batches are
        small, of some; 0: made when asked for.

    Returns:
      An iterator of dicts with tokens_BT, targets_BT, positions_BT and segment_ids_BT (int32)
      and weights_BT (float32), of batch_size / process_count rows each. `close()` ends its thread.

    Raises:
      UserError: process_count does not divide batch_size.
    """
    import grain  # a second, which a mistake found before need not wait

    share = _share(batch_size, process_count, "train.batch_size")

    if weights is None:
        order = _order(0, len(rows), seed)
    else:
        orders = [
            _order(first, end, seed) for first, end in itertools.pairwise(rows.first_row.tolist())
        ]
        order = grain.MapDataset.mix(orders, weights)
    # Rounding the endless length up to whole batches would overflow: drop_remainder.
    shares = order.batch(share, drop_remainder=True)
    # Small batches are read several at a time: handing one over costs more than reading it.
    together = min(max(1, _READ_TOKENS // (share * rows.length)), _READ_BATCHES)
    mine = shares[process_index::process_count].batch(together, drop_remainder=True)
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    reads = mine[start_step // together :].map(rows.__getitem__).to_iter_dataset(options)
    return _one_by_one(iter(reads), start_step % together)


def _order(first: int, end: int, seed: int):
    """A grain.MapDataset of the rows first to end - 1, in a new order every epoch, without end."""
    import grain

    # `seed` hashes the seed; `shuffle(seed)` itself would make epoch 1 of seed 0 epoch 0 of 1.
    return grain.MapDataset.range(first, end).seed(seed).shuffle().repeat()


def _one_by_one(reads: Iterator[Batch], first: int) -> Iterator[Batch]:
    """The batches of each read in turn, without the first so many."""
    with contextlib.closing(reads):
        for read in reads:
            number = len(read["tokens"])
            for i in range(first, number):
                yield {f"{name}_BT": array[i] for name, array in read.items()}
            first = 0


def eval_batches(
    rows: Rows,
    *,
    batch_size: int,
    most_rows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with empty rows.

    Where there are more than `most_rows`, so many, evenly spaced.

    Args, the arrays and errors are those of `train_batches`; an empty row is all zeros: weight 0
    and segment id 0. Every process gets the same number of batches.
    """
    share = _share(batch_size, process_count, "train.eval_batch_size")
    count = min(len(rows), most_rows or len(rows))
    numbers = np.arange(count, dtype=np.int64) * len(rows) // count

    def batches() -> Iterator[Batch]:
        for start in range(0, len(numbers), batch_size):
            first = start + process_index * share
            batch = rows[numbers[first : first + share]]
            missing = share - len(batch["tokens"])
            yield {
                f"{name}_BT": np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()
            }

    # A generator of its own, so that a bad batch size raises here and not at the first batch.
    return batches()


def _share(batch_size: int, process_count: int, field: str) -> int:
    if batch_size % process_count:
        raise UserError(
            f"{field} {batch_size} cannot be split over {process_count} processes; make it a "
            f"multiple of {process_count}"
        )
    return batch_size // process_count
