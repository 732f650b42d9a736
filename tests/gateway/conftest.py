"""Folders shared by the tests of the fleet."""

import pytest
import tokenizer_folders


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tokenizer and nothing else: all that a fake engine needs."""
    return str(tokenizer_folders.write(tmp_path_factory.mktemp("fake") / "model", tokenizer_folders.BYTE_LEVEL))
