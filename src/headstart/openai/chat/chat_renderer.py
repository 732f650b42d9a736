"""ChatRenderer: renders conversations with a model's chat template in separate processes (chat_process.py).

The result equals that of ChatTemplate in this process, which is the oracle in tests. A template comes from the model's
folder and may be hostile: `{{ 'a' * 2000000000 }}` or nested loops cannot be bounded from inside. A process that takes
too much time or memory is killed, and a new one is started. `render` blocks: call it off the event loop.
"""

from collections.abc import Mapping
from typing import Any

from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.openai.chat.chat_template import MAX_CHARS, MAX_SECONDS, check_template_source
from headstart.openai.chat.template_forms import ContentForms, parse_content_forms
from headstart.openai.sandbox.sandbox_pool import SandboxLostError, SandboxPool, SandboxSpec

MAX_BYTES = 512 * 1024 * 1024  # of one process; 16 Mi characters of a wide text take 64 MiB, several times


class ChatRenderer:
    """Renderer for the chat template of one model. Thread-safe. Processes start with a conversation or `start`."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], *, max_seconds: float = MAX_SECONDS) -> None:
        """Raise ConfigError for a template that is too long or is not valid Jinja."""
        check_template_source(source)
        sandbox = SandboxSpec(
            module="headstart.openai.chat.chat_process",
            setup=(source, dict(named_tokens), max_seconds),
            subject="the model's chat template",
            requests="conversations",
            max_setup_seconds=max_seconds,  # a template may compute while it is compiled
            max_seconds=max_seconds,
            max_bytes=MAX_BYTES,
            max_answer_bytes=4 * MAX_CHARS + 4096,
        )
        self._pool = SandboxPool(sandbox)
        self._forms: ContentForms | None = None

    def start(self) -> None:
        """Start a process, so that the first conversation does not wait. Raises ConfigError if it does not compile."""
        self._pool.prestart_process()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tenant: str = "",
    ) -> str:
        """Return the prompt, as ChatTemplate.render does.

        Raises InvalidRequestError if the template rejects the messages or exceeds its limits, and QueueFullError as
        SandboxPool.
        """
        return self._ask((messages, add_generation_prompt, continue_final_message, dict(options or {}), tools), tenant)

    def content_forms(self) -> ContentForms:
        """Return the forms of content that the template takes, as ChatTemplate does; raises what `render` raises."""
        if self._forms is None:
            self._forms = parse_content_forms(self._ask(None))
        return self._forms

    def _ask(self, request: Any, tenant: str = "") -> str:
        try:
            return self._pool.ask(request, tenant)
        except ValueError:
            raise InvalidRequestError(
                "messages or tools hold values that are not plain JSON", param="messages"
            ) from None
        except ConfigError as error:  # from a template that was not started before
            raise InvalidRequestError(str(error), param="messages") from None
        except SandboxLostError as error:
            message = f"the model's chat template {error} for this conversation; send fewer or shorter messages"
            raise InvalidRequestError(message, param="messages") from None
