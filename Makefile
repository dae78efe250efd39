# Every target makes what it needs: .venv from the pinned requirement files, build/ from torch-ext/.
# With PYTHON=... the given interpreter is used as it is, with neither a venv nor a network:
#     make test-gpu PYTHON=python3

VENV := .venv
RESULTS := benchmarks/results

ifdef PYTHON
py := $(PYTHON)
else
py := $(VENV)/bin/python
ready := $(VENV)/.ready-dev
bench_ready := $(VENV)/.ready-bench
endif

.PHONY: help demo test test-gpu bench build lint clean
help:
	@echo "make demo      load the build as a user does, run every operator, show errors and times"
	@echo "make test      all tests that need no GPU"
	@echo "make test-gpu  all tests that need one"
	@echo "make bench     compare with flash-linear-attention on a GPU (BENCH_ARGS='--ops kda --shapes ...')"
	@echo "make build     write the Hub layout into build/"
	@echo "make lint      ruff, and whether the rendered configs are current"

demo: build
	$(py) tools/demo.py

test: build
	OMP_NUM_THREADS=1 $(py) -m pytest -n 2 -m "not gpu" $(TEST_ARGS)

test-gpu: build
	@$(py) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu needs a CUDA device")'
	$(py) -m pytest -m gpu --junitxml=$(RESULTS)/gpu-tests.xml $(TEST_ARGS)

bench: build $(bench_ready)
	$(py) benchmarks/compare.py $(BENCH_ARGS)
	$(py) benchmarks/report.py

build: $(ready)
	$(py) tools/stage.py

lint: $(ready)
	$(py) -m ruff check .
	$(py) tools/render_configs.py --check

clean:
	rm -rf build $(VENV)

# Debian splits ensurepip from Python; its pip can then fill a venv that has none.
$(VENV)/bin/python:
	python3 -m venv $(VENV) || { rm -rf $(VENV) && python3 -m venv --without-pip $(VENV) && \
		python3 -m pip --python $(VENV)/bin/python install --quiet pip; }

$(VENV)/.ready-%: requirements-%.txt requirements.txt | $(VENV)/bin/python
	@echo "installing $< into $(VENV): some minutes the first time"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
