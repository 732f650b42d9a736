"""LLM: offline inference with the engine in the caller's process, for scripts and notebooks.

    from headstart import LLM

    llm = LLM("Qwen/Qwen3-0.6B")
    print(llm.generate("The capital of France is", {"max_tokens": 8, "temperature": 0})[0].text)

Sampling parameters have the names, limits and errors of the HTTP API (openai/generation_fields.py). Importing this
module does not import torch. Constructing an LLM does, after setting the thread variables that torch reads on import.
"""

import dataclasses
import importlib
import itertools
import json
import sys
import time
import warnings
import weakref
from array import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from headstart.config.options import EngineOptions, check_option_values
from headstart.core.batch import TokenLogprob
from headstart.core.cache.pinned_prefix import PrefixInfo, PrefixState
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.core.request import Request, SamplingParams
from headstart.engine.engine_checks import check_engine_installed
from headstart.measurement.deferred_interrupt import deferred_interrupt
from headstart.measurement.progress_bar import GenerationProgress
from headstart.model.setup.threads import configure_num_threads
from headstart.openai.bounds import RequestBounds, closes_objects_by_default
from headstart.openai.chat.chat_delta import ToolCallDelta
from headstart.openai.engine_requests import (
    ChatPrompt,
    RequestOrigin,
    build_requests,
    encode_completion,
    render_and_tokenize_chat,
    with_chat_output_format,
)
from headstart.openai.forms.carried_text import REFUSE
from headstart.openai.generation_params import GenerationParams, ParamsKind, parse_params
from headstart.openai.prefix_tokens import encode_prefix, parse_prefix, prefix_field_name
from headstart.openai.request_bodies import (
    ChatBody,
    CompletionBody,
    messages_for_template,
    parse_messages,
    parse_prompts,
)
from headstart.openai.request_json import check_json_depth
from headstart.openai.structured.dropped_keywords import dropped_keywords_header
from headstart.openai.text.generation import GeneratedOutput
from headstart.openai.text.logprob_table import TokenEntry
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.text.stop_strings import StopStringAutomata
from headstart.openai.tokenizer.tokenizer import Tokenizer

Sampling = SamplingParams | Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt. With n > 1 this is the first choice, and `outputs` holds all choices including it.

    `finish_reason` is "stop", "length" or "error". With "error" only this prompt failed, `error` holds the reason, and
    the other prompts of the batch are unaffected. `token_ids` includes the token that ended the text. `logprobs`, if
    requested, has one entry per token (and, before them, one per prompt token with `echo`).
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    num_cached_tokens: int  # prompt tokens read from the prefix cache
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenEntry] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of every prompt token but the first, if requested
    error: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()  # of a chat: id, name and arguments of each call
    reasoning: str = ""  # of a chat whose model writes it apart from the text
    outputs: tuple["Completion", ...] = ()  # of n choices, in order; () for n = 1


class LLM:
    """A loaded model and its engine. Not thread-safe. A call runs to completion and leaves its KV in the prefix cache.

    With `kv_store`, computed blocks are written to disk in the background. `close`, or the end of a `with` block,
    writes the blocks that are still pending; otherwise this happens on garbage collection or at interpreter exit.
    """

    def __init__(self, model: str = "", **engine_options: Any) -> None:
        """Load `model`: a folder, GGUF file or hub id (empty: the bundled one). Options: EngineOptions in config/.

        The duration of a step is unbounded unless `max_step_time` is set, since a call returns only when all is done;
        with `kv_store` it is at most 0.4 s.
        Raises ConfigError for unknown options and for a model that cannot be served.
        """
        options = _engine_options(model, engine_options)
        check_engine_installed()
        configure_num_threads(options.threads)
        engine, info = _build(options)
        self._adopt(engine, info, Tokenizer.from_folder(info.model))

    @classmethod
    def from_engine(cls, engine: Engine, info: EngineInfo, tokenizer: Tokenizer) -> "LLM":
        """Return an LLM that uses an existing engine."""
        llm = cls.__new__(cls)
        llm._adopt(engine, info, tokenizer)  # noqa: SLF001
        return llm

    def _adopt(self, engine: Engine, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer
        eos_token_ids = info.eos_token_ids or tokenizer.eos_token_ids
        self._bounds = RequestBounds(
            info.vocab_size,
            info.max_sequence_len,
            eos_token_ids,
            max_prompts=sys.maxsize,
            scheduling_policy=info.scheduling_policy,
            defaults=info.sampling_defaults,
            content_forms=tokenizer.content_forms,
            min_boundary=info.checkpoint_tokens,
            closes_objects=closes_objects_by_default(info),
            unreadable_parts=REFUSE,  # no header could name what is lost
        )
        self._ids = (f"llm-{number}" for number in itertools.count())
        self._closing = weakref.finalize(self, engine.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; takes some seconds if its store has many pending writes. Later calls raise an error."""
        self._closing()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: those of the model's generation_config.json, else the API's.

        For `dataclasses.replace(llm.get_default_sampling_params(), max_tokens=64)`. A SamplingParams passed to
        `generate` replaces all defaults; a mapping replaces only those it names.
        """
        set_by_model: dict[str, Any] = dataclasses.asdict(self._bounds.defaults)
        return SamplingParams(**{name: value for name, value in set_by_model.items() if value is not None})

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling: Sampling = None,
        *,
        progress: bool = True,
        sampling_params: Sampling = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Return one Completion per prompt, in order. A prompt is a text or a list of token ids.

        `sampling` is a SamplingParams or a mapping such as {"temperature": 0, "max_tokens": 64, "stop": ["\\n"]}, by
        default {}. Parameters that a mapping omits have the model's defaults (`get_default_sampling_params`). Raises
        InvalidRequestError before anything runs if a prompt or a parameter is invalid. Ctrl-C aborts all prompts and
        leaves the engine usable. `sampling_params`, `prompt_token_ids` and `use_tqdm` are vLLM's names of the others.
        """
        prompts, sampling = prompts if prompts is not None else prompt_token_ids, sampling or sampling_params
        progress = progress and use_tqdm
        if prompts is None:
            raise InvalidRequestError("generate needs prompts")
        params = self._params(sampling, ParamsKind.COMPLETION)
        body = CompletionBody(None, parse_prompts(prompts, self._bounds), params)
        prompts = encode_completion(body, self.tokenizer, self._bounds)
        return self._run(prompts, [params] * len(prompts), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Return one Completion per conversation, in order. A single conversation is a list of messages.

        Like `generate`, but prompts are rendered by the model's chat template. If neither the caller nor the model's
        defaults set max_tokens, the output is limited by the context only. `tools` are functions in OpenAI's form that
        the model may call: see `Completion.tool_calls`; `sampling` may contain tool_choice and the like.
        """
        params = self._params(sampling, ParamsKind.CHAT, tools)
        several = bool(messages) and isinstance(messages[0], list | tuple)
        prompts: list[ChatPrompt] = []
        for conversation in messages if several else [messages]:
            check_json_depth(conversation)
            body = ChatBody(
                None, messages_for_template(parse_messages(conversation, self._bounds), self._bounds), params
            )
            prompts.append(render_and_tokenize_chat(body, self.tokenizer, self._bounds))
        texts = [prompt.token_ids for prompt in prompts]
        outputs = [with_chat_output_format(params, text, self.tokenizer, self._bounds) for text in texts]
        return self._run(texts, outputs, progress, [prompt.boundary for prompt in prompts])

    def add_prefix(
        self, prefix: str | Sequence[Mapping[str, Any]] | Sequence[int], name: str, *, progress: bool = True
    ) -> PrefixInfo:
        """Compute and pin a prefix: a text, a conversation or token ids. Prompts that begin with it read it from cache.

        Returns when the prefix is computed. Of a text or a conversation, the tokens that every continuation shares are
        pinned, in whole blocks. Raises InvalidRequestError if the prefix cannot be pinned; then nothing is kept.
        """
        self._check_open()
        check_json_depth(prefix)
        body = parse_prefix({"name": name, prefix_field_name(prefix): prefix}, self._bounds)
        self.engine.add_prefix(name, encode_prefix(body, self.tokenizer, self._bounds))
        try:
            with GenerationProgress(1, show=progress, label="computing the prefix"):
                while (info := self._prefix(name)).state is PrefixState.WARMING:
                    with deferred_interrupt():
                        self.engine.step(time.monotonic())
        except KeyboardInterrupt:
            self.engine.remove_prefix(name)
            raise
        if info.state is PrefixState.READY:
            return info
        self.engine.remove_prefix(name)
        raise InvalidRequestError(f"prefix {name!r} could not be computed: {info.error}")

    def remove_prefix(self, name: str) -> bool:
        """Unpin a prefix: its blocks become evictable. Return False if there is no prefix of that name."""
        return self.engine.remove_prefix(name)

    def list_prefixes(self) -> list[PrefixInfo]:
        """Return the pinned prefixes with their hits and saved tokens."""
        return self.engine.list_prefixes()

    def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Drop all cached blocks except pinned prefixes; return False if requests are still running.

        `external` also clears the store, for every process that uses its folder; without it, prompts can still be
        loaded from the store.
        """
        return self.engine.reset_prefix_cache(external=external)

    def _prefix(self, name: str) -> PrefixInfo:
        return next(info for info in self.engine.list_prefixes() if info.name == name)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise InvalidRequestError("this LLM is closed; build another one")

    def _params(
        self, sampling: Sampling, kind: ParamsKind, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> GenerationParams:
        self._check_open()
        values = _plain_sampling(sampling, kind)
        if tools is not None:
            check_json_depth(tools)
            values = {**values, "tools": tools}
        params = parse_params(values, self._bounds, kind)
        if params.ignored:
            raise InvalidRequestError(
                f"unknown sampling parameter {params.ignored[0]!r}; see the documentation of /v1/completions for names",
                param=params.ignored[0],
            )
        if params.stream:
            raise InvalidRequestError("stream works over HTTP only; leave it out", param="stream")
        if params.sampling.grammar is not None:
            try:
                self.engine.compile_grammar(params.sampling.grammar)
            except InvalidRequestError as error:
                error.param = params.grammar_field
                raise
        return params

    def _run(
        self,
        prompts: "list[array[int]]",
        params: Sequence[GenerationParams],
        progress: bool,
        boundaries: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Run the prompts, each with its own parameters, which differ in the output of a chat only."""
        if not prompts:
            return []
        if dropped := params[0].dropped:
            warnings.warn(f"answers may not keep to {dropped_keywords_header(dropped)}", stacklevel=3)
        n = params[0].n
        requests = build_requests(prompts, params[0], self._bounds, RequestOrigin(next(self._ids)), boundaries)
        stops = StopStringAutomata(params[0].stop)
        shared = [EchoedPrompt(self.tokenizer, *pair) for pair in zip(prompts, params, strict=True)]
        generations: dict[str, GeneratedOutput] = {}
        for index, request in enumerate(requests):
            own, prompt = params[index // n], shared[index // n]
            requests[index] = request = _with_grammar(request, own.sampling.grammar)
            generations[request.request_id] = GeneratedOutput(self.tokenizer, request, own, prompt=prompt, stops=stops)
        with GenerationProgress(len(requests), show=progress) as bar:
            self._finish_all(requests, generations, bar)
        completions = [_completion(request, generations[request.request_id], params[0]) for request in requests]
        if n == 1:
            return completions
        groups = [completions[start : start + n] for start in range(0, len(completions), n)]
        return [dataclasses.replace(group[0], outputs=tuple(group)) for group in groups]

    def _finish_all(
        self, requests: list[Request], generations: dict[str, GeneratedOutput], bar: GenerationProgress
    ) -> None:
        """Step the engine until every generation is finished. On an exception, abort the unfinished requests."""
        unfinished: set[str] = set()
        try:
            for request in requests:
                unfinished.add(request.request_id)
                with deferred_interrupt():
                    self.engine.add_request(request)
            while unfinished:
                with deferred_interrupt():
                    outputs = self.engine.step(time.monotonic())
                for output in outputs:
                    generation = generations.get(output.request_id)
                    if generation is None or output.request_id not in unfinished:
                        continue
                    delta = generation.update(output)
                    bar.record_tokens(len(output.token_ids))
                    if delta.must_abort:
                        with deferred_interrupt():
                            self.engine.abort(output.request_id)
                    if delta.finish_reason is not None:
                        unfinished.discard(output.request_id)
                        bar.record_finished(generation.num_prompt_tokens, generation.num_cached_tokens)
                assert self.engine.has_work or not unfinished, f"the engine forgot {len(unfinished)} requests"
        finally:
            with deferred_interrupt():
                for request_id in unfinished:
                    self.engine.abort(request_id)


def _build(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    assembly = importlib.import_module(
        "headstart.engine.assembly"
    )  # brings torch, which reads the thread settings on import
    return assembly.build_engine(options)


def _engine_options(model: str, values: Mapping[str, Any]) -> EngineOptions:
    aliases = {
        field.metadata["alias"].replace("-", "_"): field.name
        for field in dataclasses.fields(EngineOptions)
        if "alias" in field.metadata
    }
    defaults: dict[str, Any] = {"model": model, "max_step_time": 0.0}  # offline: no client reads between two steps
    named = defaults | {aliases.get(name, name): value for name, value in values.items()}
    known = {field.name for field in dataclasses.fields(EngineOptions)}
    unknown = sorted(set(named) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
    for field in dataclasses.fields(EngineOptions):
        value = named.get(field.name)
        if field.metadata.get("json") and isinstance(value, Mapping):
            named[field.name] = json.dumps(value)
        if "choices" in field.metadata and type(value) is int:  # activation_bits=8
            named[field.name] = str(value)
    options = EngineOptions(**named)
    check_option_values(options)
    return options


def _plain_sampling(sampling: object, kind: ParamsKind) -> Mapping[str, Any]:
    """Return the sampling parameters as fields of a request body, so that a SamplingParams is validated like one."""
    if sampling is None:
        return {}
    if not isinstance(sampling, SamplingParams):
        if not isinstance(sampling, Mapping):
            raise InvalidRequestError("sampling must be a SamplingParams or a mapping of names to values")
        check_json_depth(sampling)
        return sampling
    values: dict[str, Any] = dataclasses.asdict(sampling)
    values["logit_bias"] = dict(sampling.logit_bias)
    del values["grammar"]
    if kind is ParamsKind.CHAT:
        wanted = values.pop("logprobs")
        values |= {} if wanted is None else {"logprobs": True, "top_logprobs": wanted}
    return values


def _with_grammar(request: Request, grammar: str | None) -> Request:
    if request.sampling.grammar == grammar:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=grammar))


def _completion(request: Request, generation: GeneratedOutput, params: GenerationParams) -> Completion:
    assert generation.finish_reason is not None
    chat = generation.chat
    of_prompt = None if params.sampling.prompt_logprobs is None else generation.prompt.logprobs
    return Completion(
        prompt_token_ids=list(request.prompt),
        text=generation.text_with_echo if chat is None else chat.content,
        token_ids=generation.token_ids,
        num_cached_tokens=generation.num_cached_tokens,
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
        logprobs=[*(generation.echo or ()), *generation.logprobs] if params.wants_logprobs else None,
        prompt_logprobs=None
        if of_prompt is None
        else [of_prompt.token_logprob_at(index) for index in range(len(of_prompt))],
        error=generation.error,
        tool_calls=() if chat is None else chat.tool_calls,
        reasoning="" if chat is None else chat.reasoning,
    )
