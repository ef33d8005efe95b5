"""Programs that hold a conversation with agents that are libraries: one argument per message."""

CLAUDE_SDK = """
import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient


async def main():
    options = ClaudeAgentOptions(permission_mode="bypassPermissions")
    async with ClaudeSDKClient(options=options) as client:
        for question in sys.argv[1:]:
            await client.query(question)
            async for message in client.receive_response():
                print(message)


asyncio.run(main())
"""

SMOLAGENTS = '''
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def sh(command: str) -> str:
    """Run a command.

    Args:
        command: The command.
    """
    return command


_, kind, url, *questions = sys.argv
model = OpenAIModel(model_id="local", api_base=f"{url}/v1", api_key="none")
Agent = ToolCallingAgent if kind == "tools" else CodeAgent
agent = Agent(tools=[sh], model=model, max_steps=40)
for place, question in enumerate(questions):
    print(agent.run(question, reset=place == 0))
'''

OPENHANDS = """
import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

llm = LLM(model="openai/local", base_url=os.environ["OSTINATO_URL"] + "/v1", api_key="none")
agent = get_default_agent(llm=llm, cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd())
for question in sys.argv[1:]:
    conversation.send_message(question)
    conversation.run()
"""
