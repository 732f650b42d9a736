"""References in `input` to output items of stored responses, by the id of the item.

The id of an item contains that of its response (`response_objects.py`), so no index of items is needed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.openai.responses import Json

REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})[0-9a-f]{2,8}")


def response_of(item_id: str) -> str | None:
    """Return the id of the response with this output item; None if no item of any server has such an id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def referenced_items(items: object) -> Iterator[str]:
    """Yield the ids of the items that an unchecked `input` refers to."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") == REFERENCE and isinstance(item.get("id"), str):
            yield item["id"]


def first_referenced_response(items: object) -> str | None:
    """Return the id of the response that the first reference of an unchecked `input` is about; None without any."""
    first = next(referenced_items(items), None)
    return None if first is None else response_of(first)


def output_item(response: Mapping[str, Any], item_id: str) -> Json | None:
    """Return the output item of a response object; None if it has none with this id."""
    return next((item for item in response["output"] if item["id"] == item_id), None)
