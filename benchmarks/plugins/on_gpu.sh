#!/bin/sh
# The plug-ins that need a GPU, on one: sh benchmarks/plugins/on_gpu.sh MODEL FOLDER OUT, in the folder of the checkout.
# `python` is of an environment with vllm 0.32.0 and xxhash; MODEL is a folder with weights, FOLDER a new one for blocks,
# and OUT gets a file of JSON for each run: the asynchronous scheduler beside vLLM's, and the tier before and after SIGKILL.
set -eu
model=$1 folder=$2 out=$3
export PYTHONPATH="$PWD/src:$PWD/plugins/src:$PWD/plugins/tests/vllm_scripts" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
scripts=plugins/tests/vllm_scripts
mkdir -p "$out"
python "$scripts/use_engine.py" "$model" | tail -n 1 > "$out/scheduler-vllm.json"
python "$scripts/use_engine.py" "$model" headstart_plugins.vllm.AsyncScheduler | tail -n 1 > "$out/scheduler-ours.json"
python "$scripts/use_engine_tier.py" "$model" "$folder" kill > "$out/tier-first.txt" || true
tail -n 1 "$out/tier-first.txt" > "$out/tier-first.json"
python "$scripts/use_engine_tier.py" "$model" "$folder" end | tail -n 1 > "$out/tier-second.json"
python - "$out" <<'END'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
read = lambda name: json.loads((out / f"{name}.json").read_text())
alone, ours, first, second = map(read, ("scheduler-vllm", "scheduler-ours", "tier-first", "tier-second"))
name = "vllm:request_prefill_kv_computed_tokens"
print("burst, computed over ideal:", *(run["counters"][name] / run["ideal"] for run in (alone, ours)))
print("burst, equal answers:", sum(map(list.__eq__, alone["tokens"], ours["tokens"])), "of", len(ours["tokens"]))
print("tier, computed before and after SIGKILL:", *(run["counters"][name] for run in (first, second)))
print("tier, equal answers:", sum(map(list.__eq__, first["tokens"], second["tokens"])), "of", len(first["tokens"]))
END
