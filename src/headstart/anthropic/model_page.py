"""Models in the form of Anthropic's API, which its clients request with the header `anthropic-version`."""

from collections.abc import Iterable
from datetime import UTC, datetime

from headstart.openai.responses import Json

VERSION_HEADER = "anthropic-version"


def anthropic_model(model: Json) -> Json:
    """Return one model, from OpenAI's object."""
    created = datetime.fromtimestamp(model.get("created") or 0, UTC)
    context = model.get("max_model_len")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def model_page(models: Iterable[Json]) -> Json:
    """Return the list of models: one page with all of them."""
    data = [anthropic_model(model) for model in models]
    ids = [model["id"] for model in data]
    return {"data": data, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
