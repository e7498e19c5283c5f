"""JSON Schema of recipes, for editors: derived from the signatures that validate them.

Whatever the validator accepts, the schema accepts. It cannot express everything: only ``blt validate`` knows that a
fraction such as ``300/200`` is out of bounds, that a number is not finite, or that two components do not fit
together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bltoolbox.config.describe import describe
from bltoolbox.config.hooks import KINDS, SHORT
from bltoolbox.config.problem_keys import IMAGE_KEYS, NEEDED
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.signatures import Parameter, Signature, Type
from bltoolbox.config.validation import PLAIN
from bltoolbox.errors import MissingError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registered, Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: The name of the file in the line for editors of a recipe.
SCHEMA_FILE = "bltoolbox.schema.json"

Schema = dict[str, Any]

_KEYWORDS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "multiple_of": "multipleOf",
}
_UNSIGNED = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
#: A denominator has a digit that is not 0 before its exponent.
_DENOMINATOR = rf"(?=[0-9.]*[1-9]){_UNSIGNED}"


def recipe_schema(registry: Registry) -> tuple[Schema, list[str]]:
    """The schema for all components of a registry, and a message for each component that cannot be described."""
    definitions: Schema = {}
    troubles: list[str] = []
    for kind in KINDS:
        entries: list[tuple[Registered, Signature]] = []
        for registered in registry.components(kind):
            try:
                entries.append((registered, registered.signature()))
            except MissingError as error:
                troubles.append(str(error))
        definitions[kind] = _kind(kind, entries)
        for registered, signature in entries:
            definitions[f"{kind}.{registered.name}"] = _component(registered, signature)
    settings = describe(Recipe)
    root = {
        "$schema": DIALECT,
        "title": "bltoolbox recipe",
        "description": settings.about,
        **_mapping(settings.parameters),
        "$defs": definitions,
    }
    _budget_is_finite(root["properties"]["budget"])
    root |= _problem(registry, root)
    root["properties"]["variants"] = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"type": "object"},
        "description": "Settings by name, of which variant=NAME chooses one and blt sweep runs all.",
    }
    return root, troubles


def dump_schema(schema: Schema) -> str:
    """As text; equal schemas have equal texts."""
    return json.dumps(schema, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _kind(kind: str, entries: Sequence[tuple[Registered, Signature]]) -> Schema:
    """A component of this kind: its name alone, a plain number where one stands for a component, or a mapping whose
    other keys depend on its name."""
    names: list[Any] = [{"const": entry.name, "description": entry.component.summary} for entry, _ in entries]
    complete = [
        entry.name for entry, signature in entries if not any(p.required for p in signature.parameters)
    ]
    chosen: list[Any] = [
        {
            "if": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"const": entry.name}},
            },
            "then": _ref(f"{kind}.{entry.name}"),
        }
        for entry, _ in entries
    ]
    return {
        "anyOf": [
            {"type": "string", "enum": complete},
            *(_type(PLAIN)["anyOf"] if kind in SHORT else []),
            {"type": "object", "properties": {"name": {"anyOf": names or [False]}}},
        ],
        "allOf": chosen or [True],
    }


def _component(registered: Registered, signature: Signature) -> Schema:
    schema = _mapping(signature.parameters)
    name = {"const": registered.name, "description": registered.component.summary}
    schema["properties"] = {"name": name, **schema["properties"]}
    text = "\n\n".join(filter(None, (registered.component.summary, signature.doc)))
    return {"description": text, **schema}


def _mapping(parameters: Sequence[Parameter]) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": {parameter.name: _parameter(parameter) for parameter in parameters},
        "additionalProperties": False,
    }
    if required := [parameter.name for parameter in parameters if parameter.required]:
        schema["required"] = required
    return schema


def _parameter(parameter: Parameter) -> Schema:
    schema = _type(parameter.type, parameter.default if not parameter.required else None)
    if parameter.doc:
        schema = {"description": parameter.doc, **schema}
    if not parameter.required and _is_json(parameter.default):
        schema = {**schema, "default": parameter.default}
    return schema


def _type(type: Type, default: Any = None) -> Schema:
    """What a value of this type may look like in a recipe."""
    if type.name == "union":
        return {"anyOf": [_type(option, default) for option in type.items]}
    if type.name == "choice":
        return {"enum": list(type.choices)}
    if type.name == "component":
        return _nested(type.role, default)
    if type.name == "settings":
        return _mapping(type.parameters)
    if type.name in ("list", "tuple"):
        return {"type": "array", "items": _type(type.items[0]), **_lengths(type, "Items")}
    if type.name == "fixed":
        size = len(type.items)
        items = [_type(item) for item in type.items]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": size, "maxItems": size}
    if type.name == "float":
        fraction = {"type": "string", "pattern": _fraction(type.bounds)}
        return {"anyOf": [{"type": "number", **_bounds(type)}, fraction]}
    if type.name in ("str", "path"):
        return {
            "type": "string",
            **({"minLength": 1} if type.name == "path" else {}),
            **_lengths(type, "Length"),
        }
    names = {"bool": "boolean", "int": "integer", "null": "null"}
    return {"type": names[type.name], **_bounds(type)}


def _nested(kind: str, default: Any) -> Schema:
    """A component; options without a name are those of the default one, where there is one."""
    if isinstance(default, Mapping) and "name" in default:
        nameless = {"type": "object", "not": {"required": ["name"]}}
        chosen = {"if": nameless, "then": _ref(f"{kind}.{default['name']}")}
        return {"allOf": [_ref(kind), chosen]}
    return {"allOf": [_ref(kind), {"required": ["name"]}]}


def _fraction(bounds: Mapping[str, Any]) -> str:
    """Fractions of two numbers; without a minus where the number cannot be negative."""
    low = max((bounds[key] for key in ("gt", "ge") if key in bounds), default=-math.inf)
    sign = r"\+?" if low >= 0 else "[-+]?"
    return rf"^\s*{sign}{_UNSIGNED}\s*/\s*{_DENOMINATOR}\s*$"


def _bounds(type: Type) -> Schema:
    return {_KEYWORDS[key]: value for key, value in type.bounds.items() if key in _KEYWORDS}


def _lengths(type: Type, what: str) -> Schema:
    names = {"min_len": f"min{what}", "max_len": f"max{what}"}
    return {names[key]: value for key, value in type.bounds.items() if key in names}


def _budget_is_finite(budget: Schema) -> None:
    """``Budget`` itself refuses to be empty; the schema repeats it."""
    limits = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in budget["properties"]
    ]
    budget["anyOf"] = limits


def _problem(registry: Registry, root: Schema) -> Schema:
    """What is required and what is allowed: the sections for images, or a problem that is none of them."""
    names = [entry.name for entry in registry.components("problem") if _is_of_images(entry)]
    chosen = {"anyOf": [{"enum": names}, {"type": "object", "properties": {"name": {"enum": names}}}]}
    return {
        "required": [name for name in root["required"] if name not in NEEDED],
        "if": {"properties": {"problem": chosen}},
        "then": {"required": list(NEEDED)},
        "else": {"properties": {key: False for key in IMAGE_KEYS}},
    }


def _is_of_images(registered: Registered) -> bool:
    try:
        return "from_sections" in registered.signature().traits.flags
    except MissingError:
        return False


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
