"""Measures how many answers end by themselves with and without the properties that a schema does not list.

Usage: python -m headstart_lab.structured.additional_properties [MODEL]. The last line of stdout is JSON.
"""

import json
import sys
from typing import Any

import headstart
from headstart import LLM
from headstart.openai.structured.schema_rewrites import close_schema_objects

TEXT, NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}
SCHEMAS: dict[str, dict[str, Any]] = {  # as pydantic and zod write them, without additionalProperties
    "lamp": {"properties": {"room": {"enum": ["kitchen", "hall", "bedroom"]}, "on": {"type": "boolean"}}},
    "person": {"properties": {"name": TEXT, "age": NUMBER}},
    "trip": {"properties": {"start": TEXT, "end": TEXT, "stops": {"type": "array", "items": TEXT, "maxItems": 2}}},
    "order": {
        "properties": {"item": {"$ref": "#/$defs/item"}, "count": NUMBER},
        "$defs": {"item": {"type": "object", "properties": {"title": TEXT, "price": NUMBER}, "required": ["title"]}},
    },
}
PROMPTS = (
    "Turn on the light in the kitchen.",
    "Ada is 36 and drives from Bern to Rome.",
    "Two books for 20 francs each.",
)
MAX_TOKENS, SEEDS = 160, 2


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    rows: list[dict[str, Any]] = []
    with LLM(model) as llm:
        for is_closed in (False, True):
            num_ended = num_tokens = num_answers = 0
            for schema in SCHEMAS.values():
                whole = {"type": "object", "required": list(schema["properties"]), **schema}
                sent = close_schema_objects(whole) if is_closed else whole
                wanted = {"json": sent, "disable_additional_properties": False}
                for seed in range(SEEDS):
                    sampling = {"structured_outputs": wanted, "max_tokens": MAX_TOKENS, "seed": seed}
                    chats = [[{"role": "user", "content": f"{prompt} Answer in JSON."}] for prompt in PROMPTS]
                    for answer in llm.chat(chats, sampling, progress=False):
                        num_answers += 1
                        num_ended += answer.finish_reason == "stop"
                        num_tokens += len(answer.token_ids)
            rows.append({"closed": is_closed, "answers": num_answers, "ended": num_ended, "tokens": num_tokens})
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"model": model, "version": headstart.__version__, "max_tokens": MAX_TOKENS, "rows": rows}))


if __name__ == "__main__":
    main()
