"""The page as one file: HTML, style, program and data, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, Final

from rankscope.errors import FolderError
from rankscope.record.texts import visible
from rankscope.run.files import replacing
from rankscope.words.page.pagecontent import PageContent

_OURS: Final = b"<title>rankscope - "
_HEAD_BYTES: Final = 4096
_STATIC: Final = Path(__file__).parent / "static"
_SCRIPTS: Final = (
    "elements.js",
    "store.js",
    "modules.js",
    "columns.js",
    "view.js",
    "map.js",
    "charts.js",
    "meshes.js",
    "detail.js",
    "live.js",
    "main.js",
)
"""In the order in which they need each other."""


def write_file(content: PageContent, out: Path, *, is_forced: bool = False) -> Path:
    """Write a page by rename, so that all readers see a whole one; its owner alone may read it. A
    page that is there is replaced, with `is_forced` any file.

    Raises:
        FolderError: the file cannot be written, or is something else than a page; says why.
    """
    place = Path(os.path.realpath(out))
    try:
        if not out.name or not _may_be_replaced(place, is_forced):
            raise FolderError(
                f"{out}: is no page of rankscope, and stays as it is; name another file, or give "
                "--force to replace a file"
            )
        with replacing(place, is_synced=False) as file:
            file.write(page_html(content).encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        raise FolderError(f"{out}: the page cannot be written: {error.strerror}") from error
    return out


def _may_be_replaced(place: Path, is_forced: bool) -> bool:
    """True where nothing is there, an empty file, or a page; OSError: it cannot be looked at."""
    try:
        found = place.stat()
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode):
        return False
    if is_forced or not found.st_size:
        return True
    with place.open("rb") as there:
        return _OURS in there.read(_HEAD_BYTES)


def page_html(content: PageContent, connect: str = "'none'") -> str:
    """Return the whole page. Its program runs because the page names its hash: nothing else that a
    name from a trace might smuggle in does, and nothing may be fetched but from `connect`, as a
    Content-Security-Policy says it."""
    style, script = _static("page.css"), _program()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    packed = "\n".join(
        f'<script type="application/octet-stream" id="packed-{name}">{_base64(data)}</script>'
        for name, data in content.packed.items()
    )
    parts = {
        "policy": policy,
        "title": html.escape(visible(content.title)),
        "style": style,
        "script": script,
        "data": _safe_json(content.data),
        "packed": packed,
        **content.sections,
    }
    pieces = _static("page.html").split("<!--{")
    made = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}-->")
        made += (parts[name], rest)
    return "".join(made)


def served_data(content: PageContent) -> bytes:
    """Return what the page asks for beside a running job: the same in JSON."""
    found = {
        "title": visible(content.title),
        "sections": content.sections,
        "data": content.data,
        "packed": {name: _base64(data) for name, data in content.packed.items()},
    }
    return json.dumps(found, separators=(",", ":")).encode("ascii")


@cache
def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


@cache
def _program() -> str:
    parts = "\n".join(_static(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _digest(inline: str) -> str:
    return f"sha256-{_base64(hashlib.sha256(inline.encode()).digest())}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _safe_json(data: Any) -> str:
    """Return JSON in which no text can end the element that holds it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
