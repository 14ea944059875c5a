"""Hooks of MkDocs: pages of the reference and of the notebook; nothing from elsewhere."""

import itertools
import json
import re
from pathlib import Path

import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

NOTEBOOK = "performance_walkthrough"
# What a browser loads with a page; a link that somebody follows is none of these.
_ELSEWHERE = r"""["']?(?:https?:)?//[^>;]*"""
_LOADED = [
    re.compile(rf"<(?:script|img|iframe|source)[^>]*\ssrc={_ELSEWHERE}"),
    re.compile(rf"<link(?![^>]*rel=[\"']?(?:canonical|prev|next))[^>]*href={_ELSEWHERE}"),
    re.compile(rf"(?:@import\s*|url\(){_ELSEWHERE}"),
]

# What people type who want a page, besides the words of its titles.
SEARCHED_FOR = {
    "audio_video.md": ["audio", "video", "wav", "mp3", "speech", "frames"],
    "bagz.md": ["jsonl", "json lines", "ndjson", "webdataset", "tar", "megatron", "bagz"],
    "buckets.md": ["bucket", "s3", "gcs", "gs", "azure", "http", "cloud", "credentials"],
    "caching.md": ["cache"],
    "command_line.md": ["cli", "command line", "convert"],
    "csv.md": ["csv", "tsv", "pandas", "excel", "arrow", "table", "sql"],
    "dataloader.md": ["dataloader"],
    "datasets.md": ["shuffle", "batch", "map", "filter", "repeat", "epoch"],
    "datasets_advanced.md": ["packing", "sequence packing", "mixture"],
    "hugging_face.md": ["hugging face", "huggingface", "hf", "datasets"],
    "image_folders.md": ["image folder", "imagefolder", "folder of images", "folderdatasource"],
    "images.md": ["images", "image decoding", "jpeg", "png", "resize", "crop", "augmentation"],
    "index.md": ["install", "getting started", "quick start"],
    "multi_host.md": ["multi host", "multihost", "multi node", "distributed", "sharding", "hosts"],
    "orbax.md": ["resume", "checkpoint", "orbax", "restore", "preemption", "nnx"],
    "parsing.md": ["parse", "parseexample", "parsejson", "proto"],
    "performance.md": [
        "performance",
        "profiling",
        "profile",
        "threads",
        "num_workers",
        "readoptions",
        "prefetch",
    ],
    "pytorch.md": ["pytorch", "torch", "torch dataloader", "collate_fn"],
    "questions.md": ["error", "exception", "faq", "requires a seed", "questions"],
    "security.md": ["security", "pickle", "untrusted", "vulnerability"],
    "slow.md": [
        "slow",
        "bottleneck",
        "idle",
        "gpu waits",
        "oom",
        "out of memory",
        "hang",
        "hangs",
        "stuck",
        "leak",
    ],
    "sources.md": ["custom source", "random access", "arrayrecord", "paths", "glob"],
    "switching.md": ["grain", "migrate"],
    "tf_data.md": ["tf.data", "tf.data.dataset", "tensorflow"],
    "tfrecord.md": ["tfrecord"],
    "training.md": ["device_put", "keras", "flax", "elastic", "training loop"],
}
# Where somebody looks last: names by their own words come first all the same.
BOOSTS = {"changelog.md": 0.1, "differences.md": 0.5, "names.md": 0.2}

# The name in a heading, which narrow screens break behind a dot.
_PATH = re.compile(r"(?<=doc-object-name )[^>]+>[\w.]+")
# Tables of this many columns do not fit on a phone.
_STACKED = 3


def on_files(files, config):
    """Adds the pages that are generated, and lists those of the reference."""
    handler = config.plugins["mkdocstrings"].get_handler("python")
    modules = reference.modules(handler.collect("grainmill", handler.get_options({})))
    for path, text in reference.pages(modules):
        files.append(File.generated(config, path, content=text))
    (section,) = (item for item in config.nav if "Reference" in item)
    section["Reference"] = reference.navigation(modules)
    text = (Path(config.docs_dir) / f"{NOTEBOOK}.ipynb").read_text("utf-8")
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=as_markdown(json.loads(text))))
    return files


def on_page_markdown(_markdown, page, **_):
    """Tells the search what a page is for."""
    uri = page.file.src_uri
    is_reference = uri.startswith("reference/")
    page.meta["search"] = {"boost": 0.5 if is_reference else BOOSTS.get(uri, 1)}
    if uri in SEARCHED_FOR:
        page.meta["tags"] = SEARCHED_FOR[uri]
    if page.parent is None:  # it has its tab for itself
        page.meta["hide"] = ["navigation"]


def on_page_content(html, page, **_):
    """Gives the cells of wide tables their headings, which narrow screens show beside each."""
    if page.file.src_uri.startswith("reference/"):
        html = html.replace("<table>", "<table data-summary>")
        html = _PATH.sub(lambda found: found[0].replace(".", ".<wbr>"), html, count=1)
    return re.sub(r"<table>.*?</table>", _with_headings, html, flags=re.DOTALL)


def _with_headings(found):
    table = found[0]
    headings = [
        re.sub(r"<[^>]+>", "", text).replace('"', "&quot;")
        for text in re.findall(r"<th[^>]*>(.*?)</th>", table)
    ]
    if len(headings) < _STACKED:
        return table
    column = itertools.cycle(headings)

    def cell(found):
        heading = next(column)
        return f'<td data-heading="{heading}"{found[1]}>' if heading else found[0]

    table = re.sub(r"<td([^>]*)>", cell, table)
    return table.replace("<table>", "<table data-stacked>", 1)


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
    """Adds to the search; fails if a page would make a browser load something from elsewhere."""
    site = Path(config.site_dir)
    (search,) = site.glob("assets/javascripts/workers/search.*.js")
    added = (Path(config.docs_dir) / "javascripts/exact_titles.js").read_text("utf-8")
    search.write_text(added + search.read_text("utf-8"), "utf-8")
    for path in sorted(site.rglob("*")):
        if path.suffix not in {".html", ".css", ".svg"}:
            continue
        text = path.read_text("utf-8")
        for pattern in _LOADED:
            if found := pattern.search(text):
                raise PluginError(f"{path} loads from elsewhere: {found[0][:200]}")
