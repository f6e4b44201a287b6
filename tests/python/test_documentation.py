# SPDX-License-Identifier: Apache-2.0
"""The documentation builds with all its links, is complete, and quotes the code correctly.

docs/generate.py writes the reference pages. They are committed, and these tests read them as a code host
shows them.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from kv_offload.cli.app import COMMANDS, load_command
from kv_offload.config import OffloadConfig
from kv_offload.config_compat import own_extra_config
from kv_offload.diagnosis import FAILURE_KINDS, REASONS
from kv_offload.metrics import metric_definitions
from kv_offload.tiers.registry import kinds
from kv_offload.vllm_versions import RELEASES

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
    """Builds the site as for users; --strict makes a dead link an error, which --quiet would hide."""
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
    """Returns the text of a page without the navigation."""
    text = (site / page).read_text()
    return text[text.index("<article") : text.index("</article>")]


def page(name):
    return (DOCS / name).read_text()


def rows(text):
    """Yields the rows of all tables of a text: the cells of each by column name."""
    header = []
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            header = []
        elif not header:
            header = cells
        elif set("".join(cells)) - set("- "):
            found.append(dict(zip(header, cells, strict=True)))
    return found


def test_every_page_is_built(site):
    for source in sorted(DOCS.rglob("*.md")):
        assert (site / source.relative_to(DOCS).with_suffix(".html")).exists(), source
    for place in load(DOCS / "hooks.py").PAGES.values():
        assert (site / place.replace(".md", ".html")).exists()


def test_generated_parts_match_the_code():
    generate = load(DOCS / "generate.py")
    assert len(generate.pages()) >= 6
    assert generate.stale() == [], "run python docs/generate.py"
    used = {name for path in generate.pages() for _, name, _, _ in generate.PART.findall(path.read_text())}
    assert used == set(generate.GENERATORS)


def test_control_a_changed_page_is_stale_and_written_again(tmp_path):
    generate = load(DOCS / "generate.py")
    metrics = page("reference/metrics.md")
    changed = metrics.replace("| counter |", "| gauge |", 1)
    assert changed != metrics
    (tmp_path / "metrics.md").write_text(changed)
    assert generate.stale(tmp_path) == [tmp_path / "metrics.md"]
    assert generate.regenerated(changed) == metrics


def test_a_marker_without_an_end_is_an_error():
    generate = load(DOCS / "generate.py")
    with pytest.raises(ValueError, match="has no end"):
        generate.regenerated("<!-- generated: releases -->\n- vLLM 0.1\n")


def test_every_setting_is_described():
    described = rows(page("reference/configuration.md"))
    for model in (OffloadConfig, *kinds().values()):
        for name, field in model.model_fields.items():
            assert field.description, name
            if name == "type":
                continue
            meanings = [row["meaning"] for row in described if row.get("name") == f"`{name}`"]
            assert any(field.description[1:].rstrip(".") in meaning for meaning in meanings), name


def test_each_kind_of_tier_has_its_own_settings_under_its_name():
    text = page("reference/configuration.md")
    tiers = text[
        text.index("### Shared by several types") : text.index("<!-- end of", text.index("### Shared"))
    ]
    shared, *parts = tiers.split('### `"type": "')
    assert [part.partition('"')[0] for part in parts] == list(kinds())
    for part, kind in zip(parts, kinds().values(), strict=True):
        assert kind.__doc__.splitlines()[0] in part
        own = {row["name"] for row in rows(part)}
        assert f"`{kind.place_key}`" in own
        name = kind.model_fields["type"].default
        common = {row["name"] for row in rows(shared) if row["tiers"] == "all" or f"`{name}`" in row["tiers"]}
        assert own | common == {f"`{key}`" for key in kind.model_fields} - {"`type`"}
        assert own & common == set()


@pytest.mark.parametrize(
    ("key", "default", "possible"),
    [
        ("cpu_bytes_to_use", "**required**", "size"),
        ("root_dir", "**required**", "string"),
        ("max_bytes", "none", "size"),
        ("load_policy", "`auto`", "`auto`, `always`, `never`"),
        ("metrics_port", "none", "integer, 1 to 65535"),
        ("lookup_timeout_ms", "`5000`", "integer, at least 1"),
        ("remote_wait_ms", "`0`", "integer, 0 to 3600000"),
        ("prefault", "`true`", "boolean"),
        ("locality", "none", "`LOCAL`, `REMOTE`"),
        ("model_id", "none", "string"),
        ("secondary_tiers", "none", "list of objects"),
        ("encryption_key_file", "none", "list of strings"),
    ],
)
def test_the_default_and_values_of_a_setting_match_its_type(key, default, possible):
    row = next(row for row in rows(page("reference/configuration.md")) if row.get("name") == f"`{key}`")
    assert (row["default"], row["type"]) == (default, possible)


def test_a_setting_whose_default_differs_between_kinds_is_shown_for_each():
    found = [row for row in rows(page("reference/configuration.md")) if row.get("name") == "`n_read_threads`"]
    assert [(row["default"], row.get("tiers", "")) for row in found] == [
        ("`4`", "`fs`, `redis`, `mooncake`"),
        ("`8`", ""),
    ]


def variables_read():
    """Returns the names of environment variables among the literals of the product."""
    known = re.compile(r"(KV_OFFLOAD|AWS|HF|HUGGINGFACE|VLLM|GOMP|OMP|XDG)_[A-Z0-9_]+|PYTHONHASHSEED")
    names = set()
    for path in [*(ROOT / "kv_offload").rglob("*.py"), *(ROOT / "specs").glob("*.py")]:
        code = ast.walk(ast.parse(path.read_text()))
        names |= {str(node.value) for node in code if isinstance(node, ast.Constant)}
    for path in (ROOT / "csrc").rglob("*.cc"):
        names |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    return sorted(name for name in names if known.fullmatch(name))


def test_every_environment_variable_is_described():
    text = page("reference/configuration.md")
    described = re.findall(r"`(\w+)(?:=\w+)?`", text[text.index("## Environment variables") :])
    assert len(variables_read()) > 15
    assert [name for name in variables_read() if name not in described] == []


def test_every_metric_and_reason_is_described():
    described = {row["name"]: row for row in rows(page("reference/metrics.md")) if "name" in row}
    for definition in [*metric_definitions(), *metric_definitions(worker=True)]:
        row = described[f"`{definition.name}`"]
        assert row["meaning"] == definition.documentation
        assert row["labels"] == (", ".join(f"`{label}`" for label in definition.labels) or "-")
    assert {row["reason"] for row in rows(page("reference/metrics.md")) if "reason" in row} == {
        f"[`{reason}`](../troubleshooting.md#{reason})" for reason in REASONS
    }


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("kv_offload_tier_bytes", "bytes"),
        ("kv_offload_load_bytes_per_second", "bytes/s"),
        ("kv_offload_saved_seconds_total", "seconds"),
        ("kv_offload_failures_total", "-"),
    ],
)
def test_the_unit_of_a_metric_is_the_suffix_of_its_name(name, unit):
    row = next(row for row in rows(page("reference/metrics.md")) if row.get("name") == f"`{name}`")
    assert row["unit"] == unit


def test_every_label_of_several_metrics_is_explained():
    definitions = [*metric_definitions(), *metric_definitions(worker=True)]
    labels = [label for definition in definitions for label in definition.labels]
    explained = {row["label"] for row in rows(page("reference/metrics.md")) if "label" in row}
    assert {f"`{label}`" for label in labels if labels.count(label) > 1} <= explained


def test_the_tier_label_lists_every_kind_of_tier():
    row = next(row for row in rows(page("reference/metrics.md")) if row.get("label") == "`tier`")
    for name in ("cpu", *kinds(), "neighbour"):
        assert f"`{name}`" in row["values"]


def test_the_kind_label_lists_every_kind_of_failure():
    row = next(row for row in rows(page("reference/metrics.md")) if row.get("label") == "`kind`")
    explained = next(part for part in TROUBLESHOOTING.split("### ") if part.startswith("io_error"))
    for kind in FAILURE_KINDS:
        assert f"`{kind}`" in row["values"]
        assert f"| `{kind}` |" in explained


def test_the_description_of_failures_names_each_kind_and_no_other():
    (row,) = [
        row for row in rows(page("reference/metrics.md")) if row.get("name") == "`kv_offload_failures_total`"
    ]
    assert set(re.findall(r"\w+", row["meaning"].partition("kind:")[2])) == set(FAILURE_KINDS)


def test_every_command_is_described():
    text = page("reference/commands.md")
    for name, _, summary in COMMANDS:
        part = text[text.index(f"## kv-offload {name}\n") :]
        described = {row["argument or option"] for row in rows(part[: part.find("\n## ", 3)])}
        assert summary in part
        for param in load_command(name).params:
            if param.param_type_name == "option" and "--help" not in param.opts:
                assert any(param.opts[-1] in cell for cell in described), (name, param.opts)
    for option in ("--max-bytes SIZE", "--repair", "--kv-dtype DTYPE"):
        assert f"`{option}`" in text
    assert "Exit status:" in text
    assert "\b" not in text
    assert "\\b" not in text, "a docstring paragraph that keeps its lines starts with one backslash-b"


def test_every_miss_reason_has_a_section_with_advice(site):
    text = article(site, "troubleshooting.html")
    for reason in REASONS:
        assert f'<h3 id="{reason}">' in text
    named = re.findall(r"(?m)^### (\w+)$", TROUBLESHOOTING)
    assert named == list(REASONS), "sections must be in the order of kv-offload why"


# ---- lines of the log


def quoted_lines():
    """Returns the lines that "By log line" quotes: each a list of parts that occur in this order."""
    part = TROUBLESHOOTING[TROUBLESHOOTING.index("## By log line") : TROUBLESHOOTING.index("## It is slow")]
    cells = re.findall(r"(?m)^\| `([^`]+)`", part)
    return {cell: [piece.strip() for piece in cell.split("…") if piece.strip()] for cell in cells}


def source_texts():
    """Returns every literal of the sources; adjacent ones are joined."""
    texts = []
    for path in [
        *sorted((ROOT / "csrc").rglob("*.cc")),
        *ROOT.glob("kv_offload/**/*.py"),
        *ROOT.glob("specs/*.py"),
    ]:
        texts.append(re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
    return texts


@pytest.mark.parametrize("line", quoted_lines())
def test_a_quoted_log_line_exists_in_the_code(line):
    parts = quoted_lines()[line]
    pattern = ".*?".join(map(re.escape, parts))
    assert any(re.search(pattern, text, re.DOTALL) for text in source_texts())


def warnings_of(path):
    """Yields the literal parts of a module's warnings, without the values that are filled in."""
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
    """Yields every ``kv-offload COMMAND ...`` in code, fenced or inline: (its place, its words)."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
    pages += [ROOT / "examples" / "serve.sh", ROOT / "examples" / "kubernetes" / "base" / "vllm.yaml"]
    names = "|".join(name for name, _, _ in COMMANDS)
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        # on this page, sentences begin with commands too, and usage lines are not examples
        if page.name == "commands.md":
            text = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
        for found in re.finditer(rf"kv-offload (?:{names})\b[^`\n]*", text):
            command = re.split(r"[|>]|\$\(kubectl| #", found.group())[0]
            yield f"{page.relative_to(ROOT)}: {found.group()}", command


def words_of(command):
    """Splits as a shell does; drops the closing parenthesis of $(...) and a sentence's comma."""
    command = re.sub(r'"\$\{(\w+):-[^}]*\}"', r"1GiB", command)
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark of "$(kv-offload ...)"
        words = shlex.split(command.rstrip().rstrip('"'))
    words = [word.rstrip(")") for word in words]
    return [{"SPEED": "8000", "TOKENS/S": "8000"}.get(word, word) for word in words if word]


WRITTEN = dict(written_commands())


@pytest.mark.parametrize("where", WRITTEN)
def test_documented_commands_use_existing_options(where):
    _, name, *words = words_of(WRITTEN[where])
    command = load_command(name)
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("-") and len(word) > 1} <= known | {"--help"}
    page, _, line = where.partition(": ")
    if f"\n{line}\n" in (ROOT / page).read_text():  # a whole line, not only a mention
        command.make_context(name, words)


def test_control_a_missing_option_is_detected():
    assert len(WRITTEN) > 40
    with pytest.raises(Exception, match="No such option"):
        load_command("verify").make_context("verify", ["/root", "--mend"])


def written_configurations():
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for number, text in enumerate(re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)):
            yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("text", list(written_configurations()))
def test_documented_configurations_are_valid(text):
    given = json.loads(text)
    extra, problems = own_extra_config(given)
    assert problems == []
    if "cpu_bytes_to_use" in text:
        assert extra["spec_name"] == "KVOffloadSpec"
        _, notes = OffloadConfig.parse(extra)
        assert notes == []


# ---- README and pictures


def test_the_readme_is_short_and_its_links_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target
    for command in ("bash examples/demo.sh", "bash tests/run.sh"):
        assert command in text


def test_the_badges_of_the_readme_match_the_package():
    """Each badge is a static image, as the repository has no known address, and links to its source."""
    badges = dict(
        re.findall(
            r"\[!\[[^\]]+\]\(https://img\.shields\.io/badge/([^)]+)-blue\)\]\(([^)]+)\)",
            (ROOT / "README.md").read_text(),
        )
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert badges == {
        f"licence-{project['license'].replace('-', '--')}": "LICENSE",
        f"python-{pythons[0]}_to_{pythons[-1]}": "pyproject.toml",
        f"vLLM-{'_'.join(RELEASES)}": "docs/reference/vllm-releases.md",
        "CI-GitHub_Actions": ".github/workflows/ci.yml",
    }


@pytest.mark.parametrize(
    "page", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md"]
)
def test_links_of_other_markdown_files_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_pictures_are_drawn_from_the_committed_results():
    pytest.importorskip("PIL")
    figures = load(ROOT / "benchmarks" / "figures.py")
    assert figures.stale() == []
    shown = [ROOT / "README.md", DOCS / "performance.md", *(DOCS / "benchmarks").glob("*.md")]
    text = "".join(path.read_text() for path in shown)
    for name, *_ in figures.PICTURES:
        assert f"figures/{name}.png" in text


def test_diagrams_are_svg_files_of_one_style_with_a_description():
    """Diagrams are no Mermaid: the site would load a script from elsewhere to draw it."""
    styles = {}
    paths = sorted((DOCS / "figures").glob("*.svg"))
    assert len(paths) >= 5
    text = "".join(path.read_text() for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    for path in paths:
        drawing = path.read_text()
        assert f"figures/{path.name})" in text, path.name
        assert re.search(r"<title [^>]*>.+</title>", drawing), path.name
        assert re.search(r"<desc [^>]*>.+</desc>", drawing, re.DOTALL), path.name
        for name, style in re.findall(r"(?m)^ +(\.?\w+) (\{.*\})$", drawing):
            assert styles.setdefault(name, style) == style, (path.name, name)
    assert "```mermaid" not in text


@pytest.mark.parametrize("kind", kinds())
def test_the_pages_of_all_types_of_tiers_have_the_same_structure(kind):
    name = {"fs": "bounds"}.get(kind, kind)
    common = ["Set up", "Security", "Administration", "Failure modes"]
    headings = re.findall(r"(?m)^## (.+)$", page(f"operations/{name}.md"))
    assert [heading for heading in headings if heading in common] == common
    assert headings[0] == common[0]


def unknown_tests(text):
    """Returns the tests that a page names and that do not exist.

    Names may be shortened: `Suite.begin...`, `Suite.begin*`, `...begin...`, `file.py::test_begin...`.
    """
    macro = re.compile(r"\b\w*TEST\w*\(\s*(\w+),\s*(\w+)\)")
    cpp = {found for path in (ROOT / "tests/cpp").rglob("*.*") for found in macro.findall(path.read_text())}
    files = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    python = {name for source in files for name in re.findall(r"\bdef (test_\w+)", source)}
    names = {name for _, name in cpp} | python
    unknown = []
    for word in re.findall(r"`([^`\n]+)(?<!\.md)`", text):
        if found := re.fullmatch(r"(?:\w+/)?([A-Z]\w+)(\*?)\.(\w*?)_?(\.\.\.|\*)?(?:/\w+)?", word):
            suite, any_suite, begin, shortened = found.groups()
            exists = any(
                (each == suite or (any_suite and each.startswith(suite)))
                and (name == begin or (shortened and name.startswith(begin)))
                for each, name in cpp
            )
        elif found := re.fullmatch(r"(?:[\w/]+\.py)?(?:::)?(?:\.\.\.)?(test_\w+?)(\.\.\.|\*)?", word):
            begin, shortened = found.groups()
            exists = any(name == begin or (shortened and name.startswith(begin)) for name in python)
        elif found := re.fullmatch(r"(?:[\w/]+\.py::)?\.\.\.(\w+?)_?(?:\.\.\.|\*)?", word):
            exists = any(found[1] in name for name in names)
        else:
            continue
        if not exists:
            unknown.append(word)
    return unknown


@pytest.mark.parametrize("name", ["docs/failures.md", "docs/record-format.md", "tests/ATTACKS.md"])
def test_the_tests_that_a_page_names_exist(name):
    assert unknown_tests((ROOT / name).read_text()) == []


def test_control_a_page_that_names_missing_tests_is_reported():
    there = (
        "`Record.*` `LruTest.a_pinned...` `...the_tests_that...` `x.py::test_control_a_page_that...` `a.toml`"
    )
    missing = [
        "Record.no_such_test",
        "NoSuchTest.*",
        "...no_such_test...",
        "x.py::test_no_such...",
        "test_no_such",
    ]
    assert unknown_tests(there + " ".join(f" `{word}`" for word in missing)) == missing


BENCHMARKS = sorted(path.stem for path in (DOCS / "benchmarks").glob("*.md"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_page_is_complete_and_in_the_table_of_results(name):
    """A page has a question, a command that exists, a result and its limits."""
    text = page(f"benchmarks/{name}.md")
    title, question, *_ = text.split("\n\n")
    assert title.startswith("# ")
    assert question.endswith("?")
    headings = re.findall(r"(?m)^## (.+)$", text)
    assert headings == ["Method", "Result", "Limits of the result"]
    method = text[text.index("## Method") : text.index("## Result")]
    commands = re.search(r"```bash\n(.*?)```", method, re.DOTALL)[1]
    for script in re.findall(r"benchmarks/[\w/]+\.(?:py|sh)", commands):
        assert (ROOT / script).exists(), script
    for option in re.findall(r"(?m) (--[a-z-]+)", commands):
        sources = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*.cc")]
        assert any(f'"{option}"' in source.read_text() for source in sources), option
    results = {row["benchmark"] for row in rows(page("performance.md")) if "benchmark" in row}
    assert any(f"](benchmarks/{name}.md)" in cell for cell in results)


def test_every_saved_result_has_a_benchmark_page():
    shown = "".join(page(f"benchmarks/{name}.md") for name in BENCHMARKS)
    saved = {path.stem.split("-")[0] for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert len(saved) > 15
    names = {"mooncake_bench": "remote_bench", "redis_bench": "remote_bench", "s3_bench": "remote_bench"}
    for name in saved:
        assert f"benchmarks/{names.get(name, name)}." in shown, name
