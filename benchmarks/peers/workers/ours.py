"""Ostinato, by its Python faces: batches through ``LLM``, conversations through ``AsyncLLM``."""

import asyncio
import time
from typing import Any

from benchmarks.peers.protocol import Served, Talk, Worker, answer_questions


class Ours(Worker):
    """Holds one of the two faces at a time."""

    llm: Any = None
    async_llm: Any = None

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Note the settings and open the face that is asked for first."""
        import torch

        import ostinato

        settings = {name: value for name, value in settings.items() if name != "kv_gib"}
        torch.set_num_threads(settings.pop("threads"))
        self.streamed = settings.pop("streamed", False)
        self.detokenize = settings.pop("detokenize", False)
        tokens = settings.pop("kv_tokens")
        block_size = settings.setdefault("block_size", 16)
        settings.setdefault("num_blocks", -(-tokens // block_size))
        self.model, self.settings = model, {"dtype": "bfloat16", **settings}
        (self._open_async_llm if self.streamed else self._open_llm)()
        path = (self.async_llm or self.llm).engine.compute_path
        return {"version": ostinato.__version__, "settings": self.settings, "path": str(path)}

    def serve(self, talks: list[Talk]) -> Served:
        """Serve by the face that fits; changing the face loads the model anew, before the clock.

        ``streamed`` serves batches through ``AsyncLLM`` as well, as a program that streams has it.
        """
        if not self.streamed and all(len(talk) == 1 for talk in talks):
            self._open_llm()
            return self._serve_batch(talks)
        self._open_async_llm()
        return asyncio.run(self._converse(talks))

    def _serve_batch(self, talks: list[Talk]) -> Served:
        prompts = [talk[0][0] for talk in talks]
        params = [self._params(talk[0][1]) for talk in talks]
        start = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        served = Served(seconds=time.monotonic() - start, cached=[])
        for output in outputs:
            served.first.append(output.timings.first_token - start)
            served.last.append(output.timings.finished - start)
            served.cached.append(output.num_cached_tokens)
            served.outputs.append(list(output.outputs[0].token_ids))
        served.tokens = [len(output) for output in served.outputs]
        return served

    async def _converse(self, talks: list[Talk]) -> Served:
        served = Served(cached=[])
        start = time.monotonic()
        await asyncio.gather(*(self._talk(talk, served, start) for talk in talks))
        served.seconds = time.monotonic() - start
        return served

    async def _talk(self, talk: Talk, served: Served, start: float) -> None:
        history: list[int] = []
        for tokens, num_outputs in talk:
            history = history + tokens
            first = 0.0
            async for output in self.async_llm.generate(history, self._params(num_outputs)):
                if not first and output.outputs[0].token_ids:
                    first = time.monotonic() - start
            served.first.append(first)
            served.last.append(time.monotonic() - start)
            served.cached.append(output.num_cached_tokens)
            served.outputs.append(list(output.outputs[0].token_ids))
            served.tokens.append(len(served.outputs[-1]))
            history = history + served.outputs[-1]

    def _params(self, num_outputs: int) -> Any:
        from ostinato import SamplingParams

        return SamplingParams(
            max_tokens=num_outputs,
            temperature=0,
            ignore_eos=True,
            detokenize=self.detokenize,
        )

    def _open_llm(self) -> None:
        from ostinato import LLM

        if self.async_llm is not None:
            self.async_llm.shutdown()
            self.async_llm = None
        if self.llm is None:
            self.llm = LLM(self.model, **self.settings)

    def _open_async_llm(self) -> None:
        from ostinato import AsyncLLM

        if self.llm is not None:
            self.llm.close()
            self.llm = None
        if self.async_llm is None:
            self.async_llm = AsyncLLM(self.model, **self.settings)


if __name__ == "__main__":
    answer_questions(Ours())
