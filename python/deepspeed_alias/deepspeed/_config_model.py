"""deepspeed.runtime.config_utils.DeepSpeedConfigModel for programs that derive their own sections of it: a model of
pydantic, with fields that are deprecated in favour of others."""

from __future__ import annotations

from typing import Any

from deepspeed._lazy import NotServed
from deepspeed._logging import logger

try:
    from pydantic import BaseModel, ConfigDict
except ImportError:

    class DeepSpeedConfigModel:  # the sections of Tessera's configuration need no pydantic
        """Stands for a model of pydantic where that is not installed."""

        def __init_subclass__(cls, **_: Any) -> None:
            raise NotServed(
                f"[deepspeed] {cls.__name__} derives of DeepSpeedConfigModel, which needs pydantic: install it"
            )

else:

    class DeepSpeedConfigModel(BaseModel):  # type: ignore[no-redef]
        """Values that are "auto" are as if they were not given, unless `strict`. A field with json_schema_extra of
        deprecated: True hands its value to the field `new_param` ("a.b": of a field's model), through `new_param_fn`;
        with set_new_param: False it keeps it."""

        model_config = ConfigDict(
            validate_default=True,
            validate_assignment=True,
            use_enum_values=True,
            populate_by_name=True,
            extra="forbid",
            arbitrary_types_allowed=True,
            protected_namespaces=(),
        )

        def __init__(self, strict: bool = False, **data: Any) -> None:
            super().__init__(**{key: value for key, value in data.items() if strict or value != "auto"})
            for name, field in type(self).model_fields.items():
                extra = field.json_schema_extra
                if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                    self._hand_over(name, extra)

        def _hand_over(self, name: str, extra: dict[str, Any]) -> None:
            new = extra.get("new_param", "")
            logger.warning("[config] %s is deprecated%s", name, f"; use {new}" if new else "")
            if not new or not extra.get("set_new_param", True):
                return
            value = extra.get("new_param_fn", lambda x: x)(getattr(self, name))
            *path, last = new.split(".")
            owner: Any = self
            for part in path:
                owner = getattr(owner, part)
            if last in owner.model_fields_set:
                raise AssertionError(f"[config] {name} is deprecated, and {new}, which is in place of it, is given too")
            delattr(self, name)
            setattr(owner, last, value)
