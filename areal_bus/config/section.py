"""The base class of all sections of the settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __hash__(self) -> int:
        """Equal settings have equal hashes; pydantic's own has none for tables."""
        return hash(self.model_dump_json())
