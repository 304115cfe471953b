"""Common base of configuration sections: strict types and sensible ranges."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from raymm.packages import is_import_path

# Maximum of counts: far above those of any run, far below the overflow of sums.
MOST_COUNT = 10**9
# One year. Process groups keep timeouts as nanoseconds in 64 bits.
MOST_SECONDS = 365 * 86400.0
# numpy and torch accept seeds of 64 bits.
MOST_SEED = 2**63 - 1

Item = TypeVar("Item")


class Section(BaseModel):
    """Section without unknown keys, type conversions (true for 1, ``"3"`` for 3) and non-finite
    numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def replace_files(self, **files: str | None) -> None:
        """Replace fields that name files or models, in place, by what all processes of a run read.
        """
        for name, file in files.items():
            setattr(self, name, file)


def section_of(options: type) -> type[Section]:
    """Return a section with the fields of a dataclass: types, ranges and defaults. A field
    without a default is required."""
    hints = get_type_hints(options, include_extras=True)
    definitions: dict[str, Any] = {
        option.name: (
            hints[option.name],
            Field(default_factory=option.default_factory)
            if option.default_factory is not MISSING
            else ... if option.default is MISSING else option.default,
        )
        for option in fields(options)
    }
    return create_model(f"{options.__name__}Section", __base__=Section, **definitions)


def _text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise ValueError("must be a text that is not blank and contains no null character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be a text of whole Unicode characters, without surrogates") from None
    return value


def _import_path(value: str) -> str:
    if not is_import_path(value):
        raise ValueError("must be the import path of an object, module:name")
    return value


def _tuple(value: Any) -> Any:
    """Convert a list to a tuple, because YAML has only lists."""
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, AfterValidator(_text)]
ImportPath = Annotated[str, AfterValidator(_import_path)]
Count = Annotated[int, Field(gt=0, le=MOST_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Tuple = Annotated[tuple[Item, ...], BeforeValidator(_tuple)]
