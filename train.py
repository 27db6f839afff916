"""Trains a model: python train.py --config tiny --workdir runs/tiny [--train.steps 200 ...]"""

import sys

from modo.data.source import open_corpus
from modo.train.cli import one_line_errors, parse_train_arguments

if __name__ == "__main__":
    with one_line_errors():
        config, workdir = parse_train_arguments(sys.argv[1:])
        # What is not there is told before JAX is imported, which takes a second.
        for corpus in config.data.corpora:
            open_corpus(corpus)
        from modo.train.loop import run

        run(config, workdir)
