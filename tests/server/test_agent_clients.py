"""Coding agents as npm ships them, each in a home of its own, against the real server."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.formats.conftest import MARKS, TOOL_TEMPLATE
from tests.support.checkpoints import make_config, make_tokenizer, save_checkpoint
from tests.support.servers import serving

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

PACKAGES = ("@openai/codex", "@anthropic-ai/claude-code")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the agents; returns the folder of their packages."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("agents")
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
    subprocess.run(install, check=True, timeout=900, capture_output=True)
    return folder / "node_modules"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a tiny random Qwen3 with a context that is long enough for agents."""
    path = tmp_path_factory.mktemp("agent-model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.chat_template = TOOL_TEMPLATE
    sizes = {"max_position_embeddings": 131_072, "vocab_size": len(tokenizer)}
    save_checkpoint(path, make_config("qwen3", **sizes))
    tokenizer.save_pretrained(path)
    llm = AsyncLLM(str(path), dtype="float32", num_blocks=12_000)
    with serving(ServerState(llm, ServerConfig(model_names=("local",)))) as address:
        yield address
    llm.shutdown()


def run(command: list[str], home: Path, **environment: str) -> None:
    """Run an agent to its end; what a random model answers may fail, how it connects may not."""
    home.mkdir(exist_ok=True)
    settings = {**os.environ, "HOME": str(home), **environment}
    subprocess.run(command, env=settings, cwd=home, timeout=300, capture_output=True, check=False)


def refused(url: str, path: str) -> tuple[int, int]:
    """Return how many requests of a path were answered, and how many with an error."""
    counts = {"ok": 0, "error": 0}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("ostinato_http_requests_total") and f'route="{path}"' in line:
            kind = "ok" if 'status="200"' in line else "error"
            counts[kind] += int(float(line.split()[-1]))
    return counts["ok"], counts["error"]


def hit_tokens(url: str) -> float:
    """Return how many prompt tokens hit the cache."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = 'ostinato_looked_up_tokens_total{request="new",result="hit"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_codex_connects_unmodified(programs: Path, url: str, tmp_path: Path):
    config = tmp_path / "home/.codex/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        'model = "local"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    program = str(programs / ".bin/codex")
    run([program, "exec", "--skip-git-repo-check", "Say hello"], tmp_path / "home")
    answered, failed = refused(url, "/v1/responses")
    assert answered >= 1 and failed == 0


def test_claude_code_connects_and_its_second_conversation_hits(
    programs: Path, url: str, tmp_path: Path
):
    [program] = programs.glob("@anthropic-ai/claude-code-linux-*/claude")
    environment = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "local",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400",
        "IS_SANDBOX": "1",
    }  # fmt: skip
    for question in ("Say hello", "What is two plus two?"):
        run([str(program), "-p", question], tmp_path / "home", **environment)
    answered, failed = refused(url, "/v1/messages")
    assert answered >= 2 and failed == 0
    assert hit_tokens(url) > 4_000, "the instructions and the tools"
