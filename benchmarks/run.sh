#!/bin/sh
# Measures the published figures and writes raw JSON and plots beside their READMEs: benchmarks/run.sh [FIGURE...]
# HEADSTART names the command (default: .venv/bin/headstart). A run that is not valid leaves the earlier file alone.
set -eu
cd "$(dirname "$0")/.."
headstart=${HEADSTART:-.venv/bin/headstart}

measure() { # measure "VERB" NAME ARGUMENT... | measure "lab VERB" NAME ARGUMENT... (NAME may have a folder of its own)
    verb=$1 out=benchmarks/${1#lab }/$2
    case $2 in */*) out=benchmarks/$2 ;; esac
    shift 2
    echo "== headstart bench $verb $*" >&2
    # shellcheck disable=SC2086  # HEADSTART may hold arguments, a verb of the lab is two words
    $headstart bench $verb "$@" --plot "$out.new.png" >"$out.json.new" || {
        rm -f "$out.new.png"
        echo "not valid: see $out.json.new" >&2
        exit 1
    }
    mv "$out.json.new" "$out.json"
    mv "$out.new.png" "$out.png"
}

all='rotations-tiny rotations intent intent-bundled twins fairness fairness-decode stall order page-aligned
    restart restart-float32 siblings write-behind'
figures=${*:-$all}
for figure in $figures; do
    case $figure in
    rotations-tiny) measure rotations tiny ;;
    rotations) measure rotations llama-100m --model llama-100m ;;
    intent) measure intent llama-100m --model llama-100m --seconds 30 --min-requests 40 ;;
    intent-bundled) measure intent bundled --no-load --accuracy --examples 200 ;;
    twins) measure shared-burst twins/llama-100m --model llama-100m --every ;;
    fairness) measure 'lab fairness' prefill ;;
    fairness-decode) measure 'lab fairness' decode --requests 4000 --output-tokens 48 --max-num-seqs 8 ;;
    stall) measure 'lab decode-stall' stall/llama-100m --model llama-100m ;;
    order) measure 'lab queue-cost' order/order ;;
    restart) measure 'lab restart' store/restart --model llama-100m ;;
    restart-float32) measure 'lab restart' store/restart_float32 --model llama-100m --dtype float32 --runs 1 ;;
    siblings) measure 'lab shared-store' store/siblings --model llama-100m ;;
    write-behind) measure 'lab write-behind' store/write_behind --model llama-100m ;;
    page-aligned) measure 'lab page-aligned' llama-100m --model llama-100m ;;
    *)
        echo "no such figure: $figure ($all)" >&2
        exit 2
        ;;
    esac
done
