"""Reads a JSON object strictly: unknown fields are refused.

A field that was not read is refused by its path, unless it is known not to affect the prompt.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ostinato.errors import BrokenTrace

ValueT = TypeVar("ValueT")

_SHOWN_LETTERS = 40

_TYPES: dict[type, str] = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SETTINGS = _names(
    """
    add_special_tokens chat_template chat_template_kwargs container context_management documents
    extra_body mcp_servers modalities output_config output_format reasoning reasoning_effort
    response_format suffix text thinking verbosity web_search_options
    """
)
"""Parameters that affect the prompt, or separate providers' caches."""

NOT_IN_PROMPT = _names(
    """
    add_generation_prompt allowed_openai_params anthropic_beta anthropic_version api_base
    api_key audio background bad_words best_of betas cache cache_key cache_salt caching
    continue_final_message custom_id custom_llm_provider detokenize drop_params echo
    extra_headers fallbacks frequency_penalty function_call guided_choice
    guided_decoding_backend guided_grammar guided_json guided_regex headers ignore_eos include
    include_reasoning include_stop_str_in_output inference_geo
    kv_transfer_params length_penalty litellm_call_id litellm_logging_obj litellm_metadata
    litellm_params litellm_trace_id logit_bias logprobs max_completion_tokens max_output_tokens
    max_retries max_tokens max_tool_calls metadata min_p min_tokens mock_response n num_retries
    parallel_tool_calls prediction presence_penalty priority prompt_cache_key
    prompt_cache_options prompt_cache_retention prompt_logprobs provider proxy_server_request
    regex repetition_penalty request_id return_token_ids return_tokens_as_token_ids route
    safety_identifier seed service_tier skip_special_tokens spaces_between_special_tokens speed
    stop stop_sequences stop_token_ids store stream stream_options structured_outputs
    temperature timeout tool_choice top_a top_k top_logprobs top_p transforms
    truncate_prompt_tokens truncation usage use_beam_search user
    """
)
"""Parameters of sampling, billing and transport."""

IN_MESSAGE = _names(
    """
    annotations container id logprobs model parsed phase provider_specific_fields status
    stop_details stop_reason stop_sequence type usage
    """
)
"""Fields of messages that do not affect the prompt."""

IN_BLOCK = _names(
    """
    annotations caller citations id index logprobs signature status
    """
)
"""Fields of parts and items that do not affect the prompt."""


OPAQUE_PARTS = _names(
    """
    audio audio_url compaction container_upload document file image image_url input_audio
    input_file input_image mcp_tool_result redacted_thinking tool_reference video_url
    """
)
"""Parts of messages that are not text."""

OPAQUE_ITEMS = _names(
    """
    apply_patch_call apply_patch_call_output code_interpreter_call compaction computer_call
    computer_call_output file_search_call image_generation_call local_shell_call
    local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools
    shell_call shell_call_output web_search_call
    """
)
"""Items of responses that hosted tools write."""


class Fields:
    """An object of a request, read field by field; unread fields are refused."""

    def __init__(self, value: Any, path: str) -> None:
        """Wrap a value.

        Raises:
            BrokenTrace: It is no object.
        """
        if not isinstance(value, Mapping):
            raise BrokenTrace(f"{path or 'the request'} must be an object, not {shown(value)}")
        self._left: dict[str, Any] = {k: v for k, v in value.items() if v is not None}
        self.path = path

    def at(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, kind: type[ValueT], default: ValueT) -> ValueT:
        """Return a field, or the default if it is missing or null.

        Raises:
            BrokenTrace: It is of another type.
        """
        value = self._left.pop(name, default)
        if not isinstance(value, kind):
            raise BrokenTrace(f"{self.at(name)} must be {_TYPES[kind]}, not {shown(value)}")
        return value

    def peek(self, name: str) -> Any:
        """Return a field, which stays to be read."""
        return self._left.get(name)

    def pop(self, name: str) -> Any:
        """Return a field of any type; None if it is missing."""
        return self._left.pop(name, None)

    def rest(self) -> dict[str, Any]:
        """Return all remaining fields."""
        left, self._left = self._left, {}
        return left

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Refuse remaining fields, except known irrelevant ones and empty values.

        Raises:
            BrokenTrace: It names the first field that is not understood.
        """
        for name, value in self._left.items():
            if name not in ignored and value not in ("", [], {}, False):
                raise BrokenTrace(
                    f"{self.at(name)} is not understood; if it does not change the prompt, "
                    f"ignore it: --ignore {name}"
                )


def shown(value: Any) -> str:
    """Write a value into a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
