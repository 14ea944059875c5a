"""The workflows of `.github`: of valid form, with few rights, and of one mind with the package."""

import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import readme
from ruamel.yaml import YAML

TEMPLATES = readme.ROOT / ".github/ISSUE_TEMPLATE"
FILES = sorted((readme.ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS = {file.stem: YAML(typ="safe").load(file) for file in FILES}
JOBS = {
    f"{name}/{job}": body for name, flow in WORKFLOWS.items() for job, body in flow["jobs"].items()
}
PROJECT = tomllib.loads((readme.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RELEASE_FILES = runpy.run_path(str(readme.ROOT / ".ci/release_files.py"))
PROCESSORS = {"x86_64": "(x86_64|amd64)$", "aarch64": "(aarch64|arm64)$"}


def steps(job):
    return JOBS[job].get("steps", [])  # none where another workflow is called


def commands(job):
    return [step["run"] for step in steps(job) if "run" in step]


def matrix_of(job):
    return JOBS[job].get("strategy", {}).get("matrix", {})


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("workflows", FILES),
        ("issue-config", [TEMPLATES / "config.yml"]),
        ("issue-forms", sorted(TEMPLATES.glob("[!c]*.yml"))),
    ],
)
def test_form_is_that_of_github(schema, files):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = subprocess.run(
        [*command, f"vendor.github-{schema}", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_report_of_an_error_asks_for_the_machine():
    form = YAML(typ="safe").load(TEMPLATES / "error.yml")
    required = {
        part["id"]: part["attributes"]
        for part in form["body"]
        if part.get("validations", {}).get("required")
    }
    assert "grainmill doctor --json" in required["machine"]["description"]
    assert set(required) == {"happened", "program", "machine"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_runs_of_one_branch_replace_each_other_and_may_only_read(name):
    flow = WORKFLOWS[name]
    assert flow["permissions"] == {"contents": "read"}
    assert "github.ref" in flow["concurrency"]["group"]


def test_only_publishing_may_ask_for_an_identity():
    rights = {name: body["permissions"] for name, body in JOBS.items() if "permissions" in body}
    assert rights == {"release/publish": {"id-token": "write"}}
    assert JOBS["release/publish"]["if"] == "${{ github.ref_type == 'tag' }}"
    texts = "".join(file.read_text("utf-8") for file in FILES)
    assert "secrets." not in texts
    assert "pull_request_target" not in texts


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_pinned_and_keep_no_credentials(job):
    for step in steps(job):
        if "uses" in step:
            assert re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("job", JOBS)
def test_jobs_end_and_name_what_exists(job):
    body = JOBS[job]
    if "uses" in body:
        assert (readme.ROOT / body["uses"]).is_file()
    else:
        assert body["timeout-minutes"] <= (355 if job.startswith("nightly/") else 90)
    flow = WORKFLOWS[job.split("/")[0]]
    needs = body.get("needs", [])
    assert {needs} if isinstance(needs, str) else set(needs) <= flow["jobs"].keys()
    matrix = matrix_of(job)
    known = {*matrix, *(name for entry in matrix.get("include", []) for name in entry)}
    assert set(re.findall(r"\bmatrix\.(\w+)", str(body))) <= known
    makefile = (readme.ROOT / "Makefile").read_text("utf-8")
    for command in commands(job):
        for file in re.findall(r"\.ci/[\w.]+", command):
            assert (readme.ROOT / file).is_file()
        if command.startswith("make "):
            for target in command.split()[1:]:
                for name in matrix["part"] if target == '"$PART"' else [target]:
                    rule = rf"(?m)^[\w -]*\b{name}\b[\w -]*:"
                    assert "=" in name or re.search(rule, makefile)


def test_every_version_of_python_in_the_metadata_is_tested():
    prefix = "Programming Language :: Python :: 3."
    stated = [c.removeprefix("Programming Language :: Python :: ") for c in PROJECT["classifiers"]]
    stated = [c for c in stated if c.startswith("3.")]
    assert f"{prefix}11" in PROJECT["classifiers"]
    for job in ("test/linux", "test/other-systems"):
        assert matrix_of(job)["python"] == stated
    assert matrix_of("release/installed")["python"] == [*stated, "3.14t"]


def test_every_kind_of_test_runs_somewhere():
    every = {*matrix_of("nightly/test-long")["part"]}
    for job in JOBS:
        for command in commands(job):
            if command.startswith("make "):
                every.update(command.split()[1:])
    makefile = (readme.ROOT / "Makefile").read_text("utf-8")

    def listed(line):
        (names,) = re.findall(rf"(?m)^{line} ([\w -]+)$", makefile)
        return set(names.split())

    if "checks-rust" in every:
        every |= listed("RUST_CHECKS :=")
    assert listed("RUST_CHECKS :=") | listed("PYTHON_CHECKS :=") | {"python-test"} <= every
    assert listed("test-long:") <= every
    assert "nightly.yml" in JOBS["release/searched"]["uses"]
    assert "searched" in JOBS["release/publish"]["needs"]


def test_every_file_of_a_release_is_built():
    platforms = [entry["platform"] for entry in matrix_of("release/wheels")["include"]]
    assert len(platforms) == len(set(platforms)) == len(RELEASE_FILES["PLATFORMS"])
    for pattern, platform in zip(RELEASE_FILES["PLATFORMS"], platforms, strict=True):
        system, processor = platform.split("-")
        assert pattern.startswith({"macos": "macosx", "windows": "win"}.get(system, system))
        assert re.search(PROCESSORS[processor], pattern)
    builds = [s["with"]["args"] for s in steps("release/wheels") if "maturin" in s.get("uses", "")]
    assert ["python3.14t" in arguments for arguments in builds] == [False, True]
    assert all("--locked" in arguments for arguments in builds)


def complete():
    number = RELEASE_FILES["version"]()
    wheels = [
        f"grainmill-{number}-{abi}-{pattern}.whl".replace(r"\d+_\d+", "11_0").replace("\\", "")
        for abi in RELEASE_FILES["ABIS"]
        for pattern in RELEASE_FILES["PLATFORMS"]
    ]
    return [f"grainmill-{number}.tar.gz", *wheels]


def test_release_is_refused_unless_whole_and_of_its_tag():
    problems = RELEASE_FILES["problems"]
    tag = f"v{RELEASE_FILES['version']()}"
    assert problems(complete(), "") == []
    assert problems(complete(), tag) == []
    (missing,) = problems(complete()[1:], tag)
    assert missing.startswith("no file grainmill-")
    (extra,) = problems([*complete(), "grainmill-0.0.0.tar.gz"], tag)
    assert extra == "unexpected file grainmill-0.0.0.tar.gz"
    found = problems(complete(), "v99.0.0")
    assert found[0].startswith("the tag is v99.0.0, the version ")
