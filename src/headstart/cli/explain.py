"""`headstart explain`: queries a running server why a prompt had, or would have, no more prefix cache hits."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from headstart.cli.client_request import DEFAULT_URL, call_server
from headstart.core.errors import ConfigError
from headstart.http.logs import escape_unprintable

EXAMPLES = """Examples:
  headstart explain chatcmpl-5f0c9a                 the id that an answer came with
  headstart explain --prompt "The sky is"           a prompt, without sending it to the model
  headstart explain --chat --file question.txt      the same text as a user's message
  HEADSTART_ADMIN_API_KEY=secret headstart explain cmpl-5f0c9a --url http://replica-2:8000 --json"""
_WIDTH = 100


def explain(
    request_id: Annotated[str | None, typer.Argument(metavar="ID", help="The id of a response.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Explain this prompt instead.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same from a file: text, or a JSON request body; '-': stdin."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render the text as a user message.")] = False,
    url: Annotated[str, typer.Option(metavar="URL", help="Address of the server.")] = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The whole answer as one JSON document.")] = False,
) -> None:
    """Explain why a prompt had no more prefix cache hits.

    Shows the recent request with the longest common prefix, the first token that differs, or what evicted the blocks.
    A server keeps its last thousand requests. The key is read from HEADSTART_ADMIN_API_KEY or HEADSTART_API_KEY.
    """
    given = [value for value in (request_id, prompt, file) if value is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of ID, --prompt and --file; {len(given)} were given")
    if request_id is not None:
        if chat:
            raise ConfigError("--chat applies to --prompt and --file only; leave it out with an ID")
        answer = call_server(url, "GET", f"/v1/cache/explain?request_id={quote(request_id, safe='')}")
    else:
        answer = call_server(
            url, "POST", "/v1/cache/explain", _body(prompt if prompt is not None else _read(file), chat)
        )
    print(json.dumps(answer) if as_json else wrap_first_paragraph(escape_unprintable(answer["message"], "\n")))


def wrap_first_paragraph(message: str) -> str:
    """Return the message with its first paragraph wrapped to a readable width; the lines below stay unchanged."""
    paragraph, *rest = message.split("\n")
    return "\n".join([textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False), *rest])


def _read(file: Path | None) -> str:
    assert file is not None
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _body(text: str, chat: bool) -> dict[str, Any]:
    """Return the request body for a text, or the text itself parsed if it is a JSON request body."""
    if chat:
        return {"messages": [{"role": "user", "content": text}]}
    if text.lstrip().startswith("{"):
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        if isinstance(body, dict) and ("prompt" in body or "messages" in body):
            return body
    return {"prompt": text}
