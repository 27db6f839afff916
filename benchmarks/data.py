"""Batches a second, beside grain reading the same rows one at a time; one process, alternating.

python -m benchmarks.data [--seconds 2] [--json FILE]

The rows are of the built-in corpus. The other pipeline is the usual one: grain.MapDataset over a
source of rows, shuffled, repeated and batched, with one thread that reads ahead, as here. The limit
is the time to write a batch's arrays once, 20 bytes a token.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import time

import grain
import numpy as np

from modo.config import DataConfig
from modo.data import open_data, train_batches

CASES = [(256, 4), (256, 64), (2048, 16), (12288, 4)]  # tokens a row, rows a batch


def row_at_a_time(rows, batch_size: int):
    """Batches of the same rows from grain alone."""
    order = grain.MapDataset.source(rows).seed(0).shuffle().repeat()
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(order.batch(batch_size, drop_remainder=True).to_iter_dataset(options))


def copies(rows, batch_size: int):
    """A batch's arrays copied, again and again: what no pipeline can be faster than."""
    batch = rows[np.arange(batch_size) % len(rows)]
    while True:
        yield {name: array.copy() for name, array in batch.items()}


def tokens_per_second(batches, tokens: int, seconds: float) -> float:
    """Of an iterator over batches of so many tokens."""
    start, number = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        next(batches)
        number += 1
    return number * tokens / elapsed


def measure(length: int, batch_size: int, packing: str, seconds: float) -> dict:
    """One line of the table: medians over five rounds."""
    rows = open_data(DataConfig(packing=packing), length).train
    pipelines = {
        "modo": train_batches(rows, seed=0, batch_size=batch_size),
        "grain": row_at_a_time(rows, batch_size),
        "limit": copies(rows, batch_size),
    }
    with contextlib.ExitStack() as stack:
        rates = {name: [] for name in pipelines}
        for pipeline in pipelines.values():
            stack.callback(pipeline.close)
            for _ in itertools.islice(pipeline, 20):
                pass
        for _ in range(5):
            for name, pipeline in pipelines.items():
                rate = tokens_per_second(pipeline, length * batch_size, seconds / 5)
                rates[name].append(rate)
    modo, other, limit = (statistics.median(rates[name]) for name in ("modo", "grain", "limit"))
    return {
        "length": length,
        "batch_size": batch_size,
        "packing": packing,
        "tokens_per_second": modo,
        "speedup": modo / other,
        "limit": limit / other,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each pipeline in each case")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    options = parser.parse_args()
    print(f"{'length':>7}{'batch':>7}  {'packing':<11}{'M tokens/s':>11}{'x grain':>9}{'limit':>8}")
    results = []
    for (length, batch_size), packing in itertools.product(CASES, ("stream", "documents")):
        row = measure(length, batch_size, packing, options.seconds)
        results.append(row)
        print(
            f"{length:>7}{batch_size:>7}  {packing:<11}{row['tokens_per_second'] / 1e6:>11.1f}"
            f"{row['speedup']:>9.2f}{row['limit']:>8.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
