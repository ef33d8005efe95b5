"""vLLM's module of this name: types of prompts."""

from ostinato.engine.requests.prompts import PromptDict, PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptDict", "PromptType", "TextPrompt", "TokensPrompt"]
