"""vLLM's module of this name: types of prompts."""

from ostinato.engine.prompts import PromptDict, PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptDict", "PromptType", "TextPrompt", "TokensPrompt"]
