"""Sealer: blocks as values that only holders of the secret and of the block's hash can read or make.

    | magic 4 | nonce 12 | AES-256-GCM of (entry, payload), its tag 16 | XXH3-128 of all before, for this name |

The entry is that of a segment file (format.py), so a value is verified as on disk, after its tag. Every block has a key
of its own, derived from the secret and the block hash. That hash covers the model, all tokens up to the block's end,
thereby its position, and the isolation domain: without the secret of a domain there is no key to its blocks. The
checksum at the end needs no key: with it `headstart store verify` finds damage, not forgery.
"""

import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128_digest

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store.format import (
    BlockEntry,
    FormatError,
    SegmentHeader,
    StoredBlockFormat,
    decode_entry,
    encode_slot_entry,
    payload_checksum,
)
from headstart.store.segment import Miss
from headstart.store.tiers.tier import derive_key

MAGIC = b"hkv\x01"
NAME_BYTES = 16
_NONCE, _TAG, _CHECKSUM = 12, 16, 16
OVERHEAD_BYTES = len(MAGIC) + _NONCE + _TAG + _CHECKSUM


class BlockSealer:
    """Values of one shape under one secret (`derive_key_from_secret_file`), and messages about them."""

    def __init__(self, secret: bytes, shape: StoredBlockFormat) -> None:
        self._context = shape.fingerprint + struct.pack("<II", shape.block_size, shape.block_bytes)
        self._header = SegmentHeader(shape, 1, bytes(8))
        self._names, self._keys = (derive_key(secret, what + self._context) for what in (b"names", b"blocks"))
        self._messages = AESGCM(derive_key(secret, b"messages" + self._context))
        self.space = derive_key(secret, b"space" + self._context)[:8].hex()
        size = shape.table_entry_bytes + shape.block_bytes
        self._plain, self._opened = memoryview(bytearray(size)), memoryview(bytearray(size))
        self.value_bytes = OVERHEAD_BYTES + len(self._plain)

    def external_block_name(self, block_hash: BlockHash) -> bytes:
        """Return the name of a block outside: it tells nothing about the block without the secret."""
        return derive_key(self._names, block_hash)[:NAME_BYTES]

    def seal_block(self, key: BlockKey, payload: Data, value: memoryview) -> None:
        """Write the value of a block, `value_bytes` long. For one thread, like `open`: plain texts have a buffer.

        New memory for every copy of a block would take seven times as long as encrypting it.
        """
        size = self._header.shape.table_entry_bytes
        self._plain[:size] = encode_slot_entry(self._header, 0, BlockEntry(key, payload_checksum(payload)))
        self._plain[size:] = payload
        start, nonce = len(MAGIC) + _NONCE, os.urandom(_NONCE)
        value[:start] = MAGIC + nonce
        cipher, sealed = self._cipher(key.block_hash), value[start:-_CHECKSUM]
        cipher.encrypt_into(nonce, self._plain, self._about(key), sealed)
        value[-_CHECKSUM:] = _outer_checksum(value[:-_CHECKSUM], self.external_block_name(key.block_hash))

    def unseal_block_into(self, key: BlockKey, value: object, payload: memoryview) -> Miss | None:
        """Write a block's content to `payload` and return None, or return why the value is not that of this block."""
        if not isinstance(value, (bytes, memoryview)) or len(value) != self.value_bytes:
            return "corrupt"
        if bytes(value[: len(MAGIC)]) != MAGIC:
            return "corrupt"
        start = len(MAGIC) + _NONCE
        sealed, size = memoryview(value)[start:-_CHECKSUM], self._header.shape.table_entry_bytes
        try:
            self._cipher(key.block_hash).decrypt_into(value[len(MAGIC) : start], sealed, self._about(key), self._opened)
            entry = decode_entry(self._header, 0, bytes(self._opened[:size]))
        except (InvalidTag, FormatError):
            return "corrupt"
        if entry.key != key:
            return "mismatch"
        payload[:] = self._opened[size:]
        return None if payload_checksum(payload) == entry.payload_checksum else "corrupt"

    def seal_message(self, text: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._messages.encrypt(nonce, text, self._context)

    def open_message(self, sealed: object) -> bytes:
        """Return the text of a message of a holder of the secret; empty for anything else."""
        if not isinstance(sealed, bytes) or len(sealed) < _NONCE + _TAG:
            return b""
        try:
            return self._messages.decrypt(sealed[:_NONCE], sealed[_NONCE:], self._context)
        except InvalidTag:
            return b""

    def _cipher(self, block_hash: BlockHash) -> AESGCM:
        return AESGCM(derive_key(self._keys, block_hash))

    def _about(self, key: BlockKey) -> bytes:
        """Return the associated data: model, sizes, and the block hash, which covers the position."""
        return self._context + key.block_hash


def damage_of_value(value: object, name: bytes) -> str:
    """Return the reason why a value is damaged, empty if it is sound. Needs no secret, and detects no forgery."""
    if not isinstance(value, bytes) or len(value) <= OVERHEAD_BYTES:
        return "value-short"
    if not value.startswith(MAGIC):
        return "value-magic"
    return "" if _outer_checksum(value[:-_CHECKSUM], name) == value[-_CHECKSUM:] else "value-checksum"


def _outer_checksum(value: Data, name: bytes) -> bytes:
    return xxh3_128_digest(value, int.from_bytes(name[:8], "little"))
