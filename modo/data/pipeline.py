"""From a DataConfig to batches: a batch is a function of the seed and the step alone."""

import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from modo.config import DataConfig
from modo.data.rows import PackedRows, StreamRows, train_rows
from modo.data.source import open_documents
from modo.data.token_file import open_token_file
from modo.data.tokenizer import Tokenizer, get_tokenizer
from modo.errors import UserError

Rows = StreamRows | PackedRows
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Data:
    """An opened corpus.

    Attributes:
      tokenizer: what made the tokens.
      train: rows to train on.
      validation: consecutive windows over the whole held-out split, the last one padded.
    """

    tokenizer: Tokenizer
    train: Rows
    validation: StreamRows


def open_data(config: DataConfig, length: int) -> Data:
    """Opens both splits, tokenising them if that was not done before.

    Args:
      config: where text comes from and how it is cut.
      length: tokens a row, `TrainConfig.length`.

    Raises:
      UserError: text is missing, unreadable or too short, or the cache cannot be written to.
    """
    tokenizer = get_tokenizer(config.tokenizer, config.bos_token)
    documents = open_documents(config)
    train = open_token_file(documents.train, tokenizer, config.cache_dir)
    validation = open_token_file(documents.validation, tokenizer, config.cache_dir)
    return Data(
        tokenizer,
        train_rows(
            train, length, packing=config.packing, mask_documents=config.separates_documents
        ),
        StreamRows(validation, length, config.separates_documents, keep_remainder=True),
    )


def train_batches(
    rows: Rows,
    *,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 4,
) -> Iterator[Batch]:
    """Batches for steps start_step, start_step + 1, ... without end.

    Rows come in a new order every epoch, each once. The batch of a step depends on seed, step
    and batch_size alone: a process takes its share of it, so a run goes on exactly from any
    step, on any number of processes.

    Args:
      rows: what to draw from.
      seed: of the order.
      batch_size: rows a step, B, over all processes.
      start_step: the first step wanted; counts updates made so far.
      process_index: which share of each batch is this process's.
      process_count: number of shares; divides batch_size.
      prefetch: batches made ahead by a background thread; 0: made when asked for.

    Returns:
      An iterator of dicts with tokens_BT, targets_BT, positions_BT and segment_ids_BT (int32)
      and weights_BT (float32), of batch_size / process_count rows each. `close()` ends its thread.

    Raises:
      UserError: process_count does not divide batch_size.
    """
    share = _share(batch_size, process_count, "train.batch_size")

    def read(indices_B: np.ndarray) -> Batch:
        return {f"{name}_BT": array for name, array in rows[indices_B].items()}

    # `seed` hashes the seed; `shuffle(seed)` itself would make epoch 1 of seed 0 epoch 0 of 1.
    order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
    # Rounding the endless length up to whole batches would overflow: drop_remainder.
    shares = order.batch(share, drop_remainder=True)
    mine = shares[start_step * process_count + process_index :: process_count]
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(mine.map(read).to_iter_dataset(options))


def eval_batches(
    rows: Rows, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with empty rows.

    Args, the arrays and errors are those of `train_batches`; an empty row is all zeros: weight 0
    and segment id 0. Every process gets the same number of batches.
    """
    share = _share(batch_size, process_count, "train.eval_batch_size")

    def batches() -> Iterator[Batch]:
        for start in range(0, len(rows), batch_size):
            mine = start + process_index * share + np.arange(share)
            batch = rows[mine[mine < len(rows)]]
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
