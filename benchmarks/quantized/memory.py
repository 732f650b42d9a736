"""Load a model, generate tokens, and report the memory: `python memory.py FILE`; the last line is one JSON document.

Peak memory is that of the process, as the kernel counts it (VmHWM); it includes torch, the KV pool and all of the load.
"""

import argparse
import json
import time
from pathlib import Path

from headstart import LLM


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=16, help="to generate")
    parser.add_argument("--context", type=int, default=2048, help="tokens that the KV pool holds")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    llm = LLM(
        arguments.file,
        quantization=arguments.quantization,
        max_model_len=arguments.context,
        num_blocks=arguments.context // 16 + 2,
        threads=arguments.threads,
    )
    loaded = time.perf_counter()
    prompt = [list(range(300, 300 + 128))]
    sampling = {"temperature": 0, "max_tokens": arguments.tokens, "ignore_eos": True}
    tokens = llm.generate(prompt, sampling)[0].token_ids
    finished = time.perf_counter()
    assert len(tokens) == arguments.tokens, len(tokens)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    print(
        json.dumps(
            {
                "file_bytes": Path(arguments.file).stat().st_size if Path(arguments.file).is_file() else None,
                "load_seconds": loaded - began,
                "generate_seconds": finished - loaded,
                "peak_gib": int(status["VmHWM"].split()[0]) / 2**20,
                "resident_gib": int(status["VmRSS"].split()[0]) / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main()
