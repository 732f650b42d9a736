"""Token ids that a router hands on to a replica with the same tokenizer, so that a prompt is tokenized once.

They stand in front of the fields of a body, which is sent with them to no other server. A replica believes none: it
uses ids that are exactly its text (`SegmentedTokenizer.with_tokens`), and tokenizes the text itself otherwise.
"""

import binascii
from array import array

MIN_HANDED = 128  # tokens; fewer are tokenized in no time
MAX_HANDED_BYTES = 512 << 10  # of a body with its tokens; replicas that take less announce no tokenizer
_BEFORE = b'{"headstart_tokens":"'
_AFTER = b'",'


def add_tokens_to_body(body: bytes, token_ids: "array[int]") -> bytes:
    """Return the body, an object of JSON that is not empty, with packed int32 token ids; unchanged if they are few."""
    opening = body.find(b"{") + 1
    handed = binascii.b2a_base64(token_ids, newline=False) if len(token_ids) >= MIN_HANDED else b""
    if not handed or body[:opening].strip() != b"{" or len(body) + len(handed) > MAX_HANDED_BYTES:
        return body
    return b"".join((_BEFORE, handed, _AFTER, memoryview(body)[opening:]))


def split_tokens_from_body(body: bytes) -> "tuple[bytes, array[int] | None]":
    """Return a body as it was before `with_tokens`, and the token ids; None: there are none, or no valid ones."""
    if not body.startswith(_BEFORE) or (end := body.find(_AFTER, len(_BEFORE))) < 0:
        return body, None
    token_ids = array("i")
    try:
        token_ids.frombytes(binascii.a2b_base64(memoryview(body)[len(_BEFORE) : end], strict_mode=True))
    except ValueError:
        return b"{" + body[end + len(_AFTER) :], None
    return b"{" + body[end + len(_AFTER) :], token_ids
