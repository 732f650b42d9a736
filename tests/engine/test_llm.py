"""LLM: batches in order, choices, errors of one row, interruption; and the real engine on a tiny model."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checking import VOCAB, executor_of, expected_tokens, make_engine
from tokenizer_folders import BYTE_LEVEL, TEMPLATE, build

import headstart
from headstart import LLM, SamplingParams
from headstart.core.batch import Chunk, RequestStepOutput
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError, InvalidRequestError, RequestTooLargeError
from headstart.core.request import NO_DEFAULTS, FinishReason, Request, SamplingDefaults
from headstart.engine import llm as llm_module
from headstart.model.weights.init_model import write_random_model
from headstart.openai.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build(BYTE_LEVEL), chat_template=TEMPLATE)
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def make_llm(defaults: SamplingDefaults = NO_DEFAULTS, **engine: object) -> LLM:
    """An LLM over the checking executor: what it answers can be predicted by `expected_tokens`."""
    made = make_engine(num_blocks=200, block_size=4, **engine)  # type: ignore[arg-type]
    policy = str(engine.get("policy", "fcfs"))
    info = EngineInfo("tiny", "tiny", VOCAB, 64, 4, 199, 0, "float32", "cpu", 1, "reference", (1,), policy)
    info = dataclasses.replace(info, sampling_defaults=defaults)
    return LLM.from_engine(made, info, TOKENIZER)


def test_a_batch_is_answered_in_its_order() -> None:
    prompts = [[5, 6, 7], [8], list(range(20, 40)), [9] * 11]
    completions = make_llm(max_seqs=2).generate(prompts, GREEDY)
    assert [completion.prompt_token_ids for completion in completions] == prompts
    assert [completion.token_ids for completion in completions] == [expected_tokens(p, 6) for p in prompts]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert all(c.text == TOKENIZER.decode(c.token_ids) and c.outputs == () for c in completions)


@pytest.mark.parametrize("prompts", ["&'(", ["&'("], [10, 11, 12], [[10, 11, 12]]])
def test_one_prompt_may_be_given_in_any_form(prompts: object) -> None:
    [completion] = make_llm().generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert completion.token_ids == expected_tokens(completion.prompt_token_ids, 6)


def test_a_chat_with_tools_reports_calls_and_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TEMPLATE + "{# tools <tool_call> <think> #}"
    llm = make_llm()
    llm.tokenizer = Tokenizer(build(BYTE_LEVEL), chat_template=template)
    text = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    *output, end = llm.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)

    def step(now: float) -> list[RequestStepOutput]:
        ids = [request.request_id for request in requests]
        requests.clear()
        return [RequestStepOutput(request_id, (*output, end), (), FinishReason.STOP) for request_id in ids]

    requests: list[Request] = []
    seen: list[Request] = []
    monkeypatch.setattr(llm.engine, "add_request", lambda request: (requests.append(request), seen.append(request)))
    monkeypatch.setattr(llm.engine, "step", step)
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "go"}]
    [completion] = llm.chat(chat, {"max_tokens": 8}, tools=tools)
    assert (completion.text, completion.reasoning, completion.finish_reason) == ("ok", "hm", "tool_calls")
    [call] = completion.tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}') and call.call_id.startswith("call_")
    assert completion.token_ids == [*output, end]
    [plain] = llm.chat(chat, {"max_tokens": 8, "tool_choice": "none"}, tools=tools)
    assert plain.tool_calls == () and plain.text.startswith("ok<tool_call>")
    seen.clear()
    llm.chat([chat, chat], {"max_tokens": 8, "tool_choice": "required"}, tools=tools)
    assert len(seen) == 2 and all("tool_call" in str(request.sampling.grammar) for request in seen)


def sampled(llm: LLM, ask: Callable[[], object]) -> SamplingParams:
    """Return the parameters that the engine samples with; the stop ids of the model are left out."""
    found: list[SamplingParams] = []
    add = llm.engine.add_request

    def note(request: Request) -> None:
        found.append(dataclasses.replace(request.sampling, stop_token_ids=()))
        add(request)

    llm.engine.add_request = note  # type: ignore[method-assign]
    ask()
    llm.engine.add_request = add  # type: ignore[method-assign]
    [only] = found
    return only


def test_the_models_defaults_hold_for_what_is_not_said() -> None:
    llm = make_llm(SamplingDefaults(temperature=0.0, top_k=7, max_tokens=5))
    default = SamplingParams(temperature=0.0, top_k=7, max_tokens=5)
    assert llm.get_default_sampling_params() == default
    chat = [{"role": "user", "content": "the fox"}]
    for ask in (llm.generate, llm.chat):
        prompt: Any = chat if ask == llm.chat else "the fox"
        assert sampled(llm, lambda ask=ask, prompt=prompt: ask(prompt)) == default
        some = sampled(llm, lambda ask=ask, prompt=prompt: ask(prompt, {"top_k": 0, "max_tokens": None}))
        assert some == dataclasses.replace(default, top_k=0)


def test_sampling_params_win_as_a_whole() -> None:
    llm = make_llm(SamplingDefaults(temperature=0.0, top_k=7, top_p=0.5, min_p=0.1, max_tokens=5))
    assert sampled(llm, lambda: llm.generate("the fox", SamplingParams())) == SamplingParams()
    assert sampled(llm, lambda: llm.generate("the fox", llm.get_default_sampling_params())).max_tokens == 5


def test_a_model_without_defaults_samples_as_the_api_does() -> None:
    llm = make_llm()
    assert llm.get_default_sampling_params() == SamplingParams() == sampled(llm, lambda: llm.generate("the fox"))


def test_a_repeated_prompt_is_cached() -> None:
    llm, prompt = make_llm(), list(range(30))
    assert [llm.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 28]
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_the_cache_fields_of_the_http_api_work_here_too() -> None:
    llm, prompt = make_llm(), list(range(30))

    def cached(**fields: object) -> int:
        return llm.generate([prompt], {**GREEDY, **fields})[0].num_cached_tokens

    assert [cached(cache="bypass"), cached(cache="read-only"), cached(prompt_cache_options={"mode": "explicit"})] == [
        0
    ] * 3
    assert [cached(cache_priority=80, cache_ttl=60), cached(prompt_cache_key="k"), cached(cache_salt="s")] == [0, 28, 0]


def test_a_priority_is_refused_unless_the_policy_has_priorities() -> None:
    urgent = {**GREEDY, "priority": -1}
    assert make_llm(policy="priority").generate([[5]], urgent)[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="Priority scheduling is not enabled"):
        make_llm().generate([[5]], urgent)


def test_several_choices_stand_together() -> None:
    first, second = make_llm().generate([[5, 6], [7]], {**GREEDY, "n": 3})
    assert [len(first.outputs), len(second.outputs)] == [3, 3]
    assert first.text == first.outputs[0].text
    assert [choice.token_ids for choice in second.outputs] == [expected_tokens([7], 6)] * 3


def test_the_default_is_sixteen_tokens_and_a_chat_fills_the_context() -> None:
    llm = make_llm()
    assert len(llm.generate([[5]], {"ignore_eos": True})[0].token_ids) == 16
    # the template's words lie beyond the tiny vocabulary of the checking engine, but it does not mind
    [completion] = llm.chat([{"role": "user", "content": "!"}], {"ignore_eos": True})
    assert len(completion.prompt_token_ids) + len(completion.token_ids) == 64


def test_conversations_come_in_batches_too() -> None:
    chats = [[{"role": "user", "content": content}] for content in ("!", "?")]
    completions = make_llm().chat(chats, GREEDY)
    assert [c.prompt_token_ids for c in completions] == [
        list(TOKENIZER.encode(TOKENIZER.render_chat_text(chat), add_special_tokens=False)) for chat in chats
    ]


def test_a_stop_string_ends_one_row_and_frees_it() -> None:
    llm = make_llm()
    tokens = expected_tokens([5], 6)
    stop = TOKENIZER.decode(tokens)[1:3]
    stopped, other = llm.generate([[5], [6]], {**GREEDY, "stop": stop})
    assert llm.generate([[5]], {**GREEDY, "max_tokens": 40, "stop": stop})[0].text == stopped.text
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (TOKENIZER.decode(tokens)[:1], "stop", stop)
    assert other.finish_reason == "length"
    assert not llm.engine.has_work and llm.reset_prefix_cache()


def test_sampling_params_and_a_mapping_say_the_same() -> None:
    llm = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias=((3, 1.0),), stop_token_ids=(90,))
    mapping = {"temperature": 0, "max_tokens": 6, "logit_bias": {"3": 1.0}, "stop_token_ids": [90]}
    assert llm.generate([[5]], params) == llm.generate([[5]], mapping)
    assert llm.chat([{"role": "user", "content": "!"}], params)


def test_a_failed_row_is_told_on_its_own_result_and_harms_no_other() -> None:
    def poison(chunk: Chunk) -> bool:
        return chunk.history[0] == 66

    good, bad, fine = make_llm(poison=poison).generate([[5, 6], [66, 6], [7]], GREEDY)
    assert (bad.finish_reason, bad.error, bad.token_ids) == ("error", "not finite", [])
    assert [good.token_ids, fine.token_ids] == [expected_tokens([5, 6], 6), expected_tokens([7], 6)]


@pytest.mark.parametrize(
    ("prompts", "sampling", "match"),
    [
        ([[5]], {"temperature": -3}, "temperature is -3"),
        ([[5]], {"tempreature": 1}, "unknown sampling parameter 'tempreature'"),
        ([[5]], {"stream": True}, "stream works over HTTP only"),
        ([[5]], 5, "must be a SamplingParams or a mapping"),
        ([[97]], {}, "prompt is 97; it must be between 0 and 96"),
        ([], {}, "empty list"),
        (5, {}, "prompt is 5"),
        ("", {}, "prompt is empty"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(prompts, sampling, match: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match=match):
        llm.generate(prompts, sampling)
    assert executor_of(llm.engine).batches == []


def test_a_prompt_that_is_too_long_is_told_by_its_number() -> None:
    with pytest.raises(RequestTooLargeError, match=r"^prompt 1: prompt is too long: 64 tokens > 63 maximum"):
        make_llm().generate([[5], [6] * 64, [7]], GREEDY)


def test_an_error_of_the_engine_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    add = llm.engine.add_request

    def add_two(request: object) -> None:
        if llm.engine.stats().num_waiting == 2:
            raise RequestTooLargeError("the pool is too small")
        add(request)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine, "add_request", add_two)
    with pytest.raises(RequestTooLargeError, match="pool is too small"):
        llm.generate([[5], [6], [7]], GREEDY)
    assert not llm.engine.has_work


def test_ctrl_c_aborts_everything_after_a_whole_step_and_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm()
    handler = signal.getsignal(signal.SIGINT)
    step, steps = llm.engine.step, []

    def interrupted_step(now: float) -> list[RequestStepOutput]:
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        steps.append(1)
        return step(now)

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6], [7]], GREEDY)
    assert len(steps) == 3
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is handler
    assert llm.generate([[5]], GREEDY)[0].token_ids == expected_tokens([5], 6)


def test_generate_works_outside_the_main_thread() -> None:
    llm, done = make_llm(), []
    thread = threading.Thread(target=lambda: done.append(llm.generate([[5]], GREEDY)))
    thread.start()
    thread.join(timeout=300)
    assert done[0][0].token_ids == expected_tokens([5], 6)


def test_an_unknown_option_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_len'; the options are .*max_model_len"):
        LLM("x", max_len=5)


def test_a_choice_among_numbers_may_be_a_number() -> None:
    assert llm_module._engine_options("", {"activation_bits": 8}).activation_bits == "8"
    with pytest.raises(ConfigError, match="activation_bits is '9'; choose one of 16, 8"):
        llm_module._engine_options("", {"activation_bits": 9})


def test_steps_of_a_batch_are_not_bounded_in_time_unless_asked_for() -> None:
    assert llm_module._engine_options("", {}).max_step_time == 0
    assert llm_module._engine_options("", {"max_step_time": 0.5}).max_step_time == 0.5


def test_the_real_engine_has_no_step_bound(real: LLM) -> None:
    assert real.engine.scheduler.limits.max_step_time is None


def test_importing_headstart_imports_no_torch() -> None:
    code = (
        "import sys, headstart\n"
        "light = len(sys.modules)\n"
        "from headstart import LLM, Completion, SamplingParams\n"
        "print('torch' in sys.modules, light < 120, LLM.__name__, 'LLM' in dir(headstart))\n"
    )
    path = {"PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=os.environ | path
    )
    assert run.stdout.split() == ["False", "True", "LLM", "True"]
    with pytest.raises(AttributeError):
        _ = headstart.nothing


# ---------------------------------------------------------------------------------------------------- the real engine


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_random_model("tiny", tmp_path_factory.mktemp("m") / "tiny", std=0.2, dtype="float32", progress=False)
    return LLM(str(folder), dtype="float32", num_blocks=64, max_model_len=256, threads=1)


def test_the_real_engine_answers_the_same_alone_batched_and_cached(real: LLM) -> None:
    assert isinstance(real.engine, Engine)
    prompts = ["The quick brown fox", "jumps over", "the lazy dog and the quick brown fox and the lazy dog"]
    alone = [real.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts]
    batched = real.generate(prompts, GREEDY)
    assert [c.token_ids for c in alone] == [c.token_ids for c in batched]
    assert batched[2].num_cached_tokens > 0 == alone[2].num_cached_tokens
    assert all(real.tokenizer.decode(c.token_ids) == c.text for c in batched)


def test_the_real_engine_gives_logprobs_of_prompt_and_output(real: LLM) -> None:
    [completion] = real.generate("the lazy dog", {**GREEDY, "logprobs": 2, "echo": True})
    assert completion.logprobs is not None
    assert [e.token_id for e in completion.logprobs] == completion.prompt_token_ids + completion.token_ids
    assert completion.logprobs[0].logprob is None
    for entry in completion.logprobs[1:]:
        assert entry.logprob is not None and entry.logprob <= 0
        assert entry.top[0][1] >= entry.top[1][1] >= entry.logprob or entry.token_id in dict(entry.top)
    for entry in completion.logprobs[len(completion.prompt_token_ids) :]:  # greedy: the best is what was chosen
        assert entry.top[0][0] == entry.token_id


def test_the_real_engine_gives_logprobs_of_the_prompt_alone(real: LLM) -> None:
    [completion] = real.generate("the lazy dog", {**GREEDY, "prompt_logprobs": 1})
    assert completion.prompt_logprobs is not None and completion.logprobs is None
    assert [entry.token_id for entry in completion.prompt_logprobs] == completion.prompt_token_ids[1:]


def test_the_real_engine_repeats_a_seed(real: LLM) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "n": 2, "ignore_eos": True}
    first, second = real.generate("the lazy", sampling)[0], real.generate("the lazy", sampling)[0]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert first.outputs[0].token_ids != first.outputs[1].token_ids


def test_the_real_engine_chats(real: LLM) -> None:
    [completion] = real.chat([{"role": "user", "content": "hello there"}], {**GREEDY, "logit_bias": {"70": 100}})
    assert completion.token_ids == [70] * 6


@pytest.mark.usefixtures("patient_store")
def test_what_is_computed_outlives_an_llm_that_is_closed_or_dropped(tmp_path: Path) -> None:
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    prompts = [list(range(start, start + 64)) for start in (0, 100)]

    def build() -> LLM:
        return LLM(str(model), num_blocks=64, kv_store=str(tmp_path / "kv"))

    def store_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-store")]

    with build() as llm:
        assert llm.generate(prompts[0], GREEDY)[0].num_cached_tokens == 0
        assert len(store_threads()) == 3
    assert store_threads() == []
    with pytest.raises(InvalidRequestError, match="this LLM is closed"):
        llm.generate(prompts[0], GREEDY)
    with pytest.raises(InvalidRequestError, match="this LLM is closed"):
        llm.add_prefix(prompts[0], "p")
    llm.close()
    llm = build()
    assert [done.num_cached_tokens for done in llm.generate(prompts, GREEDY)] == [63, 0]
    del llm
    again = build()
    assert [done.num_cached_tokens for done in again.generate(prompts, GREEDY)] == [63, 63]
    assert again.reset_prefix_cache(external=True)
    assert [done.num_cached_tokens for done in again.generate(prompts, GREEDY)] == [0, 0]
    again.close()


def test_what_is_computed_outlives_a_script_that_just_ends(tmp_path: Path) -> None:
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    script = f"""
import patience
from headstart import LLM
patience.prefer_the_store(setattr)
llm = LLM({str(model)!r}, num_blocks=64, kv_store={str(tmp_path / "kv")!r})
print(llm.generate(list(range(64)), {{"max_tokens": 1}}, progress=False)[0].num_cached_tokens)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", script]
    shown = [subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert [(done.stdout, done.returncode) for done in shown] == [("0\n", 0), ("63\n", 0)], shown


def test_a_script_for_vllm_runs_with_another_import() -> None:
    """The calls of vLLM #3402's script, with fewer and shorter prompts."""
    llm = headstart.LLM(model="", enable_prefix_caching=True, block_size=16)
    sampling_params = headstart.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    tokens = list(range(3, 68))
    rotated = [tokens[i:] + tokens[:i] for i in range(4)]
    llm.generate(sampling_params=sampling_params, prompt_token_ids=rotated, use_tqdm=False)
    again = llm.generate(sampling_params=sampling_params, prompt_token_ids=rotated, use_tqdm=False)
    assert [(len(one.token_ids), one.num_cached_tokens) for one in again] == [(1, 64)] * 4
