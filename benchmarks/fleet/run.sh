#!/bin/sh
# Measures the fleet and writes fleet.json and fleet.png beside this file: benchmarks/fleet/run.sh [FOLDER [FLAG...]]
# FOLDER holds the peers' environments (benchmarks/peers/setup.sh PEER FOLDER makes them); those that are there take part.
# HEADSTART names the command (default: .venv/bin/headstart). Twelve to fifteen minutes with three peers.
set -eu
cd "$(dirname "$0")/../.."
headstart=${HEADSTART:-.venv/bin/headstart}
out=benchmarks/fleet/fleet
folder=${1:-}
[ $# -eq 0 ] || shift
for peer in sglang-router smg vllm-router; do
    if [ -n "$folder" ] && [ -d "$folder/$peer" ]; then
        set -- "$@" --peer "$peer=$folder/$peer"
    fi
done
# shellcheck disable=SC2086  # HEADSTART may hold arguments
$headstart bench fleet --runs 3 --prompts 10 "$@" --plot "$out.new.png" >"$out.json.new" || {
    rm -f "$out.new.png"
    echo "not valid: see $out.json.new" >&2
    exit 1
}
mv "$out.json.new" "$out.json"
mv "$out.new.png" "$out.png"
