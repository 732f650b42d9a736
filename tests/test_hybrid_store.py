"""Hybrid models with a store: after a restart, blocks and states come back to the last bit, or are computed."""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from model.tiny import HYBRIDS, make_checkpoint
from test_hybrid_reuse import SIZE, engine_of, request, run

from headstart.core.cache.hashing import is_checkpoint_page_hash
from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.model.weights.model_loader import LoadedModel, load_model
from headstart.store.disk import DiskStore
from headstart.store.format import HEADER_BYTES, StoredBlockFormat, decode_block_hashes, decode_segment_header

WAIT = 60.0


def requests_of(rng: Random) -> list[Request]:
    """Prompts that begin alike and continue each other."""
    stem = [rng.randrange(3, 128) for _ in range(70)]
    prompts = [
        [*stem[: rng.choice([40, 70])], *(rng.randrange(3, 128) for _ in range(rng.randint(3, 20)))] for _ in "123456"
    ]
    return [request(f"r{index}", prompt, 12) for index, prompt in enumerate(prompts)]


def stored_engine(loaded: LoadedModel, folder: Path, num_blocks: int = 900) -> Engine:
    shape = StoredBlockFormat(loaded.fingerprint, SIZE, SIZE * loaded.kv_bytes_per_token)
    return engine_of(loaded, num_blocks, store=DiskStore(folder, shape, 1 << 30))


def spoil(folder: Path, *, pages: bool) -> int:
    """Change a bit in the content of every page of a state, or of every other block, on disk; return their number."""
    num = 0
    for path in folder.glob("*.kv"):
        raw = bytearray(path.read_bytes())
        header = decode_segment_header(bytes(raw[:HEADER_BYTES]), bytes.fromhex(path.stem))
        names = decode_block_hashes(header, 0, bytes(raw[HEADER_BYTES : header.payload_start])).by_slot
        for slot, name in enumerate(names):
            if name and is_checkpoint_page_hash(name) == pages:
                raw[header.payload_offset(slot) + header.shape.block_bytes // 3] ^= 4
                num += 1
        path.write_bytes(raw)
    return num


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_restart_restores_has_the_same_bits(family: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path / "model"), dtype=dtype, device="cpu")
    requests, rng = requests_of(Random(1)), Random(2)
    cold = run(engine_of(loaded, caching=False), requests, rng)
    for _ in range(3):  # fills the store, is restored, is restored again
        engine = stored_engine(loaded, tmp_path / "kv")
        found = run(engine, requests, rng)
        for name, (tokens, values, _, state) in cold.items():
            assert found[name][:2] == (tokens, values) and torch.equal(found[name][3], state)
        engine.close()
    assert engine.stats().counters.store_tokens > 200
    assert engine.stats().counters.prefill_tokens < 60


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_corrupt_state_or_block_is_a_miss(family: str, pages: bool, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path / "model"), dtype="float32", device="cpu")
    requests, rng = requests_of(Random(3)), Random(2)
    first = stored_engine(loaded, tmp_path / "kv")
    due = run(first, requests, rng)
    first.close()
    assert spoil(tmp_path / "kv", pages=pages) > 4
    engine = stored_engine(loaded, tmp_path / "kv")
    found = run(engine, requests, rng)
    assert all(found[name][:2] == due[name][:2] and torch.equal(found[name][3], due[name][3]) for name in due)
    stats = engine.stats()
    assert stats.store is not None and stats.store.misses["corrupt"] > 0
    assert stats.counters.store_tokens == 0
    engine.close()


KILLED = """
import sys, time
from pathlib import Path
from random import Random
sys.path[:0] = sys.argv[3:]
from test_hybrid_store import load_model, requests_of, run, stored_engine, time_to_write
engine = stored_engine(load_model(Path(sys.argv[1]), dtype="float32", device="cpu"), Path(sys.argv[2]))
run(engine, requests_of(Random(4)), Random(2))
time_to_write(engine)
print("served", flush=True)
while True:
    run(engine, requests_of(Random(5)), Random(3))
"""


def time_to_write(engine: Engine) -> None:
    """Wait until nothing is left to write."""
    end = time.monotonic() + WAIT
    while (stats := engine.stats().store) is not None and stats.num_pending and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_process_that_was_killed_leaves_states_that_are_restored(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "kv"), here, *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "served\n"
        finally:
            process.kill()
    loaded = load_model(folder, dtype="float32", device="cpu")
    requests = requests_of(Random(4))
    due = run(engine_of(loaded, caching=False), requests, Random(2))
    engine = stored_engine(loaded, tmp_path / "kv")
    found = run(engine, requests, Random(2))
    assert all(found[name][:2] == due[name][:2] and torch.equal(found[name][3], due[name][3]) for name in due)
    assert engine.stats().counters.store_tokens > 200
    engine.close()
