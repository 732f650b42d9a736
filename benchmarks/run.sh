#!/bin/sh
# Measures the published figures and writes raw JSON and plots beside their READMEs: benchmarks/run.sh [FIGURE...]
# HEADSTART names the command (default: .venv/bin/headstart). A run that is not valid leaves the earlier file alone.
set -eu
cd "$(dirname "$0")/.."
headstart=${HEADSTART:-.venv/bin/headstart}

measure() { # measure FIGURE NAME ARGUMENT...
    figure=$1 out=benchmarks/$1/$2
    shift 2
    echo "== headstart bench $figure $*" >&2
    # shellcheck disable=SC2086  # HEADSTART may hold arguments
    $headstart bench "$figure" "$@" --plot "$out.new.png" >"$out.json.new" || {
        rm -f "$out.new.png"
        echo "not valid: see $out.json.new" >&2
        exit 1
    }
    mv "$out.json.new" "$out.json"
    mv "$out.new.png" "$out.png"
}

figures=${*:-rotations-tiny rotations intent intent-bundled}
for figure in $figures; do
    case $figure in
    rotations-tiny) measure rotations tiny ;;
    rotations) measure rotations llama-100m --model llama-100m ;;
    intent) measure intent llama-100m --model llama-100m ;;
    intent-bundled) measure intent bundled --no-load --accuracy ;;
    *)
        echo "no such figure: $figure (rotations-tiny, rotations, intent, intent-bundled)" >&2
        exit 2
        ;;
    esac
done
