"""What mkdocs calls to build the documentation: pages generated from code, and from files outside docs/.

A page says ``<!-- generated: NAME -->`` where the text of ``GENERATORS[NAME]`` belongs; what stands before it
on its line is for who reads the file itself. So settings, metrics, commands and releases are described in one
place, the code. Needs the installed package.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]

# Pages that are files of the project: where they lie, and their place in the documentation.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "specs/FAILURES.md": "failures.md",
    "specs/RECORD_FORMAT.md": "record-format.md",
}
MARK = re.compile(r"(?m)^.*<!-- generated: (\w+) -->$")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), [], *map(list, rows)]
    lines[1] = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """With bars that do not end it: those in code do not."""
    return re.sub(r"(`[^`]*`)|\|", lambda found: found.group(1) or "\\|", text)


# ---- settings


def settings(fields: Mapping[str, FieldInfo]) -> str:
    rows = (
        (f"`{name}`", _default(field), _possible(field), field.description or "")
        for name, field in fields.items()
    )
    return table(("key", "default", "possible", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    if field.default is None or field.default == ():
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _possible(field: FieldInfo) -> str:
    """The values of a field, as far as its type says them."""
    annotation = field.annotation
    metadata = list(field.metadata)
    for part in get_args(annotation):  # Optional[Annotated[...]]
        metadata += [item for item in get_args(part) if not isinstance(item, type)]
    if any("parse_byte_size" in repr(item) for item in metadata):
        return "a size"
    types = [part for part in (annotation, *get_args(annotation)) if part is not type(None)]
    words = [word for word in _literals(annotation) if word]
    if words:
        return ", ".join(f"`{word}`" for word in words)
    if bool in types:
        return "`true`, `false`"
    if int in types:
        for item in list(metadata):
            metadata += getattr(item, "metadata", [])  # a FieldInfo inside of Annotated
        low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
        high = next((item.le for item in metadata if isinstance(item, Le)), None)
        return f"{low} to {high}" if high is not None else f"{low} or more"
    if "tuple" in str(annotation):
        return "a list of texts" if str in types else "a list of tables"
    return "text"


def _literals(annotation: Any) -> list[str]:
    args = get_args(annotation)
    if args and all(isinstance(arg, str) for arg in args):
        return list(args)
    return [word for arg in args for word in _literals(arg)]


# ---- metrics


def metrics(worker: bool) -> str:
    from kv_offload.metrics import metric_definitions

    return table(
        ("name", "type", "labels", "meaning"),
        (
            (
                f"`{each.name}`",
                each.type,
                ", ".join(f"`{label}`" for label in each.labels),
                each.documentation,
            )
            for each in metric_definitions(worker=worker)
        ),
    )


def miss_reasons() -> str:
    from kv_offload.diagnosis import REASONS

    rows = (
        (f"[`{reason}`](../troubleshooting.md#{reason})", meaning) for reason, (meaning, _) in REASONS.items()
    )
    return table(("reason", "meaning"), rows)


# ---- commands


def commands() -> str:
    from kv_offload.cli.app import COMMANDS, load_command

    return "\n\n".join(_command(name, load_command(name)) for name, _, _ in COMMANDS)


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = re.sub("[{}]", "", " ".join(command.collect_usage_pieces(context)))
    parts = [f"## kv-offload {name}", *_paragraphs(command.help)]
    parts.insert(2, f"```text\nkv-offload {name} {usage}\n```")
    records = (param.get_help_record(context) for param in command.get_params(context))
    rows = [
        (f"`{names.replace(' <str>', '')}`", " ".join(meaning.split()))
        for names, meaning in filter(None, records)
        if "--help" not in names
    ]
    parts.append(table(("argument or option", "meaning"), rows))
    return "\n\n".join(parts)


def _paragraphs(text: str) -> list[str]:
    """A docstring as click has it: paragraphs; one that begins with a backspace keeps its lines."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("\b"):
            title, _, lines = paragraph.strip("\b\n").partition("\n")
            code = "\n".join(line.strip() for line in lines.splitlines())
            parts.append(f"{title}\n\n```bash\n{code}\n```")
        else:
            parts.append(" ".join(paragraph.split()))
    return parts


# ---- releases


def releases() -> str:
    from kv_offload.vllm_versions import RELEASES

    return "\n".join(f"- vLLM {release}" for release in RELEASES)


def version() -> str:
    import kv_offload

    return f"This documentation is of version {kv_offload.__version__}."


def _tier_settings() -> str:
    """What every kind has, and of each kind what it alone has or describes in its own way."""
    from kv_offload.tiers import kinds
    from kv_offload.tiers.base import TierConfig

    common = TierConfig.model_fields
    parts = ["### Of every kind", settings(common)]
    for name, kind in kinds().items():
        own = {
            key: field
            for key, field in kind.model_fields.items()
            if key != "type" and (key not in common or repr(field) != repr(common[key]))
        }
        described = inspect.getdoc(kind) or ""
        parts += [f'### `"type": "{name}"`', described.partition("\n\n")[0], settings(own)]
    return "\n\n".join(parts)


def _engine_settings() -> str:
    from kv_offload.config import OffloadConfig

    return settings(OffloadConfig.model_fields)


GENERATORS: dict[str, Callable[[], str]] = {
    "engine_settings": _engine_settings,
    "tier_settings": _tier_settings,
    "metrics": lambda: metrics(worker=False),
    "worker_metrics": lambda: metrics(worker=True),
    "miss_reasons": miss_reasons,
    "commands": commands,
    "releases": releases,
    "version": version,
}


# ---- what mkdocs calls


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are elsewhere in the project."""
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=relinked(text, source)))
    return files


def relinked(text: str, source: str) -> str:
    """With links that lead to other pages here; what has no page is named without a link."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        name = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        place = PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if place is None:
            return f"`{name}`"
        return f"[{text}]({place}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the generated texts in their places."""
    return MARK.sub(lambda found: GENERATORS[found.group(1)](), markdown)
