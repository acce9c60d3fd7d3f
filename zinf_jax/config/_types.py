"""Value types of the config: what counts as an integer, a number of bytes, a dtype, and what `"auto"` becomes.

`"auto"` never survives loading. It is replaced, before validation, by the key's documented value: the entry `auto` of
the field's `json_schema_extra` where there is one, else the default. `REFUSE` there means that the key cannot be auto.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from zinf_jax.units import parse_bytes

AUTO = "auto"
REFUSE = "refuse"  # as a field's `auto` entry: this key cannot be "auto"


def as_count(value: Any) -> Any:
    """`1e9`, `1000000000.0` and `"1e9"` are integers where an integer is meant; 0.5 and 15099494.4 are not."""
    if isinstance(value, bool):
        raise ValueError("an integer is meant here, not true or false")
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise ValueError("an integer is meant here: write 1000000000, 1e9 or '1e9'") from None
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise ValueError("a whole number is meant here: round it")
        return int(value)
    return value


def as_bytes(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number of bytes is meant here, not true or false")
    return parse_bytes(value) if isinstance(value, int | float | str) else value


def as_number(value: Any) -> Any:
    """Floats: YAML reads `1e-5` as text, which is accepted; a boolean is not a number."""
    if isinstance(value, bool):
        raise ValueError("a number is meant here, not true or false")
    return value


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}


def as_dtype(value: Any) -> Any:
    return _DTYPES.get(value.lower(), value.lower()) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(as_count), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(as_count), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(as_bytes)]
PositiveBytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=1)]
Number = Annotated[float, BeforeValidator(as_number)]
NonNegative = Annotated[float, BeforeValidator(as_number), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(as_dtype)]
Tier = Literal["device", "host", "nvme"]


class Section(BaseModel):
    """Base of every part of the config: frozen, no unknown keys, `"auto"` resolved on the way in."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    place: ClassVar[str] = ""  # path of the section, for notes

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            return data
        resolved = {}
        for key, value in data.items():
            field = cls.model_fields.get(key)
            if value != AUTO or field is None:
                resolved[key] = value
                continue
            meaning = (field.json_schema_extra or {}) if not callable(field.json_schema_extra) else {}
            target = meaning.get("auto", field.get_default(call_default_factory=True))
            if target == REFUSE or field.is_required():
                raise ValueError(f"{key} cannot be 'auto': nothing fills it in later; give a value")
            resolved[key] = target
            if target is not None and info.context:
                place = ".".join(filter(None, (info.context.get("section", cls.place), key)))
                info.context["notes"].append(f"{place}: 'auto' is {target!r} here")
        return resolved
