"""The documentation: it builds with all its links, has everything there is, and quotes what the code says.

docs/hooks.py generates the reference pages; here they are read as mkdocs has built them.
"""

import ast
import html
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kv_offload.cli.app import COMMANDS, load_command
from kv_offload.config import OffloadConfig
from kv_offload.config_compat import own_extra_config
from kv_offload.diagnosis import REASONS
from kv_offload.metrics import metric_definitions
from kv_offload.tiers import kinds

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as for users; --strict makes a link that leads nowhere an error, which --quiet would hide."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def article(site, page):
    """What stands on a page, beside the navigation."""
    text = (site / page).read_text()
    return text[text.index("<article") : text.index("</article>")]


def test_every_page_is_there_and_none_is_left_ungenerated(site):
    for page in sorted(DOCS.rglob("*.md")):
        built = site / page.relative_to(DOCS).with_suffix(".html")
        assert "generated:" not in built.read_text(), built
    for place in load(DOCS / "hooks.py").PAGES.values():
        assert (site / place.replace(".md", ".html")).exists()


def test_every_setting_is_described(site):
    text = article(site, "reference/configuration.html")
    for model in (OffloadConfig, *kinds().values()):
        for name, field in model.model_fields.items():
            assert f"<td><code>{name}</code></td>" in text, name
            assert field.description, name
            assert html.escape(field.description, quote=False) in text, name


def test_each_kind_of_tier_has_its_own_settings_under_its_name(site):
    text = article(site, "reference/configuration.html")
    parts = text.split('<code>"type": "')[1:]
    assert [part.partition('"')[0] for part in parts] == list(kinds())
    for part, kind in zip(parts, kinds().values(), strict=True):
        assert kind.__doc__.splitlines()[0] in part
        assert f"<td><code>{kind.place_key}</code></td>" in part
        assert "<td><code>write_policy</code></td>" not in part or "write_policy" in kind.__annotations__


@pytest.mark.parametrize(
    ("key", "default", "possible"),
    [
        ("cpu_bytes_to_use", "needed", "a size"),
        ("max_bytes", "none", "a size"),
        ("load_policy", "auto", "auto, always, never"),
        ("n_read_threads", "4", "1 to 256"),
        ("metrics_port", "none", "1 to 65535"),
        ("lookup_deadline_ms", "5000", "1 or more"),
        ("await_records_ms", "0", "0 to 3600000"),
        ("prefault", "true", "true, false"),
        ("locality", "none", "LOCAL, REMOTE"),
        ("model_id", "none", "text"),
        ("secondary_tiers", "none", "a list of tables"),
    ],
)
def test_a_settings_default_and_values_are_what_its_type_says(site, key, default, possible):
    text = article(site, "reference/configuration.html")
    row = re.search(rf"<td><code>{key}</code></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", text)
    assert [re.sub("<.*?>", "", cell) for cell in row.groups()] == [default, possible]


def test_every_metric_and_reason_is_described(site):
    text = article(site, "reference/metrics.html")
    for definition in [*metric_definitions(), *metric_definitions(worker=True)]:
        assert f"<code>{definition.name}</code>" in text
        assert definition.documentation in text
    for reason in REASONS:
        assert f"<code>{reason}</code>" in text


def test_every_command_is_described(site):
    text = article(site, "reference/commands.html")
    for name, _, summary in COMMANDS:
        assert f"kv-offload {name}" in text
        assert summary in text
    for option in ("--max-bytes SIZE", "--repair", "--kv-dtype DTYPE"):
        assert f"<code>{option}" in text or option in text
    assert "Exit status:" in text
    assert "\b" not in text
    assert "\\b" not in text, "a docstring's paragraph that keeps its lines begins with one backslash"


def test_every_miss_reason_has_a_section_that_says_what_to_do(site):
    text = article(site, "troubleshooting.html")
    for reason in REASONS:
        assert f'<h3 id="{reason}">' in text
    named = re.findall(r"(?m)^### (\w+)$", TROUBLESHOOTING)
    assert named == list(REASONS), "in the order in which kv-offload why knows them"


# ---- lines of the log


def quoted_lines():
    """The lines that "By log line" quotes: each a list of parts that stand in this order."""
    part = TROUBLESHOOTING[TROUBLESHOOTING.index("## By log line") : TROUBLESHOOTING.index("## It is slow")]
    cells = re.findall(r"(?m)^\| `([^`]+)`", part)
    return {cell: [piece.strip() for piece in cell.split("…") if piece.strip()] for cell in cells}


def source_texts():
    """Every literal of the sources; adjacent ones are joined."""
    texts = []
    for path in [
        *sorted((ROOT / "csrc").rglob("*.cc")),
        *ROOT.glob("kv_offload/**/*.py"),
        *ROOT.glob("specs/*.py"),
    ]:
        texts.append(re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
    return texts


@pytest.mark.parametrize("line", quoted_lines())
def test_a_quoted_line_is_one_that_the_code_says(line):
    parts = quoted_lines()[line]
    pattern = ".*?".join(map(re.escape, parts))
    assert any(re.search(pattern, text, re.DOTALL) for text in source_texts())


def warnings_of(path):
    """The texts that a module warns with, as far as they are literals: without what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("warning", "error")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "logger"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def test_every_warning_is_quoted():
    told = [
        text
        for folder in ("kv_offload", "specs")
        for path in (ROOT / folder).rglob("*.py")
        for text in warnings_of(path)
        if text != "%s"
    ]
    assert len(told) >= 6
    for text in told:
        found = [
            line for line, parts in quoted_lines().items() if all(part.rstrip(":") in text for part in parts)
        ]
        assert found, f"docs/troubleshooting.md quotes no part of: {text}"


# ---- commands as they are written in the documentation


def written_commands():
    """Every ``kv-offload COMMAND ...`` in code, fenced or inline: (where it stands, its words)."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
    pages += [ROOT / "examples" / "serve.sh", ROOT / "examples" / "kubernetes" / "vllm.yaml"]
    names = "|".join(name for name, _, _ in COMMANDS)
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        for found in re.finditer(rf"kv-offload (?:{names})\b[^`\n]*", text):
            command = re.split(r"[|>]|\$\(kubectl| #", found.group())[0]
            yield f"{page.relative_to(ROOT)}: {found.group()}", command


def words_of(command):
    """As a shell splits it; a closing parenthesis of $(...) and a sentence's comma do not belong to it."""
    command = re.sub(r'"\$\{(\w+):-[^}]*\}"', r"1GiB", command)
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark of "$(kv-offload ...)"
        words = shlex.split(command.rstrip().rstrip('"'))
    words = [word.rstrip(")") for word in words]
    return [{"SPEED": "8000", "TOKENS/S": "8000"}.get(word, word) for word in words if word]


WRITTEN = dict(written_commands())


@pytest.mark.parametrize("where", WRITTEN)
def test_a_written_command_has_the_options_it_uses(where):
    _, name, *words = words_of(WRITTEN[where])
    command = load_command(name)
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("-") and len(word) > 1} <= known | {"--help"}
    page, _, line = where.partition(": ")
    if f"\n{line}\n" in (ROOT / page).read_text():  # to be typed, not only mentioned
        command.make_context(name, words)


def test_the_control_an_option_that_is_not_there_is_seen():
    assert len(WRITTEN) > 40
    with pytest.raises(Exception, match="No such option"):
        load_command("verify").make_context("verify", ["/root", "--mend"])


def written_configurations():
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for number, text in enumerate(re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)):
            yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("text", list(written_configurations()))
def test_a_written_configuration_is_valid(text):
    given = json.loads(text)
    extra, problems = own_extra_config(given)
    assert problems == []
    if "cpu_bytes_to_use" in text:
        assert extra["spec_name"] == "KVOffloadSpec"
        _, notes = OffloadConfig.parse(extra)
        assert notes == []


# ---- README and pictures


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target
    for command in ("bash examples/demo.sh", "bash tests/run.sh"):
        assert command in text


@pytest.mark.parametrize(
    "page", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md"]
)
def test_links_of_what_lies_beside_it_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_pictures_are_drawn_from_the_results_that_are_there():
    pytest.importorskip("PIL")
    figures = load(ROOT / "benchmarks" / "figures.py")
    assert figures.stale() == []
    shown = (ROOT / "README.md").read_text() + (DOCS / "performance.md").read_text()
    for name, *_ in figures.PICTURES:
        assert f"figures/{name}.png" in shown
