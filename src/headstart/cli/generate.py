"""`headstart generate`: text from prompts, without a server."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.cli_options import Sources, add_option_flags, print_starting_line
from headstart.config.config_file import merge_option_sources
from headstart.config.options import EngineOptions
from headstart.core.errors import ConfigError, HeadstartError

EXAMPLES = """Examples:
  headstart generate --model Qwen/Qwen3-0.6B --chat "Why is the sky blue?"
  headstart generate --model ./my-model --temperature 0 --json < prompt.txt
  headstart generate --model ./my-model --lines --json < prompts.txt > answers.jsonl
  headstart generate "wake me at seven" --json-schema answer.schema.json"""


@add_option_flags(EngineOptions)
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="One or several; none or '-': all of stdin.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of stdin is a prompt.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Render prompts with the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message for --chat; @FILE reads it from FILE.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate per prompt.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="0: always the likeliest token (default: the model's, else 1).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Sample from the likeliest tokens that make up this share.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeat for several.")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="The text is JSON that matches the schema in FILE.")
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="REGEX", help="The whole text matches this expression.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The text is one of these; repeat for several.")
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(metavar="FILE", help="The text matches the Lark grammar in FILE.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, with token counts.")] = False,
    sources: Sources,
) -> None:
    """Generate text once, without a server. Text on stdout, progress on stderr."""
    options = merge_option_sources(EngineOptions, *sources)
    if system is not None and not chat:
        raise ConfigError("--system needs --chat: without a chat template there are no roles")
    texts = _prompts(prompts or [], lines=lines)
    wishes = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop or None}
    wishes |= {"guided_json": _read(json_schema), "guided_regex": regex, "guided_choice": choice or None}
    wishes["guided_grammar"] = _read(grammar)
    sampling = {name: value for name, value in wishes.items() if value is not None}
    if system is not None and system.startswith("@"):
        system = _read(system[1:], "the system message from ") or ""
    before = [{"role": "system", "content": system}] if system is not None else []
    from headstart.engine.engine_checks import check_engine_can_start

    check_engine_can_start(options)  # before torch is imported
    print_starting_line()
    from headstart.engine.llm import LLM

    with LLM(**{name: getattr(options, name) for name in EngineOptions.__dataclass_fields__}) as llm:
        if chat:
            completions = llm.chat([[*before, {"role": "user", "content": text}] for text in texts], sampling)
        else:
            completions = llm.generate(texts, sampling)
    for done in completions:
        print(json.dumps(_summary(done), ensure_ascii=False) if as_json else done.text, flush=True)
    if failed := [done.error for done in completions if done.error is not None]:
        raise HeadstartError(f"{len(failed)} of {len(completions)} prompts failed: {failed[0]}")


def _prompts(arguments: list[str], *, lines: bool) -> list[str]:
    if arguments and arguments != ["-"]:
        if lines:
            raise ConfigError("--lines reads prompts from stdin: leave the others out")
        return arguments
    if not arguments and sys.stdin.isatty():
        raise ConfigError('no prompt: give one, as in headstart generate "The sky is", or pipe it in')
    text = sys.stdin.read()
    return [line for line in text.splitlines() if line.strip()] if lines else [text]


def _read(path: str | None, what: str = "") -> str | None:
    """Return the text of a file, None without one."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what}{path}: {error}") from error


def _summary(done: Any) -> dict[str, Any]:
    return {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": len(done.prompt_token_ids),
        "cached_tokens": done.num_cached_tokens,
        "completion_tokens": len(done.token_ids),
        "token_ids": done.token_ids,
    }
