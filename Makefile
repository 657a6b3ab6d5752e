# make demo   set up, then the whole story on real data
# make test   set up, then all tests
# make check  set up, then everything that can be checked without running it

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: install demo test check clean

install: $(READY)

$(READY): pyproject.toml .ci/constraints.txt .ci/system-packages
	.ci/system-packages
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/fsmount demo

test: install
	$(BIN)/python -m pytest --numprocesses auto $(TESTS)

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
