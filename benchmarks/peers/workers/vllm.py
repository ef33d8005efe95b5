"""vLLM on a CPU, by its engine's own steps."""

import os
from collections.abc import Hashable, Iterable
from typing import Any

from benchmarks.peers import protocol


class VLLM(protocol.Worker):
    """``LLMEngine``, in this process (its environment says so, see ``engines``)."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load with prefix caching on; compiling takes a minute when it is the first time."""
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["kv_gib"])
        import vllm

        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=True,
            enforce_eager=settings.get("eager", False),
            block_size=settings.get("block_size"),
            disable_log_stats=True,
            **settings.get("engine", {}),
        )
        self.engine, self.made = self.llm.llm_engine, 0
        config = self.engine.vllm_config
        taken = {
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "eager": config.model_config.enforce_eager,
        }
        return {"version": vllm.__version__, "settings": taken}

    def serve(self, talks: list[protocol.Talk]) -> protocol.Served:
        """Serve step by step."""
        self.counts: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        served = protocol.serve_by_steps(self, talks)
        served.cached = list(self.cached.values())
        return served

    def embed(self, prompts: list[list[int]]) -> float:
        """Embed prompts; its own prefix cache is on."""
        start = protocol.now()
        self.llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return protocol.now() - start

    def search(self, prompt: list[int], width: int, num_outputs: int) -> float:
        """Search beams; each step of each is a request of one token."""
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=num_outputs, ignore_eos=True)
        start = protocol.now()
        self.llm.beam_search([{"prompt_token_ids": prompt}], params)
        return protocol.now() - start

    def add(self, prompt: list[int], num_outputs: int) -> Hashable:
        """Give the engine a request."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=num_outputs, detokenize=False
        )
        self.made += 1
        name = str(self.made)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.counts[name] = 0
        self.cached[name] = 0
        return name

    def poll(self) -> Iterable[tuple[Hashable, list[int]]]:
        """Run a step; its outputs are cumulative, and their names may have got a tail."""
        for output in self.engine.step():
            name = output.request_id.partition("-")[0]
            tokens = list(output.outputs[0].token_ids)
            self.cached[name] = output.num_cached_tokens or 0
            seen, self.counts[name] = self.counts[name], len(tokens)
            yield name, tokens[seen:]


if __name__ == "__main__":
    protocol.answer_questions(VLLM())
