"""What every group of settings is made of: frozen records and the types of their values.

Owns: ranges and how text becomes a value. Refuses to know: which settings there are. Always holds: an unknown key is an
error, and a value never changes after it is read.
"""

import ast
import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema

from meshloom.config.provenance import Provenance

MANY = 2**53
"""The most that a count can be: up to it floats are exact, so that formulas are."""
Count = Annotated[int, Field(ge=1, le=MANY)]
CountOrZero = Annotated[int, Field(ge=0, le=MANY)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _as_place(value: str) -> str:
    """A name with the home folder in it.

    Raises:
        ValueError: if no file can have it.
    """
    if "\0" in value:
        raise ValueError("a name of a file has no null character")
    return os.path.expanduser(value)


Place = Annotated[str, AfterValidator(_as_place)]
"""Name of a file or folder, relative to the current directory; ``~`` is the home folder, which no shell puts in after ``=``."""


def _as_list(value: Any) -> Any:
    """One text as a list of one. Lists become tuples, as strict validation wants of values that are not JSON any more."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Places = Annotated[
    tuple[Place, ...], BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...])  # what a file may hold
]
"""Names of files; one alone may stand without a list."""


@cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Docstrings of fields by their class and name, of the classes of a module of settings."""
    if not module.startswith("meshloom."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


class Settings(BaseModel):
    """Base of every group of settings: frozen, and an unknown key is an error.

    What checks values is built when the first are read, and docstrings of fields are looked up when a schema is made, so that
    an import costs neither.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of a group, its fields described by their docstrings."""
        found = handler(schema)
        fields = handler.resolve_ref_schema(found).get("properties", {})
        for group in cls.__mro__:
            for name, text in _docstrings(group.__module__).get(group.__name__, {}).items():
                if name in fields:
                    fields[name].setdefault("description", text)
        return found

    @property
    def provenance(self) -> Provenance:
        """Where the values came from; known for settings that ``load_settings`` returned, empty for others."""
        return self._provenance
