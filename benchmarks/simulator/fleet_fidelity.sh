#!/bin/sh
# Compares a simulated fleet with a real one on two idle cores: fleet_fidelity.sh [predict|measure]; without: both.
# `predict` takes about 4 minutes, `measure` about 12. HEADSTART and PYTHON name the commands, MODEL a shape or folder.
set -eu
cd "$(dirname "$0")"
headstart=${HEADSTART:-../../.venv/bin/headstart}
python=${PYTHON:-../../.venv/bin/python}
model=${MODEL:-llama-3m}
stage=${1:-all}

calibrate() { # CORE FILE
    taskset -c "$1" "$headstart" simulate calibrate "$model" --threads 1 --out "$2" >/dev/null
}

if [ "$stage" != measure ]; then
    calibrate 1 fleet-alone.json
    scratch=$(mktemp -d)
    calibrate 0 "$scratch/other.json" &
    other=$!
    calibrate 1 fleet-beside.json
    wait "$other"
    rm -r "$scratch"
    "$python" fleet_fidelity.py overhead fleet-alone.json "$model" >fleet-overhead.json
    "$python" fleet_fidelity.py predict fleet-alone.json fleet-beside.json fleet-overhead.json "$model" >fleet-predictions.json
fi
if [ "$stage" != predict ]; then
    "$python" fleet_fidelity.py measure fleet-predictions.json "$model" >fleet-measured.json
    "$python" fleet_fidelity.py compare fleet-predictions.json fleet-measured.json >fleet-fidelity.json
fi
