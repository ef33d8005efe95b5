"""What ``scripts/gpu-check`` runs: checks of a whole engine on a GPU, then ``gpu_table``."""

import argparse
import asyncio
import importlib.metadata
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--rehearse" in sys.argv or os.environ.get("GPU_CHECK_DEVICE") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch  # noqa: E402
from gpu_table import Case, TableSizes, measure_bandwidth, measure_table  # noqa: E402

LIMIT_S = 8 * 60
"""No check begins after so long; each takes seconds on a GPU."""

FAMILIES = (
    *("llama", "gemma2", "gpt_oss", "qwen3"),
    *("mistral", "qwen3_moe", "phi3", "deepseek_v3"),
)
"""Plain attention, windows with soft caps, sinks, one head of keys; then kinds of the same."""


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        families: Families compared with ``transformers``.
        num_requests: Requests of which a third is cancelled.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens of an answer.
        table: Of the times.
    """

    families: tuple[str, ...]
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    table: TableSizes


WHOLE = Sizes(FAMILIES, 1000, 120, 16, TableSizes((512, 4096, 32768), (1, 16, 64), 64, 2048, 20))
TINY = Sizes(FAMILIES[:1], 6, 20, 2, TableSizes((32,), (1, 2), 16, 16, 1))


class CheckFailed(Exception):
    """A check found something wrong."""


@dataclass(frozen=True)
class Context:
    """Where and how much.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        sizes: How much is run.
        folder: A folder for checkpoints and tiers.
    """

    device: str
    sizes: Sizes
    folder: Path

    def checkpoint(self, family: str) -> str:
        """Return a tiny checkpoint of a family, made once."""
        from tests.support.models.checkpoints import Checkpoints

        return str(Checkpoints(self.folder).path(family))

    @contextmanager
    def engine(self, family: str = "llama", **settings: Any) -> Iterator[Any]:
        """Open an engine whose attention is in Triton."""
        from ostinato import LLM

        common = {**common_settings(self.device), "num_blocks": 96, "block_size": 16}
        with LLM(self.checkpoint(family), device=self.device, **{**common, **settings}) as llm:
            path = llm.engine.compute_path
            if path.attention != "triton":
                raise CheckFailed(f"attention is in {path.attention}: {path.why_not_faster}")
            yield llm

    def ask(self, llm: Any, prompt: list[int], **params: Any) -> Any:
        """Answer one prompt greedily."""
        from ostinato import SamplingParams

        greedy = {"temperature": 0.0, "max_tokens": self.sizes.new_tokens, "ignore_eos": True}
        sampling = SamplingParams(detokenize=False, **{**greedy, **params})
        [output] = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return output


def common_settings(device: str) -> dict[str, Any]:
    """Return the settings of all engines; the interpreter compares a fused forward for a minute."""
    forward = "plain" if device == "cpu" else "auto"
    return {"dtype": "float32", "attention": "triton", "forward": forward}


def draw_prompt(seed: int, length: int, head: list[int] | None = None) -> list[int]:
    """Return token ids after ``head``."""
    draw = random.Random(seed)
    return [*(head or []), *(draw.randrange(3, 300) for _ in range(length))]


def check_families(context: Context) -> dict[str, Any]:
    """Greedy tokens are those of ``transformers``, cold and with a hit."""
    from transformers import AutoModelForCausalLM

    compared, length = {}, context.sizes.prompt_tokens
    for family in context.sizes.families:
        model = AutoModelForCausalLM.from_pretrained(
            context.checkpoint(family), attn_implementation="eager", dtype=torch.float32
        ).to(context.device)
        head = draw_prompt(1, length)
        with context.engine(family, forward="auto") as llm:
            outputs = [context.ask(llm, draw_prompt(seed, 5, head)) for seed in (2, 3)]
        if not outputs[1].num_cached_tokens:
            raise CheckFailed(f"{family}: the second prompt found nothing cached")
        for output in outputs:
            _compare(family, model, output)
        compared[family] = outputs[1].num_cached_tokens
    return {"cached_tokens": compared}


def _compare(family: str, model: Any, output: Any) -> None:
    """Compare each token with the model's own logits; a near tie is no fault."""
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    ids = torch.tensor([prompt + answer], device=model.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    behind = logits.amax(dim=1) - logits[torch.arange(len(answer)), torch.tensor(answer)]
    if float(behind.max()) > 1e-3:
        raise CheckFailed(f"{family}: a token is {float(behind.max()):.2g} below the best one")


def check_hit_bits(context: Context) -> dict[str, Any]:
    """A hit gives the tokens of a miss, and with ``same_bits`` its bits.

    The interpreter multiplies by BLAS, where bits depend on the place: there they are recorded.
    """
    prompt, on_gpu = draw_prompt(7, context.sizes.prompt_tokens), context.device != "cpu"
    with context.engine(same_bits=on_gpu) as llm:
        miss, hit = (context.ask(llm, prompt, logprobs=1) for _ in range(2))
    if not hit.num_cached_tokens or miss.num_cached_tokens:
        raise CheckFailed("the second run is no hit, or the first is one")
    one, other = (output.outputs[0] for output in (miss, hit))
    if one.token_ids != other.token_ids:
        raise CheckFailed("a hit gives other tokens than a miss")
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    apart = max(abs(a[t].logprob - b[t].logprob) for a, b in pairs for t in a if t in b)
    if on_gpu and apart:
        raise CheckFailed(f"with same_bits, log-probabilities differ by {apart:.2g}")
    return {"largest_difference": apart, "same_bits": apart == 0.0}


def check_row_bits(context: Context) -> dict[str, Any]:
    """With ``same_bits``, a row of attention alone is that row in a batch, to the bit."""
    from ostinato.runner.gpu.backend import TritonAttention

    case = Case(context.device, 4, 64, 16, same_bits=True)
    alone = Case(context.device, 1, 64, 16, same_bits=True)
    one, batch = (c.attend(TritonAttention("always", same_bits=True)) for c in (alone, case))
    if not torch.equal(one[0], batch[0]):
        raise CheckFailed("a row alone has other bits than in a batch")
    return {"rows": case.batch}


def check_tiers(context: Context) -> dict[str, Any]:
    """Host memory gives back what the pool evicts; a disk what a killed process has written."""
    on_gpu = context.device != "cpu"
    host = {"kv_host_bytes": 2**26} if on_gpu else {"kv_disk": str(context.folder / "host")}
    length = max(64, context.sizes.prompt_tokens)
    prompts = [draw_prompt(seed, length) for seed in range(12)]
    with context.engine(num_blocks=length // 16 + 4, **host) as llm:
        answers = []
        for prompt in prompts[: 12 if on_gpu else 3]:
            answers.append(context.ask(llm, prompt))
            llm.engine.tiers.stores.flush(30)
        llm.engine.tiers.run_idle_work()
        _take_any_time(llm)
        again = context.ask(llm, prompts[0])
    _must_match(answers[0], again, "host" if on_gpu else "disk")
    folder = str(context.folder / "disk")
    command = [sys.executable, __file__, "--write-and-die", folder, context.checkpoint("llama")]
    environment = {**os.environ, "GPU_CHECK_DEVICE": context.device}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if died.returncode != -signal.SIGKILL:
        raise CheckFailed(f"the process to kill ended with {died.returncode}: {died.stderr[-300:]}")
    with context.engine(kv_disk=folder) as llm:
        _take_any_time(llm)
        restored = context.ask(llm, draw_prompt(99, 64))
    if restored.cached_tokens_from.get("disk", 0) < 48:
        raise CheckFailed(f"after a kill only {restored.cached_tokens_from} was on the disk")
    return {"evicted": again.cached_tokens_from, "killed": restored.cached_tokens_from}


def _must_match(before: Any, after: Any, tier: str) -> None:
    if after.cached_tokens_from.get(tier, 0) < 16:
        raise CheckFailed(f"nothing came from the {tier}: {after.cached_tokens_from}")
    if before.outputs[0].token_ids != after.outputs[0].token_ids:
        raise CheckFailed(f"KV from the {tier} gives other tokens")


def _take_any_time(llm: Any) -> None:
    """Let loads take any time: tiny models compute faster than they load."""
    from ostinato.scheduling.learned_prices import LearnedPrices
    from ostinato.scheduling.step_prices import StepPrices

    llm.engine.tiers.loads.prices = LearnedPrices(StepPrices(0.0, 1.0, 0.0))


def write_and_die(folder: str, model: str) -> None:
    """Write a prefix to a disk, and be killed."""
    device = os.environ["GPU_CHECK_DEVICE"]
    context = Context(device, TINY, Path(folder))
    common = {**common_settings(device), "num_blocks": 96, "kv_disk": folder}
    from ostinato import LLM

    llm: Any = LLM(model, device=device, **common)
    context.ask(llm, draw_prompt(99, 64))
    context.ask(llm, draw_prompt(99, 64))
    llm.engine.tiers.stores.flush(30)
    os.kill(os.getpid(), signal.SIGKILL)


def check_requests(context: Context) -> dict[str, Any]:
    """Many requests, a third of them cancelled: no block stays held."""
    return asyncio.run(_run_requests(context))


async def _run_requests(context: Context) -> dict[str, Any]:
    from ostinato import AsyncLLM, SamplingParams

    sizes = context.sizes
    common = {**common_settings(context.device), "num_blocks": 512}
    llm = AsyncLLM(context.checkpoint("llama"), device=context.device, **common)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=sizes.new_tokens, ignore_eos=True, detokenize=False
    )
    heads = [draw_prompt(seed, sizes.prompt_tokens // 2) for seed in range(4)]
    gate = asyncio.Semaphore(64)

    async def one(number: int) -> bool:
        prompt = draw_prompt(number, 8, heads[number % len(heads)])
        async with gate:
            async for _ in llm.generate({"prompt_token_ids": prompt}, sampling):
                if number % 3 == 0:
                    return False
            return True

    try:
        ended = await asyncio.gather(*(one(number) for number in range(sizes.num_requests)))
        for _ in range(600):
            if not llm.engine.has_work:
                break
            await asyncio.sleep(0.05)
        manager = llm.engine.cache.manager
        if llm.engine.has_work or manager.num_live_tables:
            raise CheckFailed(f"{manager.num_live_tables} block tables are still live")
        if manager.pool.num_free != manager.config.num_blocks:
            raise CheckFailed("blocks are still held")
    finally:
        llm.shutdown()
    return {"finished": sum(ended), "cancelled": len(ended) - sum(ended)}


CHECKS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "row_bits": check_row_bits,
    "families": check_families,
    "hit_bits": check_hit_bits,
    "tiers": check_tiers,
    "requests": check_requests,
}


def versions() -> dict[str, str]:
    """Return the versions of what may matter."""
    names = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "ostinato")
    known = {"python": sys.version.split()[0]}
    for name in names:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = "none"
    return known


def run_checks(context: Context, names: list[str], began: float) -> Iterator[dict[str, Any]]:
    """Run each check of these names; one that raises has failed."""
    for name in names:
        start, check = time.monotonic(), CHECKS[name]
        result: dict[str, Any] = {"check": name}
        if start - began > LIMIT_S:
            yield result | {"result": "skipped", "why": "no time is left"}
            continue
        try:
            result |= {"result": "passed", **check(context)}
        except Exception as error:
            traceback.print_exc()
            result |= {"result": "failed", "why": f"{type(error).__name__}: {error}"}
        yield result | {"seconds": round(time.monotonic() - start, 1)}


def main() -> int:
    """Run everything; the status is 1 if a check failed."""
    parser = argparse.ArgumentParser(description="Check and time the engine on a GPU.")
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, interpreted and tiny")
    parser.add_argument("--only", action="append", choices=CHECKS, help="this check, and the table")
    parser.add_argument("--write-and-die", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write_and_die:
        write_and_die(*arguments.write_and_die)
    if not arguments.rehearse and not torch.cuda.is_available():
        print("There is no GPU here: nothing was run. --rehearse runs the same code on a CPU.")
        return 0
    began = time.monotonic()
    device = "cpu" if arguments.rehearse else "cuda"
    sizes = TINY if arguments.rehearse else WHOLE
    with tempfile.TemporaryDirectory() as folder:
        context = Context(device, sizes, Path(folder))
        checks, rows = [], []
        for result in run_checks(context, arguments.only or list(CHECKS), began):
            checks.append(result)
            print(json.dumps(result), flush=True)
        bandwidth = measure_bandwidth(torch.device(device), sizes.table.repeats)
        for row in measure_table(device, sizes.table, bandwidth):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if time.monotonic() - began > LIMIT_S:
                break
    report = {
        "is_rehearsal": arguments.rehearse,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted",
        "bandwidth_gb_s": bandwidth / 1e9,
        "versions": versions(),
        "sizes": asdict(sizes),
        "checks": checks,
        "table": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    failed = [check["check"] for check in checks if check["result"] == "failed"]
    print(f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {arguments.output}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
