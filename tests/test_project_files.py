"""What only GitHub and pre-commit read has the form they expect, and names things that exist.

The schemas are the part of the published ones (schemastore.org) that this project uses: a key beyond them is more
often a misspelling than a feature. All scalars are read as text, so that ``on:`` stays a key.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"enum": ["true", "false"]}
IDENTIFIER: Schema = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"}


def mapping(required: Schema, **optional: Schema) -> Schema:
    """A mapping with these keys and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def some(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def named(values: Schema) -> Schema:
    return {
        "type": "object",
        "propertyNames": IDENTIFIER,
        "additionalProperties": values,
        "minProperties": 1,
    }


#: An action at a version, never at whatever its branch holds today.
ACTION: Schema = {"type": "string", "pattern": r"^[\w.-]+/[\w./-]+@(v[0-9]+(\.[0-9]+)*|[0-9a-f]{40})$"}
_ANY_STEP: dict[str, Schema] = {"name": TEXT, "id": IDENTIFIER, "if": TEXT, "env": named(TEXT)}
STEP: Schema = {
    "oneOf": [
        mapping(
            {"uses": ACTION},
            **{"name": TEXT, "id": IDENTIFIER, "if": TEXT, "with": named(TEXT), "env": named(TEXT)},
        ),
        mapping(
            {"run": TEXT}, **{"name": TEXT, "id": IDENTIFIER, "if": TEXT, "env": named(TEXT), "shell": TEXT}
        ),
    ]
}
BRANCHES: Schema = {
    "anyOf": [{"const": ""}, mapping({}, branches=some(TEXT), tags=some(TEXT), paths=some(TEXT))]
}
ACCESS: Schema = {"type": "object", "additionalProperties": {"enum": ["read", "write", "none"]}}
JOB: Schema = mapping(
    {
        "runs-on": {
            "type": "string",
            "pattern": r"^((ubuntu|macos|windows)-(latest|[0-9.]+)|\$\{\{ matrix\.\S+ \}\})$",
        },
        "steps": some(STEP),
    },
    **{
        "name": TEXT,
        "needs": {"anyOf": [IDENTIFIER, some(IDENTIFIER)]},
        "if": TEXT,
        "env": named(TEXT),
        "permissions": ACCESS,
        "timeout-minutes": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "strategy": mapping({"matrix": named(some({}))}, **{"fail-fast": FLAG}),
    },
)
WORKFLOW: Schema = mapping(
    {
        "name": TEXT,
        "on": mapping({}, push=BRANCHES, pull_request=BRANCHES, schedule=some({}), workflow_dispatch={}),
        # Without it the token may write wherever the repository's settings let it.
        "permissions": ACCESS,
        "jobs": named(JOB),
    },
    env=named(TEXT),
    concurrency={},
)
FIELD: Schema = mapping(
    {
        "type": {"enum": ["markdown", "textarea", "input", "dropdown", "checkboxes"]},
        "attributes": mapping(
            {},
            label=TEXT,
            description=TEXT,
            placeholder=TEXT,
            value=TEXT,
            render=TEXT,
            options=some({}),
            multiple=FLAG,
        ),
    },
    id=IDENTIFIER,
    validations=mapping({"required": FLAG}),
)
FORM: Schema = mapping(
    {"name": TEXT, "description": TEXT, "body": some(FIELD)},
    title=TEXT,
    labels=some(TEXT),
    assignees=some(TEXT),
)
CHOOSER: Schema = mapping(
    {"blank_issues_enabled": FLAG},
    contact_links=some(mapping({"name": TEXT, "url": TEXT, "about": TEXT})),
)
LOCAL_HOOK: Schema = mapping(
    {"id": IDENTIFIER, "name": TEXT, "entry": TEXT, "language": {"enum": ["system", "python"]}},
    types=some(TEXT),
    types_or=some(TEXT),
    files=TEXT,
    exclude=TEXT,
    pass_filenames=FLAG,
    always_run=FLAG,
)
PRE_COMMIT: Schema = mapping(
    {"repos": some(mapping({"repo": {"const": "local"}, "hooks": some(LOCAL_HOOK)}))}
)


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


def files(pattern: str) -> list[Path]:
    found = sorted(ROOT.glob(pattern))
    assert found, pattern
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


WORKFLOWS = files(".github/workflows/*.y*ml")
FORMS = [path for path in files(".github/ISSUE_TEMPLATE/*.y*ml") if path.stem != "config"]
SCHEMAS = [
    *((path, WORKFLOW) for path in WORKFLOWS),
    *((path, FORM) for path in FORMS),
    (ROOT / ".github/ISSUE_TEMPLATE/config.yml", CHOOSER),
    (ROOT / ".pre-commit-config.yaml", PRE_COMMIT),
]


@pytest.mark.parametrize(("path", "schema"), SCHEMAS, ids=lambda value: getattr(value, "name", ""))
def test_it_has_the_form_that_is_expected(path: Path, schema: Schema) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(read(path), schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (STEP, {"uses": "actions/checkout@v4"}, {"uses": "actions/checkout@main"}),
        (STEP, {"run": "make"}, {"run": "make", "uses": "actions/checkout@v4"}),
        (STEP, {"run": "make"}, {"runs": "make"}),
        (JOB, {"runs-on": "ubuntu-latest", "steps": [{"run": "make"}]}, {"runs-on": "ubuntu-latest"}),
        (
            FIELD,
            {"type": "input", "attributes": {"label": "a"}},
            {"type": "text", "attributes": {"label": "a"}},
        ),
    ],
)
def test_the_schemas_tell_good_from_bad(schema: Schema, good: Any, bad: Any) -> None:
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_what_exists(path: Path) -> None:
    jobs = read(path)["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        axes = set(job.get("strategy", {}).get("matrix", {}))
        assert set(re.findall(r"matrix\.([\w-]+)", yaml.dump(job))) <= axes
        for step in job["steps"]:
            assert set(re.findall(r"\bmake ([a-z][\w-]*)", step.get("run", ""))) <= targets()


def test_every_python_that_is_promised_is_tested() -> None:
    promised = {
        text.rpartition(" ")[2]
        for text in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", text)
    }
    tested = {
        version
        for path in WORKFLOWS
        for job in read(path)["jobs"].values()
        for version in job.get("strategy", {}).get("matrix", {}).get("python-version", [])
    }
    assert promised == tested
    assert min(promised, key=lambda text: int(text[2:])) == PROJECT["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_fields_of_a_form_have_names_of_their_own_and_labels(path: Path) -> None:
    asked = [field for field in read(path)["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in asked]
    assert len(set(names)) == len(names) == len(asked)
    assert all(field["attributes"].get("label") for field in asked)


def test_hooks_run_what_the_linters_of_make_run() -> None:
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert hooks
    for hook in hooks:
        tool = re.search(r"-m (\w+)", hook["entry"])
        assert tool and tool[1] in lint, hook["entry"]
