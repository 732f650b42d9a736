"""lm-eval as released, against `headstart serve`: its log-likelihoods are those of Transformers. docs/clients.md."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from clients.client_runs import RUN_SECONDS, quiet_environment
from clients.environments import LM_EVAL, UnreachableError, environment
from clients.scripted_agent import bundled_server, router
from clients.scripts.checks import LABEL, SENTENCE, SYSTEM
from server.harness import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.bundled import bundled_intent_model_folder

pytestmark = pytest.mark.long
TOLERANCE = 1e-3
WINDOW = 2046  # the model's context, less the token before and the one that the server generates
QUESTIONS = [
    "Could you make it dark in the kitchen? ",
    "Naïve café, 日本語 and 🙂:",
    f"<|system|>{SYSTEM}<|end|><|user|>{SENTENCE}<|end|><|assistant|>",
]
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "choices": [{"question": question, "choices": [LABEL, " yes", " no, never"]} for question in QUESTIONS],
    "texts": [
        {"text": "Turn on the lights in the hall.\nThen call Diana."},
        {"text": "日本語 naïve 🙂"},
        {"text": "Call Diana again and again. " * 300},
    ],
    "answers": [{"question": QUESTIONS[-1], "answer": LABEL}],
}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
        "target_delimiter": "",
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Reference:
    """Log-likelihoods of the bundled model by Transformers, in float32."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(bundled_intent_model_folder())
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            bundled_intent_model_folder(), dtype=torch.float32
        ).eval()

    def of(self, context: list[int], tokens: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of tokens behind a context, and whether they are the greedy continuation."""
        with torch.no_grad():
            logits = self.model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
        wanted = torch.tensor(tokens)
        total = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
        return float(total), bool((logits.argmax(-1) == wanted).all())

    def of_pair(self, context: str, text: str) -> tuple[float, bool]:
        """Return the same of texts. The tokens of both together are those that a model reads; spaces belong behind."""
        kept = context.rstrip()
        whole, begin = (self.tokenizer.encode(one, add_special_tokens=False) for one in (context + text, kept))
        return self.of(whole[: len(begin)], whole[len(begin) :])

    def of_text(self, text: str) -> float:
        """Return the log-likelihood of a text alone, behind the end-of-sequence token, in windows of WINDOW tokens."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        total, done = self.of([self.tokenizer.eos_token_id], tokens[:WINDOW])[0], WINDOW
        while done < len(tokens):
            end = min(done + WINDOW, len(tokens))
            total, done = total + self.of(tokens[end - WINDOW - 1 : done], tokens[done:end])[0], end
        return total


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module", params=["direct", "routed"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server, or `headstart route` in front of two."""
    rooms = [tmp_path_factory.mktemp("lm-eval") for _ in range(2 if request.param == "routed" else 1)]
    with ExitStack() as stack:
        servers = [stack.enter_context(bundled_server(room, 1, "--dtype", "float32")) for room in rooms]
        yield servers[0] if len(servers) == 1 else stack.enter_context(router(rooms[0], servers))


def evaluate(server: Server, room: Path, tokenizer: str) -> dict[str, list[dict[str, Any]]]:
    """Run lm-eval's command over the tasks; return the samples of each."""
    try:
        folder = environment(LM_EVAL)
    except UnreachableError as error:
        pytest.skip(str(error))
    tasks = room / "tasks"
    tasks.mkdir()
    for name, task in TASKS.items():
        data = tasks / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS[name]), encoding="utf-8")
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, **files, **task}), encoding="utf-8")
    model = f"model=headstart-intent,base_url={server.url}/v1/completions,{tokenizer},max_retries=1"
    command = [str(folder / LM_EVAL.binary), "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", *TASKS, "--include_path", str(tasks), "--output_path", str(room / "out")]
    command += ["--log_samples", "--batch_size", "4"]
    settings = quiet_environment() | {"HF_HOME": str(room / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=settings, cwd=room, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    samples: dict[str, list[dict[str, Any]]] = {}
    for name in TASKS:
        [path] = (room / "out").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return samples


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_log_likelihoods_are_those_of_transformers(
    server: Server, reference: Reference, tokenizer: str, tmp_path: Path
) -> None:
    chosen = f"tokenizer_backend={tokenizer}" + (
        f",tokenizer={bundled_intent_model_folder()}" if tokenizer == "huggingface" else ""
    )
    samples = evaluate(server, tmp_path, chosen)
    assert {name: len(found) for name, found in samples.items()} == {name: len(DOCUMENTS[name]) for name in TASKS}
    for sample in samples["choices"]:
        asked = [(one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()]
        assert [text for _, text in asked] == sample["doc"]["choices"]
        for pair, [[told, is_greedy]] in zip(asked, sample["resps"], strict=True):
            due, is_due_greedy = reference.of_pair(*pair)
            assert float(told) == pytest.approx(due, abs=TOLERANCE, rel=0) and str(is_greedy) == str(is_due_greedy)
    assert samples["choices"][-1]["acc"] == 1.0
    for sample in samples["texts"]:
        [[told]] = sample["resps"]
        due = reference.of_text(sample["doc"]["text"])
        assert float(told) == pytest.approx(due, abs=TOLERANCE, rel=1e-6)  # a sum of thousands in float32
    assert [sample["resps"] for sample in samples["answers"]] == [[[LABEL]]]
