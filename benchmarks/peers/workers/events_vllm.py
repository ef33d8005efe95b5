"""Record vLLM's KV events for ``tests/router/data``, with what it then finds cached.

::

    python -m benchmarks.peers.checkpoint FOLDER --shape tiny
    VLLM/bin/python -m benchmarks.peers.workers.events_vllm FOLDER vllm.msgpack
"""

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENDPOINT = "tcp://127.0.0.1:25557"
BLOCK = 32
NUM_REQUESTS = 90


def main(model: str, out: str) -> None:
    """Serve growing conversations in a small cache, clear it once, and write all down."""
    import vllm
    from vllm.config.kv_events import KVEventsConfig

    batches = _listen()
    llm = vllm.LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=True,
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=28,
        skip_tokenizer_init=True,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=ENDPOINT.replace("127.0.0.1", "*"),
            topic="kv",
        ),
    )
    params = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, detokenize=False)
    chance, requests = random.Random(7), list[dict[str, Any]]()
    systems = [[chance.randrange(10, 500) for _ in range(70)] for _ in range(3)]
    talks = [list(systems[number % 3]) for number in range(6)]
    time.sleep(1)  # the subscription
    for turn in range(NUM_REQUESTS):
        if turn == 60:
            llm.reset_prefix_cache()
        number = chance.randrange(6)
        if len(talks[number]) > 380:
            talks[number] = list(systems[number % 3])
        prompt = talks[number]
        prompt += [chance.randrange(10, 500) for _ in range(chance.randrange(16, 60))]
        prompt += [11] * (len(prompt) % BLOCK == 0)  # whole blocks are found, less one token
        salt = "tenant" if number == 5 else ""
        time.sleep(0.12)  # for the events so far
        asked = {"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})}
        row = {"batches": len(batches), "prompt": list(prompt), "salt": salt}
        [output] = llm.generate([asked], params, use_tqdm=False)
        requests.append({**row, "cached": output.num_cached_tokens})
        prompt += output.outputs[0].token_ids
    recorded = {"engine": f"vllm {vllm.__version__}", "batches": batches, "requests": requests}
    Path(out).write_bytes(msgspec.msgpack.encode(recorded))


def _listen() -> list[list[Any]]:
    """Return a list that batches are added to as they arrive: number and payload."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(ENDPOINT)
    batches: list[list[Any]] = []

    def listen() -> None:
        while True:
            _, number, payload = socket.recv_multipart()
            batches.append([int.from_bytes(number, "big"), payload])

    threading.Thread(target=listen, daemon=True).start()
    return batches


if __name__ == "__main__":
    main(*sys.argv[1:])
