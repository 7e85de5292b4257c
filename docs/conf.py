# SPDX-License-Identifier: Apache-2.0
"""The documentation site: ``python -m sphinx -W docs build/site``. It needs the extra ``docs`` and
no network."""

import os
import re
import sys
from pathlib import Path
from typing import Any

# before Triton is imported: autodoc imports tdcoll on machines without a GPU
os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tdcoll  # noqa: E402
from tdcoll import fused, ops  # noqa: E402

for _name in fused.__all__:
    setattr(fused, _name, getattr(fused, _name))  # autodoc finds no name that was never used
for _name in ops.__all__:  # of a custom operator, as of a device function:
    setattr(ops, _name, getattr(getattr(ops, _name), "_init_fn", getattr(ops, _name)))
for _name, _value in [(name, getattr(tdcoll, name)) for name in tdcoll.__all__]:
    if hasattr(_value, "fn"):  # autodoc shows the Python function inside
        setattr(tdcoll, _name, _value.fn)

project = "tdcoll"
author = "the tdcoll authors"
version = release = tdcoll.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_templates",
    "tutorials/*.ipynb",
    "tutorials/sg_execution_times.rst",
    "sg_execution_times.rst",
]
templates_path = ["_templates"]
default_role = "code"
html_theme = "furo"
html_title = f"tdcoll {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_heading_anchors = 4  # the anchors of GitHub, which shows the same pages
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = "$ "

# The tutorials are jobs of several processes, so the site shows them and doesn't run them; the
# tests run them.
sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "plot_gallery": False,
    "ignore_pattern": r"helpers\.py",
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
}


_PAGES = {
    ROOT / f"{name}.md": ROOT / f"docs/{page}.md"
    for name, page in [
        ("README", "index"),
        ("CONTRIBUTING", "contributing"),
        ("CHANGELOG", "changelog"),
    ]
}
"""Pages of the site that show a file of the repository's root."""

_END = "<!-- the file's text ends here -->\n"


def _link(found: "re.Match[str]", base: Path, page: Path) -> str:
    """Point a link at a page of the site. Source files, which the site doesn't have, are named and
    not linked."""
    text, target = found[1], found[2]
    path, _, anchor = target.partition("#")
    if not path or re.match(r"\w+:", target):
        return found[0]
    file = (base / path).resolve()
    file = _PAGES.get(file, file)
    if file == ROOT / "tutorials":
        file = ROOT / "docs/tutorials/index.rst"
    elif file.parent == ROOT / "tutorials" and file.name[0].isdigit():
        file = ROOT / "docs/tutorials" / f"{file.stem}.rst"
    elif not (file.is_file() and file.is_relative_to(ROOT / "docs")):
        text = text.removeprefix("[").removesuffix("]")
        return text if text.startswith("`") else f"{text} (`{file.relative_to(ROOT)}`)"
    return f"{text}({os.path.relpath(file, page.parent)}{anchor and '#'}{anchor})"


def _links(app: Any, name: str, source: list[str]) -> None:
    """Make the links of a page, which lead to files of the repository, work on the site."""
    page = Path(app.env.doc2path(name))
    if page.suffix != ".md":  # a tutorial, whose code is indented
        source[0] = re.sub(r"^\S.*", _named, source[0], flags=re.MULTILINE)
        return
    (original,) = [file for file, shown in _PAGES.items() if shown == page] or [page]
    text = original.read_text(encoding="utf-8")
    text = re.sub(
        r"(!?\[[^]]*\])\(([^)\s]+)\)", lambda found: _link(found, original.parent, page), text
    )
    source[0] = text if original == page else f"{text}\n{source[0].partition(_END)[2]}"


_CONTEXT = ["rank", "world_size", "device", "max_blocks", "monitor", "closed", "check", "close"]
_PUBLIC = {
    "CollectiveContext": [*_CONTEXT, "max_bytes_per_rank", "ll_bytes", "lamport_bytes"],
    "SparseContext": _CONTEXT,
    "WaitMonitor": ["words", "expired", "check", "abort", "raise_if_expired"],
}
"""Members of these classes that are for users; the others are for tdcoll's own modules."""


def _named(found: "re.Match[str]") -> str:
    """Make links of the pages that a line of reStructuredText names."""
    return re.sub(r"(?:``)?\bdocs/([\w-]+)\.md(?:#[\w-]+)?(?:``)?", r":doc:`/\1`", found[0])


def _name_pages(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Make links of the pages that docstrings name."""
    lines[:] = [re.sub(r".*", _named, line, count=1) for line in lines]


def _skip(app: Any, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave the other members out; None leaves the decision to autodoc."""
    public = _PUBLIC.get(app.env.temp_data.get("autodoc:class") or "") if what == "class" else None
    return True if public and name not in public else None


def setup(app: Any) -> None:
    """Register the rewriting of links, and the choice of members."""
    app.connect("source-read", _links)
    app.connect("autodoc-process-docstring", _name_pages)
    app.connect("autodoc-skip-member", _skip)
