"""Every field the published APIs have is known here, and docs/api.md says what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_fields
import pytest

from quire.serve.core.fields import fields_of
from quire.serve.http import field_tables as coverage

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PUBLISHED = published_fields.kept()


@pytest.mark.parametrize("title", PUBLISHED)
def test_every_published_field_is_known(title: str) -> None:
    assert PUBLISHED[title] <= {field.name for field in fields_of(coverage.BODIES[title])}


@pytest.mark.parametrize("title", PUBLISHED)
def test_what_is_not_published_is_called_an_extension(title: str) -> None:
    known: set[Any] = PUBLISHED[title] | {"min_p", "verbose", "temperature", "top_k", "top_p"}
    for field in fields_of(coverage.BODIES[title]):
        # A field of a newer client may be refused before this one has heard of it.
        assert field.name in known or field.kind in ("extension", "refused"), field.name


@pytest.mark.slow  # depends on what was released since, not on the change
def test_the_kept_fields_are_those_of_the_installed_clients() -> None:
    for title, names in published_fields.installed().items():
        assert names <= PUBLISHED[title], f"{title}: run python tests/serve/published_fields.py"


def test_the_page_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert coverage.rewritten(page) == page, "run: python -m quire.serve.http.field_tables docs/api.md"
