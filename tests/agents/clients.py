"""Coding agents: what to install, what to set, and how to hold a conversation with them.

Each runs in a home of its own, with the lines that ``docs/agents.md`` shows. A conversation is a
list of user messages; an agent of the command line gets them one process after the other, a library
gets them in one program (``programs``).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.agents import programs
from tests.support.models.scripted_model import CodeLoop, Script, Talk, ToolLoop, written_call


@dataclass(frozen=True, kw_only=True)
class AgentClient:
    """An agent.

    Attributes:
        name: Its name.
        source: The registry that ships it.
        packages: Its packages there.
        path: The path of the API that it calls.
        tool: Name of the tool that runs commands, as the prompt shows it; empty: it has none.
        command: Argument of the tool that has the command.
        more: Further arguments of each call.
        files: Files of its home by path; ``{url}`` is the server's address.
        environment: Its environment; likewise, and ``{home}`` is its home.
        words: Whether a text may precede a call.
        ending: The last answer; None for a text.
        result: Words that stand before each result in the prompt.
        first: The command for a conversation's first message; ``{question}`` is the message.
        later: The command for the following ones; empty: ``first`` gets all as arguments.
        num_questions: Questions of its first conversation.
        talks: Whether its questions are lines of its input, in one process.
        script: Makes its script from a question and a number of calls; None: calls of the tool.
        python: The interpreter that its packages need.
        program: A program that is written into its home as ``agent.py``.
    """

    name: str
    source: Literal["npm", "pypi"]
    packages: tuple[str, ...]
    path: str = "/v1/chat/completions"
    tool: str = ""
    command: str = "command"
    more: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    num_questions: int = 2
    python: str = "python3"
    program: str = ""
    talks: bool = False
    script: Callable[[str, int], Script] | None = None
    words: bool = True
    ending: str | None = None
    result: str = "<tool_response>"
    step: Callable[[int], str] = field(default=lambda number: f"echo step {number}")

    def answers(self, question: str, num_calls: int) -> Script:
        """Return the script of the model, for questions with these words."""
        if self.script is not None:
            return self.script(question, num_calls)
        return ToolLoop(
            question,
            self.tool,
            self.arguments,
            num_calls,
            words=self.words,
            ending=self.ending,
            result=self.result,
        )

    def arguments(self, number: int) -> dict[str, Any]:
        """Return the arguments of one call."""
        return {self.command: self.step(number), **self.more}

    def settle(self, home: Path, url: str) -> dict[str, str]:
        """Write the files of its home; returns its environment."""
        home.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{url}", url))
        if self.program:
            (home / "agent.py").write_text(self.program)
        values = {**_COMMON, **self.environment}
        return {k: v.replace("{url}", url).replace("{home}", str(home)) for k, v in values.items()}

    def commands(self, folder: Path, questions: Sequence[str]) -> Iterator[list[str]]:
        """Yield the commands of one conversation.

        Args:
            folder: Where its packages are installed.
            questions: The user's messages.
        """
        program = folder / ("node_modules/.bin" if self.source == "npm" else "bin") / self.first[0]
        if self.talks or not self.later:
            yield [str(program), *self.first[1:], *(() if self.talks else questions)]
            return
        for place, question in enumerate(questions):
            words = self.later if place else self.first
            yield [str(program), *(w.replace("{question}", question) for w in words[1:])]


_COMMON = {
    "HOME": "{home}", "PWD": "{home}/project",
    "XDG_CONFIG_HOME": "{home}/.config", "XDG_DATA_HOME": "{home}/.local/share",
    "XDG_CACHE_HOME": "{home}/.cache", "XDG_STATE_HOME": "{home}/.local/state",
    "TERM": "dumb", "CI": "1", "NO_COLOR": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": "",
    "VIRTUAL_ENV": "", "OPENAI_API_KEY": "none",
}  # fmt: skip

_CODEX = AgentClient(
    name="Codex",
    source="npm",
    packages=("@openai/codex",),
    path="/v1/responses",
    tool="exec_command",
    command="cmd",
    files={
        ".codex/config.toml": 'model = "local"\nmodel_provider = "ostinato"\n'
        '[model_providers.ostinato]\nname = "ostinato"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\n'
    },
    first=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
           "{question}"),
    later=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
           "resume", "--last", "{question}"),
)  # fmt: skip

_CLAUDE_LINES = {
    "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "local",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1",
}  # fmt: skip

_CLAUDE_CODE = AgentClient(
    name="Claude Code",
    source="npm",
    packages=("@anthropic-ai/claude-code",),
    path="/v1/messages",
    tool="Bash",
    more={"description": "Prints a step"},
    environment=_CLAUDE_LINES,
    first=("claude", "-p", "--dangerously-skip-permissions", "{question}"),
    later=("claude", "-p", "--dangerously-skip-permissions", "--continue", "{question}"),
)

_CLAUDE_SDK = AgentClient(
    name="Claude agent SDK",
    source="pypi",
    packages=("claude-agent-sdk",),
    path="/v1/messages",
    tool="Bash",
    more={"description": "Prints a step"},
    environment=_CLAUDE_LINES,
    first=("python", "{home}/agent.py"),
    program=programs.CLAUDE_SDK,
)

_OPENCODE = AgentClient(
    name="OpenCode",
    source="npm",
    packages=("opencode-ai",),
    tool="bash",
    more={"description": "Prints a step"},
    files={
        ".config/opencode/opencode.json": json.dumps(
            {
                "model": "ostinato/local",
                "provider": {"ostinato": {
                    "npm": "@ai-sdk/openai-compatible", "models": {"local": {}},
                    "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                }},
            }
        )
    },
    first=("opencode", "run", "--auto", "{question}"),
    later=("opencode", "run", "--auto", "--continue", "{question}"),
)  # fmt: skip

_QWEN_CODE = AgentClient(
    name="Qwen Code",
    source="npm",
    packages=("@qwen-code/qwen-code",),
    tool="run_shell_command",
    more={"is_background": False},
    environment={
        "OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "local"
    },
    first=("qwen", "--auth-type", "openai", "--yolo", "-p", "{question}"),
    later=("qwen", "--auth-type", "openai", "--yolo", "--continue", "-p", "{question}"),
)  # fmt: skip

_PI = AgentClient(
    name="pi",
    source="npm",
    packages=("@earendil-works/pi-coding-agent",),
    tool="bash",
    files={
        ".pi/agent/models.json": json.dumps(
            {"providers": {"ostinato": {
                "baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "none",
                "models": [{"id": "local", "reasoning": True, "contextWindow": 131072}],
            }}}
        )
    },
    environment={"PI_OFFLINE": "1"},
    first=("pi", "--model", "ostinato/local", "-p", "{question}"),
    later=("pi", "--model", "ostinato/local", "--continue", "-p", "{question}"),
)  # fmt: skip

_CLINE = AgentClient(
    name="Cline",
    source="npm",
    packages=("cline",),
    tool="run_commands",
    files={
        ".cline/data/settings/providers.json": json.dumps(
            {
                "version": 1, "lastUsedProvider": "openai-compatible", "modes": {},
                "providers": {"openai-compatible": {
                    "settings": {"provider": "openai-compatible", "apiKey": "none",
                                 "model": "local", "baseUrl": "{url}/v1"},
                    "updatedAt": "2026-11-28T00:00:00.000Z", "tokenSource": "manual",
                }},
            }
        )
    },
    first=("cline", "{question}"),
    later=("cline", "{question}"),
    num_questions=1,  # without a terminal a session is not taken up again
)  # fmt: skip

_CONTINUE = AgentClient(
    name="Continue",
    source="npm",
    packages=("@continuedev/cli",),
    tool="Bash",
    files={
        ".continue/config.yaml": "name: local\nversion: 1.0.0\nschema: v1\nmodels:\n"
        "  - name: local\n    provider: openai\n    model: local\n    apiBase: {url}/v1\n"
        "    apiKey: none\n    roles: [chat]\n    capabilities: [tool_use]\n"
    },
    first=("cn", "--auto", "--config", "{home}/.continue/config.yaml", "-p", "{question}"),
    later=("cn", "--auto", "--config", "{home}/.continue/config.yaml", "--resume", "-p",
           "{question}"),
)  # fmt: skip

_SMOL_TOOLS = AgentClient(
    name="smolagents ToolCallingAgent",
    source="pypi",
    packages=("smolagents[openai]",),
    tool="sh",
    words=False,
    result="Observation:",
    ending=written_call("final_answer", {"answer": "All calls are done."}),
    first=("python", "{home}/agent.py", "tools", "{url}"),
    program=programs.SMOLAGENTS,
)
_SMOL_CODE = AgentClient(
    name="smolagents CodeAgent",
    source="pypi",
    packages=("smolagents[openai]",),
    script=lambda question, num_calls: CodeLoop(
        question,
        lambda step: f"print(sh('echo step {step}'))",
        "final_answer('All calls are done.')",
        num_calls,
    ),
    first=("python", "{home}/agent.py", "code", "{url}"),
    program=programs.SMOLAGENTS,
)
_LLM = AgentClient(
    name="llm",
    source="pypi",
    packages=("llm",),
    tool="sh",
    files={
        "llm/extra-openai-models.yaml": "- model_id: local\n  model_name: local\n"
        '  api_base: "{url}/v1"\n  supports_tools: true\n',
        "tools.py": "def sh(command: str) -> str:\n    \"Run a command.\"\n    return command\n",
    },
    environment={"LLM_USER_PATH": "{home}/llm"},
    first=("llm", "-m", "local", "--functions", "{home}/tools.py", "--chain-limit", "0",
           "{question}"),
    later=("llm", "-m", "local", "-c", "--functions", "{home}/tools.py", "--chain-limit", "0",
           "{question}"),
)  # fmt: skip
_AIDER = AgentClient(
    name="aider",
    source="pypi",
    packages=("aider-chat",),
    environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"},
    files={"project/CONVENTIONS.md": "- Names are nouns; a value is checked once.\n" * 900},
    talks=True,
    num_questions=20,
    script=lambda question, _: Talk(question),
    first=("aider", "--read", "CONVENTIONS.md", "--model", "openai/local", "--yes-always",
           "--no-check-update", "--no-git", "--no-show-model-warnings", "--no-pretty",
           "--no-fancy-input", "--analytics-disable"),
)  # fmt: skip
_OPENHANDS = AgentClient(
    name="OpenHands",
    source="pypi",
    packages=("openhands-sdk", "openhands-tools"),
    python="python3.12",
    tool="terminal",
    environment={"OSTINATO_URL": "{url}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    first=("python", "{home}/agent.py"),
    program=programs.OPENHANDS,
)

CLIENTS = (
    _CODEX, _CLAUDE_CODE, _CLAUDE_SDK, _OPENCODE, _QWEN_CODE, _PI, _CLINE, _CONTINUE, _OPENHANDS,
    _AIDER, _LLM, _SMOL_TOOLS, _SMOL_CODE,
)  # fmt: skip
