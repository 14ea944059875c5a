"""The recipes in docs run with the libraries they are about, and their datasets resume exactly."""

import importlib.util
import re

import pages
import pytest
from test_pages import run_page

TEXT = pages.RECIPES.read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))

# Run after a recipe: `ds` continues at each element, and with workers.
RESUMES = """
```python
import json

import numpy


def after(dataset, state):
    iterator = iter(dataset)
    iterator.set_state(json.loads(state))
    return iterator


in_order = ds.to_iter_dataset() if isinstance(ds, grain.MapDataset) else ds
if isinstance(ds, grain.MapDataset):
    by_workers = ds.to_iter_dataset(grain.ReadOptions(num_workers=2))
else:
    by_workers = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
for dataset, places in ((in_order, range(100)), (by_workers, [37])):
    elements = list(dataset)
    assert len(elements) == len({str(element) for element in elements}) == 100
    with iter(dataset) as iterator:
        for place, element in enumerate(elements):
            if place in places:
                state = json.dumps(iterator.get_state())
                with after(dataset, state) as resumed:
                    numpy.testing.assert_equal(next(resumed), element)
                    if place == 37:
                        numpy.testing.assert_equal(list(resumed), elements[38:])
            numpy.testing.assert_equal(next(iterator), element)
print("resumes")
```

```text title="Output"
resumes
```
"""


def libraries_of(section):
    """The modules that a recipe imports at its top."""
    names = re.findall(r"^(?:import|from) ([\w.]+)", section, re.MULTILINE)
    return sorted({name.partition(".")[0] for name in names})


# Some libraries take seconds to import, or start processes.
@pytest.mark.parametrize("title", SECTIONS)
def test_recipe_runs_and_resumes_at_each_element(title, tmp_path, jax_python):
    for name in libraries_of(SECTIONS[title]):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    page = tmp_path / "page.md"
    page.write_text(SECTIONS[title] + RESUMES, "utf-8")
    done = run_page(page, tmp_path, jax_python)
    assert done.returncode == 0, done.stderr


def test_every_recipe_is_in_the_table():
    listed = re.findall(r"^\| \[(.*?)\]\(#", TEXT, re.MULTILINE)
    assert listed == list(SECTIONS)
