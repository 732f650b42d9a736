"""The process that renders chat templates: `python -m headstart.openai.chat.chat_process FD`.

A template is a program from the model's folder. In this process it cannot exhaust the memory or the time of the server:
see openai/sandbox/.
"""

from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.chat.template_forms import encode_content_forms
from headstart.openai.sandbox.sandbox_process import Handler, serve

_TOO_LARGE = InvalidRequestError(
    "the rendered conversation does not fit into memory; shorten the messages", param="messages"
)


def build(setup: Any) -> Handler:
    """Return the renderer of the template in `setup`. Raises ConfigError if it does not compile."""
    source, named_tokens, max_seconds = setup
    template = ChatTemplate(source, named_tokens, max_seconds=max_seconds)

    def render(request: Any) -> str:
        if request is None:
            return encode_content_forms(template.content_forms())
        messages, generate, go_on, options, tools = request
        return template.render(
            messages, add_generation_prompt=generate, continue_final_message=go_on, options=options, tools=tools
        )

    return render


if __name__ == "__main__":
    serve(build, _TOO_LARGE)
