"""Hooks of MkDocs: pages of the public modules and of the notebook; nothing from elsewhere."""

import json
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "grainmill"
NOTEBOOK = "performance_walkthrough"
# What a browser loads with a page; a link that somebody follows is none of these.
_ELSEWHERE = r"""["']?(?:https?:)?//[^>;]*"""
_LOADED = [
    re.compile(rf"<(?:script|img|iframe|source)[^>]*\ssrc={_ELSEWHERE}"),
    re.compile(rf"<link(?![^>]*rel=[\"']?(?:canonical|prev|next))[^>]*href={_ELSEWHERE}"),
    re.compile(rf"(?:@import\s*|url\(){_ELSEWHERE}"),
]


def public_modules():
    """The names of the public modules, the package first."""
    names = ["grainmill"]
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not any(part.startswith("_") for part in parts):
            names.append(".".join(["grainmill", *parts]))
    return names


def on_config(config):
    """Lists the page of each public module under "Reference"."""
    pages = [{name: f"reference/{name}.md"} for name in public_modules()]
    (section,) = (item for item in config.nav if "Reference" in item)
    section["Reference"] = pages
    return config


def on_files(files, config):
    """Adds the pages that are generated."""
    for name in public_modules():
        text = f"::: {name}\n"
        if name.startswith("grainmill.python"):  # the same classes by older names
            text += "    options:\n      members: false\n"
        page = File.generated(config, f"reference/{name}.md", content=text)
        files.append(page)
    text = (Path(config.docs_dir) / f"{NOTEBOOK}.ipynb").read_text("utf-8")
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=as_markdown(json.loads(text))))
    return files


def as_markdown(notebook):
    """The cells of a notebook as one page, each followed by its output."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(_text_of(output) for output in cell["outputs"]).rstrip()
        if printed:
            parts.append(f'```text title="Output"\n{printed}\n```')
    return "\n\n".join(parts) + "\n"


def _text_of(output):
    if output["output_type"] == "stream":
        return "".join(output["text"])
    return "".join(output["data"]["text/plain"]) + "\n"


def on_post_build(config):
    """Fails if a page would make a browser load something from elsewhere."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix not in {".html", ".css", ".svg"}:
            continue
        text = path.read_text("utf-8")
        for pattern in _LOADED:
            if found := pattern.search(text):
                raise PluginError(f"{path} loads from elsewhere: {found[0][:200]}")
