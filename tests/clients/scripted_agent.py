"""A model whose answers are scripted, so that the loop of an agent runs to its end.

The engine of server/fake_engine.py repeats its prompt from a marker up to the end-of-sequence token. So what this chat
template renders behind the conversation and the marker is what the model answers: a call of the first tool that fits,
reasoning if the user asks to think, and, when the output of a tool is there, a sentence that contains it. Calls are in
the format of the hermes family; smolagents' code and DSPy's fields are what their prompts ask for.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tokenizer_folders
from server.harness import Server, fake_command, spawn

END = "<|im_end|>"
TOLD = """{%- for message in messages %}{{ message.role }}:{{ " " }}
{%- if not loop.last or (message.content or '') not in script %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}
{% endfor %}<|im_start|>"""


def scripted(script: str) -> str:
    """Return the chat template of an agent that answers what `script` renders.

    It shows the conversation too, as any template should; the last message only where the answer does not repeat it.
    """
    return f"{{%- set script %}}{script}{{% endset %}}{TOLD}{{{{ script }}}}{END}"


TEMPLATE = scripted(
    r"""
{%- set last = messages[-1] %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' ') %}
{%- set results = messages[-2:] | selectattr('role', 'equalto', 'tool') | map(attribute='content') | list %}
{%- set told = messages | map(attribute='content') | join(' ') %}
{%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list %}
{%- macro call(name, arguments) %}<tool_call>
{"name": "{{ name }}", "arguments": {{ arguments }}}
</tool_call>
{% endmacro %}
{%- set answer = '{"city": "Paris", "degrees": 21}' %}
{%- if 'think' in asked %}<think>
I look it up.
</think>

{% endif %}
{%- if 'final_answer' in names and 'Observation:' in last.content %}
{{- call('final_answer', {'answer': 'The weather report: ' ~ last.content.split('\n')[-1]} | tojson) }}
{%- elif '<code>' in told %}Thought: the tool knows.
<code>
{% if 'Observation:' in last.content %}final_answer("The weather report: " + report)
{%- else %}report = get_weather(city="Paris")
print(report)
{%- endif %}
</code>
{%- elif names and names[0].startswith('transfer_to') %}{{ call(names[0], '{}') }}
{%- elif 'next_tool_name' in told %}[[ ## next_thought ## ]]
I look it up.

[[ ## next_tool_name ## ]]
{{ 'finish' if 'observation_0' in last.content else 'get_weather' }}

[[ ## next_tool_args ## ]]
{{ '{}' if 'observation_0' in last.content else '{"city": "Paris"}' }}

[[ ## completed ## ]]
{%- elif 'observation_0' in last.content %}[[ ## reasoning ## ]]
The tool has been called.

[[ ## answer ## ]]
The weather report: {{ last.content.split('[[ ## observation_0 ## ]]\n')[1].split('\n')[0] }}

[[ ## completed ## ]]
{%- elif 'get_weather' in names and not results %}
{%- if 'say something first' in asked %}Let me look.
{% endif %}{{ call('get_weather', '{"city": "Paris"}') }}
{%- if 'both' in asked %}{{ call('get_weather', '{"city": "Rome"}') }}{% endif %}
{%- elif names and names[-1] != 'get_weather' %}{{ call(names[-1], answer) }}
{%- elif results and 'as JSON' in told %}{{ answer }}
{%- elif results %}The weather report: {{ results[-1] }}
{%- else %}You said: {{ last.content }}
{%- endif %}"""
)
MAX_MODEL_LEN = 1 << 18


def write_model(folder: Path, template: str = TEMPLATE) -> str:
    """Write the folder of the scripted model and return it with the engine's knobs."""
    kind = tokenizer_folders.BYTE_LEVEL
    tokenizer_folders.write(folder, kind, chat_template=template)
    begin, end = map(tokenizer_folders.build(kind).token_to_id, ("<|im_start|>", END))
    return f"{folder}?vocab=1000&length={MAX_MODEL_LEN}&behind={begin}&eos={end}&step=0.0005"


@contextmanager
def scripted_server(room: Path, template: str = TEMPLATE) -> Iterator[Server]:
    """A ready server of the scripted model; logs are in `room`."""
    with spawn(fake_command(write_model(room / "model", template)), room / "log") as server:
        yield server.wait_ready()


@contextmanager
def scripted_router(room: Path) -> Iterator[Server]:
    """A ready router in front of two scripted servers."""
    model = write_model(room / "model")
    with ExitStack() as stack:
        servers = [stack.enter_context(spawn(fake_command(model), room / f"log-{n}")) for n in range(2)]
        yield stack.enter_context(router(room, servers))


@contextmanager
def router(room: Path, servers: Sequence[Server]) -> Iterator[Server]:
    """`headstart route`, ready, in front of servers once they are."""
    command = [sys.executable, "-m", "headstart", "route", "--port", "0"]
    command += [word for server in servers for word in ("--replica", server.wait_ready().url)]
    with spawn(command, room / "log") as found:
        yield found.wait_ready()


@contextmanager
def bundled_server(room: Path, num_replicas: int = 1, *options: str) -> Iterator[Server]:
    """`headstart serve` as users run it, with the bundled model; more than one replica: behind a router."""
    command = [sys.executable, "-m", "headstart", "serve", "--port", "0", "--num-blocks", "1024"]
    command += ["--tool-call-parser", "hermes", "--heartbeat-timeout", "600", *options]
    command += ["--replicas", str(num_replicas)] if num_replicas > 1 else []
    with spawn(command, room / "bundled-log") as server:
        yield server.wait_ready()
