"""Check that an installed wheel of ostinato runs, in an otherwise empty environment.

``python packaging/check_wheel.py`` generates twice with the bundled model: the second call must hit
the cache. It prints what is installed, and exits with an error if something is missing.
"""

import sys
from pathlib import Path

import ostinato
from ostinato import LLM, SamplingParams
from ostinato.runner.native.library import PATH, library

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def main() -> None:
    """Check the files, the native library and the outputs."""
    package = Path(ostinato.__file__).parent
    missing = [
        name for name in MODEL_FILES if not (package / "models/tiny-shakespeare" / name).exists()
    ]
    if missing or not (package / "py.typed").exists():
        sys.exit(f"the installation lacks files: {missing or 'py.typed'}")
    if PATH.exists() and library() is None:
        sys.exit("the native library is installed and does not load")
    llm = LLM(num_blocks=64)
    params = SamplingParams(max_tokens=16, temperature=0)
    first, second = (llm.generate("To be, or not to be: " * 4, params)[0] for _ in range(2))
    if first.outputs[0].text != second.outputs[0].text or second.num_cached_tokens < 64:
        sys.exit(f"the second output differs from the first, or nothing was cached: {second}")
    kind = "native library" if PATH.exists() else "no native library"
    print(f"ostinato {ostinato.__version__} with {kind}: {second.num_cached_tokens} tokens cached")


if __name__ == "__main__":
    main()
