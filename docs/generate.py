# SPDX-License-Identifier: Apache-2.0
"""Generates the parts of the documentation that come from the code: settings, metrics, commands, releases.

    python docs/generate.py            write every generated part
    python docs/generate.py --check    write nothing; exit status 1 and the names of the pages that are stale

A page marks a generated part with two lines, and the text between them is replaced:

    <!-- generated: NAME -->
    <!-- end of generated -->

NAME is a key of GENERATORS. The pages are committed, so that they are complete on any code host. This script
needs the installed package.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)
ALL_TIERS = "all"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. Raises ValueError for a row with a wrong number of cells."""
    lines = []
    for cells in (header, ["---"] * len(header), *rows):
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells in a table of {len(header)} columns: {cells}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def code(text: str) -> str:
    """Code in a cell of a table. A bar is written as a character reference, since hosts differ on ``\\|``."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{text.replace('<', '&lt;').replace('|', '&#124;')}</code>"


# ---- settings


def setting_rows(fields: Mapping[str, FieldInfo]) -> list[list[str]]:
    """Returns name, type, default and meaning of each field."""
    return [
        [f"`{name}`", _type(field), _default(field), _sentence(field.description or "")]
        for name, field in fields.items()
    ]


def _sentence(text: str) -> str:
    """Adds a full stop and a capital letter; words such as vLLM, auto: or https:// keep their form."""
    if re.match("[a-z]+[ ,]", text):
        text = text[0].upper() + text[1:]
    return text + ("" if text.endswith(".") else ".")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if field.default in (None, (), "", {}):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _type(field: FieldInfo) -> str:
    """Returns the values that a field accepts, from its annotation."""
    annotation = field.annotation
    metadata = list(field.metadata)
    for part in get_args(annotation):  # Optional[Annotated[...]]
        metadata += [item for item in get_args(part) if not isinstance(item, type)]
    if any("parse_byte_size" in repr(item) for item in metadata):
        return "size"
    types = [part for part in (annotation, *get_args(annotation)) if part is not type(None)]
    if words := _literals(annotation):
        return ", ".join(f"`{word}`" for word in words) + (", list" if "tuple" in str(annotation) else "")
    if bool in types:
        return "boolean"
    if int in types:
        return f"integer, {_bounds(metadata)}"
    if float in types:
        return f"number, {_bounds(metadata)}"
    if get_origin(annotation) is dict:
        return "object"
    if "tuple" in str(annotation):
        return "list of strings" if "str" in str(annotation) else "list of objects"
    return "string"


def _bounds(metadata: list[Any]) -> str:
    for item in list(metadata):
        metadata += getattr(item, "metadata", [])  # a FieldInfo inside of Annotated
    low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    above = next((item.gt for item in metadata if isinstance(item, Gt)), None)
    high = next((item.le for item in metadata if isinstance(item, Le)), None)
    if high is not None:
        return f"{low} to {high}"
    return f"above {above}" if low is None else f"at least {low}"


def _literals(annotation: Any) -> list[str]:
    args = get_args(annotation)
    if args and all(isinstance(arg, str) for arg in args):
        return list(args)
    return [word for arg in args for word in _literals(arg)]


def engine_settings() -> str:
    from kv_offload.config import OffloadConfig

    return table(("name", "type", "default", "meaning"), setting_rows(OffloadConfig.model_fields))


def tenant_settings() -> str:
    from kv_offload.tenants import TenantConfig

    return table(("name", "type", "default", "meaning"), setting_rows(TenantConfig.model_fields))


def tier_settings() -> str:
    """Returns the settings that several kinds share, then the others below the name of each kind."""
    from kv_offload.tiers.registry import kinds

    shared: dict[tuple[str, ...], list[str]] = {}
    for name, kind in kinds().items():
        for row in setting_rows(kind.model_fields):
            if row[0] != "`type`":
                shared.setdefault(tuple(row), []).append(name)
    header = ("name", "type", "default", "meaning")
    rows = []
    for row, names in shared.items():
        if len(names) > 1:
            tiers = ALL_TIERS if len(names) == len(kinds()) else ", ".join(f"`{name}`" for name in names)
            rows.append([*row[:3], tiers, row[3]])
    parts = ["### Shared by several types", table((*header[:3], "tiers", header[3]), rows)]
    for name, kind in kinds().items():
        own = [row for row, names in shared.items() if names == [name]]
        described = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        parts += [f'### `"type": "{name}"`', " ".join(described.split()), table(header, own)]
    return "\n\n".join(parts)


# ---- hints about sessions


def hint_fields() -> str:
    """Returns the fields of kv_offload_hints, then those of every action."""
    from kv_offload.hints import Action, Envelope

    return "\n\n".join(
        [_hint_table(Envelope.model_fields), "Every action has:", _hint_table(Action.model_fields)]
    )


def hint_actions() -> str:
    """Returns a section for each type of action."""
    from kv_offload.hints import ACTIONS, Action, type_of

    parts = []
    for action in ACTIONS:
        own = {
            name: field
            for name, field in action.model_fields.items()
            if name != "type" and name not in Action.model_fields
        }
        parts += [f"### {type_of(action)}", " ".join((inspect.getdoc(action) or "").split())]
        parts += [_hint_table(own)] if own else []
    return "\n\n".join(parts)


def _hint_table(fields: Mapping[str, FieldInfo]) -> str:
    types = {"version": "`1`", "actions": "list of objects", "target": "object with `session`, `branch`"}
    rows = [[row[0], types.get(row[0].strip("`"), row[1]), *row[2:]] for row in setting_rows(fields)]
    return table(("field", "type", "default", "meaning"), rows)


# ---- metrics

_UNITS = ("bytes_per_second", "tokens_per_second", "bytes", "tokens", "seconds", "chunks", "ratio")


def unit(name: str) -> str:
    """Returns the unit at the end of a metric's name; "-" for event counts and 0/1 values."""
    stem = name.removesuffix("_total")
    found = next((each for each in _UNITS if stem.endswith(f"_{each}")), "-")
    return found.replace("_per_second", "/s")


def metrics(worker: bool) -> str:
    from kv_offload.metrics import metric_definitions

    rows = [
        [
            f"`{each.name}`",
            each.type,
            ", ".join(f"`{label}`" for label in each.labels) or "-",
            unit(each.name),
            each.documentation,
        ]
        for each in metric_definitions(worker=worker)
    ]
    return table(("name", "type", "labels", "unit", "meaning"), rows)


def miss_reasons() -> str:
    from kv_offload.diagnosis import REASONS

    rows = [
        [f"[`{reason}`](../troubleshooting.md#{reason})", _sentence(meaning)]
        for reason, (meaning, _) in REASONS.items()
    ]
    return table(("reason", "meaning"), rows)


# ---- commands


def command_list() -> str:
    from kv_offload.cli.app import COMMANDS

    rows = [[f"[`kv-offload {name}`](#kv-offload-{name})", summary] for name, _, summary in COMMANDS]
    return table(("command", "purpose"), rows)


def commands() -> str:
    from kv_offload.cli.app import COMMANDS, load_command

    return "\n\n".join(_command(name, load_command(name)) for name, _, _ in COMMANDS)


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = re.sub("[{}]", "", " ".join(command.collect_usage_pieces(context)))
    parts = [f"## kv-offload {name}", *_paragraphs(command.help)]
    parts.insert(2, f"```text\nkv-offload {name} {usage}\n```")
    records = (param.get_help_record(context) for param in command.get_params(context))
    rows = [_option(*record) for record in records if record is not None and "--help" not in record[0]]
    parts.append(table(("argument or option", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _option(names: str, help_text: str) -> list[str]:
    """Returns a row from a --help text, which may end in [default: 50; x>=0]."""
    meaning, default = " ".join(help_text.split()), "-"
    if found := re.search(r"\s*\[([^\[\]]+)\]$", meaning):
        meaning = meaning[: found.start()]
        for extra in found.group(1).split("; "):
            if extra.startswith("default: "):
                default = code(extra.removeprefix("default: "))
            elif extra == "required":
                default = "**required**"
            else:
                meaning += f" At least {extra[3:]}." if extra.startswith("x>=") else f" Range: {code(extra)}."
    return [code(re.sub(" <(?:str|path)>", "", names)), default, meaning]


def _paragraphs(text: str) -> list[str]:
    """Splits a docstring into paragraphs like click: one that starts with a backspace keeps its lines."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("\b"):
            title, _, lines = paragraph.strip("\b\n").partition("\n")
            listing = "\n".join(line.strip() for line in lines.splitlines())
            parts.append(f"{title}\n\n```bash\n{listing}\n```")
        else:
            parts.append(" ".join(paragraph.split()))
    return parts


# ---- releases


def releases() -> str:
    from kv_offload.vllm_versions import RELEASES

    return "\n".join(f"- vLLM {release}" for release in RELEASES)


def version() -> str:
    import kv_offload

    return f"This documentation describes version {kv_offload.__version__}."


GENERATORS: dict[str, Callable[[], str]] = {
    "engine_settings": engine_settings,
    "tenant_settings": tenant_settings,
    "tier_settings": tier_settings,
    "hint_fields": hint_fields,
    "hint_actions": hint_actions,
    "metrics": lambda: metrics(worker=False),
    "worker_metrics": lambda: metrics(worker=True),
    "miss_reasons": miss_reasons,
    "command_list": command_list,
    "commands": commands,
    "releases": releases,
    "version": version,
}


# ---- pages


def regenerated(text: str) -> str:
    """Returns a page with the current text between its marks.

    Raises ValueError for a mark without an end, and KeyError for a name that is not in GENERATORS.
    """
    if text.count("<!-- generated: ") != len(PART.findall(text)):
        raise ValueError("a generated part has no end: write <!-- end of generated --> on a line below it")
    return PART.sub(lambda found: f"{found[1]}\n{GENERATORS[found[2]]()}\n\n{found[4]}", text)


def pages(docs: Path = DOCS) -> list[Path]:
    """Returns the pages with generated parts."""
    return [path for path in sorted(docs.rglob("*.md")) if "<!-- generated: " in path.read_text("utf-8")]


def stale(docs: Path = DOCS) -> list[Path]:
    """Returns the pages whose generated parts are out of date."""
    return [path for path in pages(docs) if regenerated(path.read_text("utf-8")) != path.read_text("utf-8")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, name the pages that are stale")
    check = parser.parse_args().check
    changed = stale()
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {'stale: run python docs/generate.py' if check else 'written'}")
        if not check:
            path.write_text(regenerated(path.read_text("utf-8")), "utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
