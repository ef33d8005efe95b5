"""The engines of the comparison, and where they are installed.

Ours runs on this Python and this source tree. A peer runs on the Python of its own virtual
environment: a folder of its name below the peers' folder, or wherever ``--peer NAME=FOLDER`` says.
A variant is an engine once more, with other settings; with weights of 8 or 4 bits, each engine
takes the format that its users take.
"""

import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Engine:
    """One column of the table.

    Attributes:
        name: What it is called on the command line and in JSON.
        title: What it is called in tables.
        worker: Its file in ``workers``.
        home: Name of the virtual environment; None is the Python that runs this.
        settings: Given to its worker besides those that all get.
    """

    name: str
    title: str
    worker: str
    home: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def base(self) -> str:
        """The name of the engine that it is a variant of."""
        return self.name.partition("@")[0]

    @property
    def kind(self) -> str:
        """In what measures it takes part: ``serve``, ``http`` or ``manage``."""
        if self.worker == "http_client":
            return "http"
        return "manage" if self.worker.startswith("manager_") else "serve"

    @property
    def is_ours(self) -> bool:
        """Whether it is this project, in whichever variant."""
        return self.home is None


OURS = Engine("ours", "Ostinato", "ours")
OURS_NEVER = Engine(
    "ours:never", "Ostinato, read per request", "ours", None, {"read_once": "never"}
)
OURS_STREAMED = Engine("ours:streamed", "Ostinato, streamed", "ours", None, {"streamed": True})
PEERS = (
    Engine("vllm", "vLLM", "vllm", "vllm"),
    Engine("vllm-zen", "vLLM, zentorch", "vllm", "vllm_zen"),
    Engine("openvino", "OpenVINO GenAI", "openvino", "openvino"),
    Engine("llamacpp", "llama.cpp", "llamacpp", "llamacpp"),
    Engine("transformers", "transformers", "transformers", "transformers"),
    Engine("transformers-cb", "transformers, batching", "transformers_cb", "transformers"),
)
SERVERS = (
    Engine("ours-server", "Ostinato", "http_client", None, {"server": "ours"}),
    Engine("vllm-server", "vLLM", "http_client", "vllm", {"server": "vllm"}),
    Engine("llamacpp-server", "llama.cpp", "http_client", "llamacpp", {"server": "llamacpp"}),
)
VLLM_HOMES = ("vllm", "vllm_zen")
MANAGERS = (
    Engine("ours-manager", "Ostinato", "manager_ours"),
    Engine("ours-manager:lru", "Ostinato, lru", "manager_ours", None, {"policy": "lru"}),
    Engine("vllm-manager", "vLLM", "manager_vllm", "vllm"),
    Engine("sglang-manager", "SGLang", "manager_sglang", "sglang"),
)

WEIGHTS: dict[int, dict[str, dict[str, Any]]] = {
    16: {"ours": {}, "openvino": {}, "llamacpp": {}},
    8: {
        "ours": {"quantization": "int8"},
        "ours:w8a8": {"quantization": "w8a8"},
        "ours:16": {"dtype": "bfloat16"},
        "openvino": {"weights": "int8"},
        "llamacpp": {"weights": "Q8_0"},
    },
    4: {
        "ours": {"quantization": "int4"},
        "ours:w4a8": {"quantization": "w4a8"},
        "ours:16": {"dtype": "bfloat16"},
        "openvino": {"weights": "int4"},
        "llamacpp": {"weights": "Q4_0"},
        "llamacpp@Q4_K_M": {"weights": "Q4_K_M"},
    },
}
"""Settings by bits of weights and by engine, of those that can have both weights and keys and
values in 8 bits or less; ours once more with activations of 8 bits, and with weights of 16."""

KV_OF_8_BITS: dict[str, dict[str, Any]] = {
    "ours": {"kv_cache_dtype": "int8"},
    "openvino": {"kv": "u8"},
    "llamacpp": {"kv": "Q8_0"},
}
"""Settings of engines that keep keys and values in 8 bits."""


def serving_engines(weight_bits: int = 16, kv_bits: int = 16) -> list[Engine]:
    """Return ours and the peers that can serve with weights and keys and values of so many bits."""
    if weight_bits == kv_bits == 16:
        return [OURS, OURS_NEVER, OURS_STREAMED, *PEERS]
    bases = {engine.name: engine for engine in (OURS, *PEERS)}
    variants = []
    for name, settings in WEIGHTS[weight_bits].items():
        base = bases[re.split("[@:]", name)[0]]
        kv = KV_OF_8_BITS[base.name] if kv_bits == 8 else {}
        title = ", ".join([base.title, *settings.values(), *(["8-bit KV"] if kv else [])])
        variants.append(replace(base, name=name, title=title, settings={**settings, **kv}))
    return variants


def parse_variant(text: str) -> Engine:
    """Read ``name:setting=value,...`` as a variant of ours, ``peer@name:...`` as one of a peer.

    Raises:
        ValueError: It is not of that form.
    """
    name, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not colon or any(not equals or not key for key, equals, _ in pairs):
        raise ValueError(f"{text!r} is no variant: write name:setting=value,setting=value")
    settings = {key: _value(value) for key, _, value in pairs}
    whose, at, _ = name.rpartition("@")
    if not at:
        return Engine(f"ours:{name}", f"Ostinato, {name}", "ours", None, settings)
    peer = next((peer for peer in (*PEERS, *SERVERS) if peer.name == whose), None)
    if peer is None:
        raise ValueError(f"{text!r}: no peer is called {whose!r}")
    return replace(
        peer,
        name=name,
        title=f"{peer.title}, {text[len(whose) + 1 :]}",
        settings={**peer.settings, **settings},
    )


def _value(text: str) -> Any:
    words = {"True": True, "true": True, "False": False, "false": False, "None": None}
    if text in words:
        return words[text]
    return int(text) if text.lstrip("-").isdecimal() else text


def python_of(engine: Engine, folder: Path | None, homes: dict[str, Path]) -> Path | None:
    """Return the Python that runs an engine's worker; None if it is not installed."""
    if engine.home is None:
        return Path(sys.executable)
    home = homes.get(engine.home) or (folder / engine.home if folder else None)
    python = home / "bin" / "python" if home else None
    return python if python is not None and python.exists() else None


def environment_of(engine: Engine, python: Path, threads: int) -> dict[str, str]:
    """Return the environment of a worker: its threads, and what its documentation asks for."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if engine.home is not None:
        environment["PYTHONPATH"] = str(ROOT)
    if engine.home in VLLM_HOMES:
        environment |= _environment_of_vllm(python, threads)
    return environment


def http_worker_of(
    engine: Engine, python: Path, threads: int
) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Return what runs the client of an engine's server, and what it starts the server with.

    All servers get our client: this Python, without what a peer wants preloaded. vLLM's
    server has its engine in a process of its own, and takes its threads from the cores it binds.
    """
    environment = environment_of(engine, python, threads)
    if engine.home in VLLM_HOMES:
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"], environment["OMP_NUM_THREADS"]
    server = {"python": str(python), "environment": environment, "threads": threads}
    here = Path(sys.executable)
    return here, environment_of(OURS, here, threads), server


def warnings_about(engine: Engine, python: Path) -> list[str]:
    """Say what an engine's documentation asks for and this machine has not."""
    if engine.home not in VLLM_HOMES:
        return []
    return [
        f"{engine.title}: {name} is not there to be preloaded, so its figures may be too low"
        for name, paths in _preloads_of_vllm(python).items()
        if not paths
    ]


def _preloads_of_vllm(python: Path) -> dict[str, list[Path]]:
    """Return where the libraries are that vLLM's documentation wants preloaded."""
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return {
        "libiomp5.so (intel-openmp)": [openmp] if openmp.exists() else [],
        "libtcmalloc_minimal.so.4 (libtcmalloc-minimal4)": sorted(
            Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
        )[:1],
    }


def _environment_of_vllm(python: Path, threads: int) -> dict[str, str]:
    """One process, its threads on cores of their own, tcmalloc and Intel's OpenMP preloaded."""
    libraries = [path for paths in _preloads_of_vllm(python).values() for path in paths]
    return {
        "LD_PRELOAD": os.pathsep.join(map(str, libraries)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
