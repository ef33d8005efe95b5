"""What holds for every body?"""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """An object of JSON, whose fields are all known and of the right type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Take null for a field that was left out, as OpenAI's API does."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}
