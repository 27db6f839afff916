import pytest

from modo.config import DataConfig
from modo.data import open_data


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("token_files"))


@pytest.fixture(scope="session")
def shakespeare(cache_dir):
    """The built-in corpus in rows of 256."""
    return open_data(DataConfig(cache_dir=cache_dir), 256)
