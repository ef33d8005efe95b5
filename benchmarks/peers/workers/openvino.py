"""OpenVINO GenAI's continuous batching, by its own steps."""

import subprocess
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import (
    Served,
    Talk,
    Worker,
    answer_questions,
    serve_by_steps,
)


class OpenVINO(Worker):
    """Computes in bfloat16, with keys and values in bfloat16 by default (its own is u8)."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint if that was not done, and load it."""
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = 4096
        scheduler.cache_size = settings["kv_gib"]
        properties = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": settings.get("kv", "bf16"),
            "PERFORMANCE_HINT": "LATENCY",
        }
        converted = convert(Path(model), settings.get("weights", "fp16"))
        self.pipeline = genai.ContinuousBatchingPipeline(
            str(converted), scheduler, "CPU", properties
        )
        self.made = 0
        taken = {
            **properties,
            "weights": converted.name,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "cache_size": scheduler.cache_size,
        }
        return {"version": genai.__version__, "settings": taken}

    def serve(self, talks: list[Talk]) -> Served:
        """Serve step by step."""
        self.handles: dict[int, Any] = {}
        return serve_by_steps(self, talks)

    def add(self, prompt: list[int], num_outputs: int) -> Hashable:
        """Give the pipeline a request."""
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_outputs
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
        self.made += 1
        self.handles[self.made] = self.pipeline.add_request(self.made, tokens, config)
        return self.made

    def poll(self) -> Iterable[tuple[Hashable, list[int]]]:
        """Run a step, and read what every request has got."""
        self.pipeline.step()
        for name, handle in list(self.handles.items()):
            tokens = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            yield name, tokens


def convert(model: Path, weights: str = "fp16") -> Path:
    """Return the checkpoint in OpenVINO's format, beside it; optimum makes it the first time."""
    suffix = "-openvino" if weights == "fp16" else f"-openvino-{weights}"
    goal = model.with_name(model.name + suffix)
    if not (goal / "openvino_model.bin").is_file():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([*command, "--model", str(model), str(goal)], check=True, stdout=sys.stderr)
    return goal


if __name__ == "__main__":
    answer_questions(OpenVINO())
