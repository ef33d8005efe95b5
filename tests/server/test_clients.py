"""Popular client libraries run against this server, each in an environment of its own.

Nightly: each is installed from the package index, newest version first; where that fails, the test
is skipped and says so.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.formats.conftest import TOOL_TEMPLATE, serve_scribe

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

FORM = """
from typing import Literal
from pydantic import BaseModel, ConfigDict
class Weather(BaseModel):
    "Where it rains."
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
"""
LITELLM = """
import litellm
said = [{"role": "user", "content": "hi"}]
api = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8}
assert litellm.completion(model="openai/scribe", messages=said, **api).usage.prompt_tokens
assert len(list(litellm.completion(model="hosted_vllm/scribe", messages=said, stream=True, **api)))
assert litellm.text_completion(model="text-completion-openai/scribe", prompt="hi", **api).usage
assert litellm.responses(model="openai/scribe", input="hi", api_base=f"{url}/v1",
                         api_key="none", max_output_tokens=4).status == "incomplete"
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI
api = {"model": "scribe", "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 100}
llm = ChatOpenAI(temperature=0, **api)
assert llm.invoke("hi").usage_metadata["input_tokens"] and len(list(llm.stream("hi")))
for method in ("function_calling", "json_schema"):
    assert llm.with_structured_output(Weather, method=method).invoke("weather?").city
assert ChatOpenAI(use_responses_api=True, **api).invoke("hi").usage_metadata["output_tokens"]
"""
INSTRUCTOR = """
import instructor, openai
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    ask = instructor.from_openai(client, mode=mode).chat.completions.create
    assert ask(model="scribe", response_model=Weather, max_tokens=100, max_retries=0,
               messages=[{"role": "user", "content": "where?"}]).city
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
settings = {"max_tokens": 200, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("scribe", provider=provider), output_type=Weather, model_settings=settings)
    assert agent.run_sync("where?").output.city
"""
SCRIPTS = {
    "litellm mcp": LITELLM,  # it imports what it does not require
    "langchain-openai": LANGCHAIN,
    "instructor": INSTRUCTOR,
    "pydantic-ai-slim[openai]": PYDANTIC_AI,
}


@pytest.fixture(scope="module")
def scribe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve a random model with a template that knows tools; returns its address and folder."""
    path = tmp_path_factory.mktemp("scribe")
    for url, _ in serve_scribe(path, TOOL_TEMPLATE):
        yield url, path


def install(package: str, folder: Path) -> Path:
    """Make an environment with packages; returns where its programs are."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check"]
    installed = subprocess.run([*pip, *package.split()], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"{package} cannot be installed here: {installed.stderr[-300:]}")
    return folder / "bin"


def run(*command: object) -> str:
    """Run a program that knows nothing of this project; returns what it says."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("package", SCRIPTS)
def test_a_library_is_served(package: str, scribe: tuple[str, Path], tmp_path: Path):
    programs = install(package, tmp_path / "venv")
    script = f"url = {scribe[0]!r}\n{FORM}{SCRIPTS[package]}"
    run(programs / "python", "-c", script)


def test_guidellm_measures_it(scribe: tuple[str, Path], tmp_path: Path):
    """It reads ``continuous_usage_stats``; every request counts, through three APIs."""
    url, model = scribe
    programs = install("guidellm>=0.8", tmp_path / "venv")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        run(
            programs / "guidellm", "run",
            "--backend", f"kind=openai_http,target={url},model=scribe,request_format={path}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
            "--tokenizer", f"kind=hf_auto,model={model}",
            "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console",
        )  # fmt: skip
        [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (4, 0), path


def test_aiperf_measures_it(scribe: tuple[str, Path], tmp_path: Path):
    url, model = scribe
    programs = install("aiperf", tmp_path / "venv")
    run(
        programs / "aiperf", "profile", "--model", "scribe", "--url", url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", model,
        "--request-count", 5, "--concurrency", 2, "--synthetic-input-tokens-mean", 16,
        "--output-tokens-mean", 8, "--ui", "none", "--output-artifact-dir", tmp_path / "report",
    )  # fmt: skip
    report = json.loads(next((tmp_path / "report").rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == 5
