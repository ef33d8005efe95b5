"""A conversation with a model.

Each turn's prompt is the whole conversation, so all but the newest message is cached.
"""

from typing import TYPE_CHECKING

from ostinato.cli._errors import complain
from ostinato.cli._streaming import account, follow, note, was_interrupted, write
from ostinato.engine.sampling_params import SamplingParams
from ostinato.errors import RequestError, StepFailed

if TYPE_CHECKING:
    from ostinato import AsyncLLM, RequestOutput


class Conversation:
    """A conversation's messages, and the model.

    Attributes:
        messages: Messages in order, for the chat template.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        params: SamplingParams,
        system: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Start with the system prompt, if there is one."""
        self._llm = llm
        self._params = params
        self._system = system
        self._chat_template = chat_template
        self._num_turns = 0
        self.messages: list[dict[str, str]]
        self.reset()

    def reset(self) -> None:
        """Start again; the cache is kept."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def answer(self, line: str) -> bool:
        """Answer a line on stdout, and print statistics on stderr.

        Returns:
            Whether the answer is complete. After Ctrl-C a partial answer stays in the conversation;
            a line without any answer is removed.
        """
        self.messages.append({"role": "user", "content": line})
        try:
            output = self._ask()
        except (RequestError, StepFailed) as error:
            complain(str(error))
            self._drop()
            note("/reset starts a new one")
            return True
        return self._keep(output)

    def _ask(self) -> "RequestOutput":
        """Show the answer while it is generated."""
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        outputs = self._llm.chat(
            self.messages,
            self._params,
            chat_template=self._chat_template,
            request_id=request_id,
        )
        return follow(self._llm, outputs, request_id, write)

    def _keep(self, output: "RequestOutput") -> bool:
        """Add an answer to the conversation."""
        write("\n")
        interrupted, text = was_interrupted(output), output.outputs[0].text
        if text or not interrupted:
            self.messages.append({"role": "assistant", "content": text})
        note(account(output) + (" | stopped" if interrupted else ""))
        if interrupted and not text:
            self._drop()
        return not interrupted

    def _drop(self) -> None:
        """Remove the last line from the conversation."""
        self.messages.pop()
        note("that line was removed from the conversation")
