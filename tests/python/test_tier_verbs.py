# SPDX-License-Identifier: Apache-2.0
"""Tier wrappers forward every method of a tier: a forgotten method with a default would go unnoticed."""

import re
from pathlib import Path

TIER = Path(__file__).resolve().parents[2] / "csrc" / "tier"


def verbs() -> list[str]:
    text = re.sub(r"//.*", "", (TIER / "tier.h").read_text())
    return re.findall(r"virtual [^;{~]*?(\w+)\(", text[text.index("class Tier {") :])


def test_encrypted_names_forward_every_method() -> None:
    text = (TIER / "encrypted_key_tier.cc").read_text()
    names = verbs()
    assert {"codec_reason", "cancel", "estimate_read_seconds", "poll", "submit", "used"} <= set(names)
    for name in names:
        assert f"tier_->{name}(" in text, f"EncryptedKeyTier does not forward {name}()"
