#!/usr/bin/env bash
# Makes llama.cpp's environment: build_llamacpp.sh FOLDER [PYTHON]. Needs a C++ compiler; may be run again.
#
# The wheel of llama-cpp-python is not built: its sdist carries llama.cpp's source, and one native build of that gives
# llama-server, which no wheel has, and libllama, which the bindings of the sdist then load. All of it lies in FOLDER:
# bin/python, src/ (the sdist), build/bin/ (the programs and libraries), models/ (GGUF files, written by the driver).
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the environment is missing}")
python=${2:-python3}
version=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
source="$folder/src/llama_cpp_python-$version"

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/pip" install --quiet --requirement "$here/requirements-llamacpp.txt"
if [ ! -d "$source" ]; then
    mkdir -p "$folder/src"
    "$folder/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$folder/src" \
        "llama-cpp-python==$version"
    tar --extract --file "$source.tar.gz" --directory "$folder/src"
fi
if [ ! -x "$folder/build/bin/llama-server" ]; then
    "$folder/bin/cmake" -S "$source/vendor/llama.cpp" -B "$folder/build" -G Ninja \
        -DCMAKE_MAKE_PROGRAM="$folder/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    "$folder/bin/cmake" --build "$folder/build" --target llama --target llama-server
fi
ln -sfn "$folder/build/bin" "$source/llama_cpp/lib" # where the bindings look for libraries
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$source" >"$site/llama_cpp_source.pth" # makes the bindings importable without building them again
"$folder/bin/python" -c '
from llama_cpp import __version__, llama_cpp
print("llama-cpp-python", __version__, llama_cpp.llama_print_system_info().decode())'
