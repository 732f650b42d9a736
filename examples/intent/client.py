"""Ask a running server for the intents of held-out sentences behind one long preamble, and check every answer.

headstart serve                                   # in another shell
python examples/intent/client.py --num 20
python examples/intent/client.py --num 20 --swapped
"""

import argparse
import json
import sys
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent


def main() -> int:
    args = _parse()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    preamble = (HERE / ("preamble_swapped.txt" if args.swapped else "preamble.txt")).read_text(encoding="utf-8")
    lines = (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[: args.num]
    num_right = 0
    for line in lines:
        row = json.loads(line)
        expected = row["answer_swapped" if args.swapped else "answer"]
        answer, cached = ask(client, model, preamble, row["sentence"])
        is_right = answer.strip() == expected
        num_right += is_right
        print(f"{'ok   ' if is_right else 'wrong'}  cached {cached:4d}  {row['sentence']}\n       {answer}")
        if not is_right:
            print(f"       expected {expected}")
    accuracy = num_right / len(lines)
    kind = "swapped" if args.swapped else "plain"
    print(f"{num_right} of {len(lines)} right: {accuracy:.1%} ({model}, {kind} preamble)")
    return 0 if accuracy >= args.min_accuracy else 1


def ask(client: OpenAI, model: str, preamble: str, sentence: str) -> tuple[str, int]:
    """The answer to one sentence, and how many prompt tokens the server took from its cache."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": preamble}, {"role": "user", "content": sentence}],
        temperature=0,
        max_tokens=96,
    )
    details = reply.usage.prompt_tokens_details if reply.usage else None
    return reply.choices[0].message.content or "", (details.cached_tokens or 0) if details else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Send held-out sentences behind the example preamble to an OpenAI-compatible server.",
        epilog="Exit code 1 when the accuracy is below --min-accuracy.",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="server address (default %(default)s)")
    parser.add_argument("--api-key", default="none", help="API key, if the server wants one (default %(default)s)")
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--num", type=int, default=20, help="sentences to ask, of 300 (default %(default)s)")
    parser.add_argument("--swapped", action="store_true", help="use the preamble with the codes dealt anew")
    parser.add_argument(
        "--min-accuracy",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="least share of right answers, 0 to 1 (default 0)",
    )
    args = parser.parse_args()
    if args.num < 1:
        parser.error(f"--num must be at least 1, not {args.num}")
    return args


if __name__ == "__main__":
    sys.exit(main())
