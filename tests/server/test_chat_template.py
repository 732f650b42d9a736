"""ChatTemplate: what transformers' apply_chat_template renders, in a sandbox, with every failure a clear error."""

from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import BYTE_LEVEL, TEMPLATE, write
from transformers import AutoTokenizer

from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.tokenizer.tokenizer import Tokenizer

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.seen = true %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- if loop.index0 == 100 %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
BLOCKS = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
    <a>{{ message.content }}</a>
    {% endgeneration %}
  {% else %}
    {{ message | tojson }} {{ message.content | tojson(indent=1) }}
  {% endif %}
{% endfor %}
{{ "on" if tools is none else "off" }}
{% if add_generation_prompt %}<a>{% endif %}"""
TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
TRIMMED = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
TEMPLATES = {"trimmed": TRIMMED, "chatml": TEMPLATE, "llama2": LLAMA2, "qwen3": QWEN3, "blocks": BLOCKS, "tools": TOOLS}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello <b>&</b> \"é\" 東 'x'"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": " two  blanks \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nno\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_is_that_of_transformers(tmp_path: Path, name: str, add_generation_prompt: bool, chat: int) -> None:
    folder = write(tmp_path, BYTE_LEVEL, chat_template=TEMPLATES[name], bos_token="<|im_start|>")
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.render_chat_text(CHATS[chat], add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("name", ["chatml", "llama2", "qwen3", "trimmed"])
@pytest.mark.parametrize("content", ["The answer", "The answer is ", " leading", "CONTINUE"])
def test_continuing_a_message_is_that_of_transformers(tmp_path: Path, name: str, content: str) -> None:
    folder = write(tmp_path, BYTE_LEVEL, chat_template=TEMPLATES[name], bos_token="<|im_start|>")
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.render_chat_text(chat, add_generation_prompt=False, continue_final_message=True) == expected
    assert chat[1]["content"] == content


def test_options_reach_the_template() -> None:
    template = ChatTemplate(QWEN3, {})
    chat = [{"role": "user", "content": "hi"}]
    assert template.render(chat, options={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert template.render(chat).endswith("assistant\n")


def test_options_cannot_replace_the_messages() -> None:
    assert ChatTemplate(TEMPLATE, {}).render([], add_generation_prompt=False, options={"messages": [1]}) == ""


def test_an_objection_of_the_template_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="Only user and assistant roles") as caught:
        ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}).render([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_concerns_this_request_alone(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert "0x" not in str(caught.value) and "/" not in str(caught.value).replace("1 / 0", "")


def test_rendering_is_bounded_in_length() -> None:
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="longer than 16777216 characters"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x" * 100_000}])


def test_rendering_is_bounded_in_time() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="too long to render"):
        ChatTemplate(source, {}, max_seconds=0.05).render([{"role": "user", "content": "x"}])


def test_continuing_needs_a_text_at_the_end() -> None:
    template = ChatTemplate(TEMPLATE, {})
    with pytest.raises(InvalidRequestError, match="continue_final_message needs"):
        template.render([], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="drops the last message"):
        ChatTemplate("nothing", {}).render([{"role": "user", "content": "x"}], continue_final_message=True)


def test_a_template_that_does_not_compile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_contents_are_data_and_never_templates() -> None:
    text = ChatTemplate(TEMPLATE, {}).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in text
