"""Greedy answers of Headstart on a GGUF file: python ours.py FILE OUT [--dtype float32] [--num 40] [--tokens 48].

Prompts are the beginnings of Python's own documentation topics (pydoc_data), as chats. OUT is JSON: per prompt the
rendered text, its token ids, the answer's token ids, and for each of them the log-probabilities of the two best tokens.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

from headstart import LLM

LENGTHS = (200, 800, 2400)  # characters of a topic


def conversations(count: int) -> list[str]:
    """Return the first `count` prompts, of three lengths in turn."""
    names = sorted(topics)
    texts = [topics[names[i % len(names)]][: LENGTHS[i % len(LENGTHS)]] for i in range(count)]
    return [f"What is this text about?\n\n{text}" for text in texts]


def main() -> None:
    """Write the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    chats = [[{"role": "user", "content": text}] for text in conversations(given.num)]
    sampling = {"temperature": 0, "max_tokens": given.tokens, "logprobs": True, "top_logprobs": 2}
    with LLM(
        given.file, dtype=given.dtype, quantization=given.quantization, max_model_len=2048, num_blocks=1024
    ) as llm:
        answers = llm.chat(chats, sampling)
        rows = [
            {
                "text": llm.tokenizer.render_chat_text(chat),
                "prompt": list(answer.prompt_token_ids),
                "tokens": list(answer.token_ids),
                "best": [[logprob for _, logprob in token.top[:2]] for token in answer.logprobs or ()],
            }
            for chat, answer in zip(chats, answers, strict=True)
        ]
    given.out.write_text(json.dumps({"dtype": given.dtype, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
