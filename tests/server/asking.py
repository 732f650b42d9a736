"""A server inside this process that is asked for one token, and the prompts that its engine got."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tokenizer_folders
from server.harness import inside

TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function | tojson }}{% endfor %}\n{% endfor %}"
)


def write_model(room: Path, template: str = TEMPLATE) -> str:
    """The model of a fake engine, by default with a chat template that shows everything and adds nothing at the end."""
    tokenizer_folders.write(room / "model", tokenizer_folders.BYTE_LEVEL, chat_template=template)
    return f"{room / 'model'}?vocab=1000&length=100000"


class Asked(NamedTuple):
    """The answer to a request, and the prompt that the engine got."""

    answer: httpx.Response
    prompt: str


@asynccontextmanager
async def asking(model: str, **options: Any) -> AsyncIterator[Callable[[str, Any], Awaitable[Asked]]]:
    """A server, and the function that sends it a body, or asks for a path without one."""
    async with inside(model, tool_call_parser="hermes", **options) as server:
        prompts: list[str] = []
        submit = server.engine.submit

        def noting(requests: Any) -> Any:
            prompts.append(server.state.loaded_model.tokenizer.decode(requests[0].prompt))
            return submit(requests)

        server.engine.submit = noting  # type: ignore[method-assign]

        async def ask(path: str, body: Any) -> Asked:
            prompts.clear()
            answer = await (server.client.get(path) if body is None else server.client.post(path, json=body))
            return Asked(answer, "".join(prompts))

        yield ask
