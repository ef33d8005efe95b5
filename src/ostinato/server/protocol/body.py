"""What holds for every body?"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

ItemT = TypeVar("ItemT")


class _FirstErrorOnly(FailFast):
    """Pydantic's marker, as a value that may stand in unions."""

    __hash__ = object.__hash__


Items = Annotated[list[ItemT], _FirstErrorOnly()]
"""A list whose first wrong item is enough: half a million errors take seconds to write."""

MOST_FIELDS = 256
MOST_MESSAGES = 8192


class Body(BaseModel):
    """An object of JSON, whose fields are all known and of the right type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Take null for a field that was left out, as OpenAI's API does."""
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_FIELDS:
            raise ValueError(
                f"an object of {len(body)} fields: at most {MOST_FIELDS} are looked at"
            )
        return {name: value for name, value in body.items() if value is not None}
