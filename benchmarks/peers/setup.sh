#!/bin/sh
# Makes the environment of a peer: benchmarks/peers/setup.sh PEER FOLDER, of vllm, llamacpp and transformers.
# It ends up in FOLDER/PEER, where `run.py --environments FOLDER` finds it. PYTHON names the interpreter (3.11).
# TORCH_INDEX: an index that has torch for CPUs, where the default one does not.
set -eu
peer=${1:?usage: setup.sh vllm|llamacpp|transformers FOLDER}
folder=${2:?usage: setup.sh vllm|llamacpp|transformers FOLDER}/$peer
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

make_environment() { # torch comes first: what follows must not replace it by another build
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
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
*)
    echo "no such peer: $peer (vllm, llamacpp, transformers)" >&2
    exit 2
    ;;
esac
echo "$folder is ready" >&2
