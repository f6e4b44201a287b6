"""Reading a /metrics page: the text form of Prometheus, as far as figures need it."""

import math
import re
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?[0-9]+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """One series of a page and its value."""

    name: str
    labels: dict[str, str]
    value: float


def fetch(url: str, timeout: float = 10.0) -> str:
    """The page at ``url``. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        return str(reply.read().decode("utf-8", errors="replace"))


def parse(text: str) -> list[Sample]:
    """Every sample of a page; lines that are none are passed over."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SERIES.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        samples.append(Sample(name, dict(_labels(labels or "")), number))
    return samples


def _labels(text: str) -> Iterable[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, re.sub(r"\\.", lambda found: _ESCAPES.get(found.group(), found.group()), value)


class Page:
    """One scrape, asked by name and label. Series of several engines and models are taken together."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in parse(text):
            if not math.isnan(sample.value):
                self._by_name.setdefault(sample.name, []).append(sample)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._by_name)

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all series that carry ``labels``; 0 when there is none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def max(self, name: str, **labels: str) -> float:
        return max((sample.value for sample in self._matching(name, labels)), default=0.0)

    def values_of(self, name: str, label: str) -> list[str]:
        """What ``label`` is on the series of ``name``, each once, in their order."""
        return list(dict.fromkeys(sample.labels.get(label, "") for sample in self._by_name.get(name, ())))

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self._by_name.get(name, ())]

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [
            sample
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(label) == value for label, value in labels.items())
        ]
