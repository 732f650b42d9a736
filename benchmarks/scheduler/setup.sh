#!/bin/sh
# Makes the environment of vLLM's scheduler in a folder: benchmarks/scheduler/setup.sh FOLDER
# PYTHON names an interpreter that has Headstart's packages (default: .venv/bin/python); they are seen, not copied.
set -eu
folder=${1:?usage: setup.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
packages='import sysconfig; print(sysconfig.get_path("purelib"))'

"$python" -m venv "$folder"
"$python" -c "$packages" >"$("$folder/bin/python" -c "$packages")/headstart-packages.pth"
"$folder/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
"$folder/bin/python" "$here/vllm_scheduler.py" >/dev/null
echo "$folder/bin/python measures vLLM's scheduler" >&2
