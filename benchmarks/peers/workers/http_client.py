"""OpenAI's own client, in a process of its own, in front of a server of ours or of a peer.

The server is started with the Python or the program of its engine, and belongs to this process's
group, so that both sleep and are counted together. Chats stream, one coroutine each::

    system prompt ─► turn ─► answer ─► turn ─► answer ...     (a turn of no outputs is the system's)
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import (
    Served,
    Talk,
    Worker,
    answer_questions,
    end_with_parent,
    now,
)

START_S = 900
"""How long a server may take to start: vLLM compiles when it first meets a model."""

MODEL = "model"
"""What every server calls the checkpoint."""


class HttpClient(Worker):
    """Speaks to one server, which it starts."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the server, and wait until it takes requests."""
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self.port = free_port()
        command = COMMANDS[settings["server"]](model, settings, self.port)
        self.server = subprocess.Popen(
            command, env=settings["environment"], stdout=sys.stderr, preexec_fn=end_with_parent
        )
        wait_until_ready(f"http://127.0.0.1:{self.port}/health", self.server)
        version = VERSIONS[settings["server"]](self._get)
        return {"version": version, "settings": {"command": shown(command, model)}}

    def serve(self, talks: list[Talk]) -> Served:
        """Stream chats, all at once; a turn begins when the answer before it has ended."""
        return asyncio.run(self._chat_all(talks))

    async def _chat_all(self, talks: list[Talk]) -> Served:
        import openai

        served, url = Served(cached=[]), f"http://127.0.0.1:{self.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=START_S) as client:
            start = now()
            await asyncio.gather(*(self._chat(client, talk, served, start) for talk in talks))
            served.seconds = now() - start
        return served

    async def _chat(self, client: Any, talk: Talk, served: Served, start: float) -> None:
        messages: list[dict[str, str]] = []
        for tokens, num_outputs in talk:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            role = "user" if num_outputs else "system"
            messages.append({"role": role, "content": text})
            if not num_outputs:
                continue
            answer = await self._answer(client, messages, num_outputs, served, start)
            messages.append({"role": "assistant", "content": answer})

    async def _answer(
        self, client: Any, messages: list[dict[str, str]], num: int, served: Served, start: float
    ) -> str:
        """Stream one answer, and note when its text came and what its usage says."""
        pieces, times, usage = [], [], None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=num,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                times.append(now() - start)
        if usage is None or usage.completion_tokens != num or not times:
            raise RuntimeError(f"{num} tokens were asked for, and the usage says {usage}")
        details = usage.prompt_tokens_details
        assert served.cached is not None
        served.cached.append((details.cached_tokens or 0) if details else 0)
        served.first.append(times[0])
        served.last.append(times[-1])
        served.tokens.append(num)
        return "".join(pieces)

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            data: bytes = answer.read()
        return data


def shown(command: list[str], model: str) -> str:
    """Write a server's command without the folders of this machine."""
    words = [word.replace(model, MODEL) for word in command]
    return " ".join([Path(words[0]).name, *words[1:]])


def wait_until_ready(url: str, server: "subprocess.Popen[Any]") -> None:
    """Wait until a server answers with success.

    Raises:
        RuntimeError: It has ended, or takes too long.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (status := server.poll()) is not None:
            raise RuntimeError(f"the server ended with status {status}")
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError:  # it does not listen yet, or loads
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {START_S} s")


@contextmanager
def running(
    command: Sequence[str | Path], url: str, **how: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server from the moment when ``url`` answers until the block ends.

    Raises:
        RuntimeError: See ``wait_until_ready``.
    """
    with subprocess.Popen(command, **how) as server:
        try:
            wait_until_ready(url, server)
            yield server
        finally:
            server.terminate()


def free_port() -> int:
    """Return a port of this machine that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def command_of_ours(model: str, settings: dict[str, Any], port: int) -> list[str]:
    """Start ours, with the settings that ``workers.ours`` gives to ``LLM``."""
    block_size = settings.get("block_size", 16)
    options = {
        "dtype": "bfloat16",
        "name": MODEL,
        "block-size": block_size,
        "num-blocks": settings.get("num_blocks", -(-settings["kv_tokens"] // block_size)),
        "max-num-seqs": settings["max_num_seqs"],
        "max-model-len": settings["max_model_len"],
        "stream-interval": settings.get("stream_interval", 1),
        "port": port,
    }
    return [settings["python"], "-m", "ostinato.cli", "serve", model, *_flags(options)]


def command_of_vllm(model: str, settings: dict[str, Any], port: int) -> list[str]:
    """Start vLLM's server, quiet as ours is; prefix caching is on by default."""
    options = {
        "dtype": "bfloat16",
        "served-model-name": MODEL,
        "max-num-seqs": settings["max_num_seqs"],
        "max-model-len": settings["max_model_len"],
        "uvicorn-log-level": "warning",
        "port": port,
    }
    if "block_size" in settings:
        options["block-size"] = settings["block_size"]
    program = [settings["python"], "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*program, "--enable-prompt-tokens-details", *_flags(options)]


def command_of_llamacpp(model: str, settings: dict[str, Any], port: int) -> list[str]:
    """Start ``llama-server`` on the checkpoint's weights of 16 bits, or those of ``weights``."""
    program = Path(settings["python"]).with_name("llama-server")
    if not program.exists():
        raise RuntimeError("llama-server is not installed beside the Python of llama.cpp")
    threads, kv = settings["threads"], settings.get("kv", "f16")
    convert = [settings["python"], "-m", "benchmarks.peers.workers.gguf_file", model]
    convert.append(settings.get("weights", "BF16"))
    done = subprocess.run(
        convert, env=settings["environment"], stdout=subprocess.PIPE, text=True, check=True
    )
    options = {
        "model": done.stdout.splitlines()[-1],
        "alias": MODEL,
        "ctx-size": settings["kv_tokens"],
        "parallel": settings["max_num_seqs"],
        "threads": threads,
        "threads-batch": threads,
        "flash-attn": "on",
        "cache-type-k": kv,
        "cache-type-v": kv,
        "port": port,
    }
    return [str(program), "--kv-unified", "--no-webui", "--log-disable", *_flags(options)]


def _flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


COMMANDS = {"ours": command_of_ours, "vllm": command_of_vllm, "llamacpp": command_of_llamacpp}
VERSIONS = {
    "ours": lambda get: json.loads(get("/version"))["version"],
    "vllm": lambda get: json.loads(get("/version"))["version"],
    "llamacpp": lambda get: json.loads(get("/props"))["build_info"],
}

if __name__ == "__main__":
    answer_questions(HttpClient())
