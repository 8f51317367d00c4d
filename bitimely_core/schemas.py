"""Records that are stored as JSON: what a run, a cache, tokens, scores and reports say about themselves.

Each record is one frozen pydantic model, read by `load` and written by `save`, nowhere else. Keys that this version does not know are kept,
so that nothing is lost when an older version writes a record again; keys of later versions are tolerated. `upgrade_v1` brings what version
0.1 wrote to the present form while it is read; the file itself is left as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitimely_core import storage
from bitimely_core.errors import Reason, input_error, integrity_error, safe_text


def is_none(value: object) -> bool:
    """Condition of `Omittable`."""
    return value is None


def omit_none(description: str = "") -> Any:
    """A field that is None by default and whose key is left out of the file then."""
    return Field(None, description=description, exclude_if=is_none)


class Part(BaseModel):
    """A part of a stored record."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class StoredRecord(Part):
    """A record with a file of its own."""

    VERSION: ClassVar[int] = 1  # the newest `format_version` that this class reads
    REPAIR: ClassVar[str] = "Repeat the command that wrote it"

    format_version: int = 1

    @classmethod
    def upgrade_v1(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Stored values of format 1 in the present form."""
        return values

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record at `path`.

        Raises UserError: integrity (exit 5) when the file is missing, is not JSON or does not have the fields; unsupported_format (exit 4)
        for a later format.
        """
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise integrity_error(str(path), f"not readable: {safe_text(str(error))}", "expected JSON", cls.REPAIR) from error
        return cls.parse(values, path)

    @classmethod
    def parse(cls, values: Any, path: Path) -> Self:
        """The record of `values`, which `path` holds. Raises UserError: as `load`."""
        if not isinstance(values, dict):
            raise integrity_error(str(path), f"found {safe_text(values)}", "expected a JSON object", cls.REPAIR)
        version = values.get("format_version", 1)
        if isinstance(version, int) and version > cls.VERSION:
            raise input_error(
                Reason.UNSUPPORTED_FORMAT,
                f"format version {version}",
                f"expected at most {cls.VERSION}",
                "Use a newer bitimely",
                file=str(path),
            )
        try:
            return cls.model_validate(cls.upgrade_v1(values) if version == 1 else values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise integrity_error(
                str(path), f"found {safe_text(first.get('input'))}", str(first["msg"]), cls.REPAIR, field=where
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path) -> None:
        """Write the record to `path` in one step. Raises UserError: disk (exit 6)."""
        storage.write_json(path, self.to_json())
