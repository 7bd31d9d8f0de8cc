# Everything from nothing but Python 3.11 and make:
#   make train   train a character-level GPT on ONNX Runtime and compare it with eager PyTorch
#   make test    run the tests, with onnxruntime-training and with the plain onnxruntime
#   make test-all   run every operator of PyTorch's operator database (hours); ARGS="--match REGEX", --kinds, --sizes, --json FILE --resume
#   make lint    ruff and mypy
#   make gpu-check   on a machine with a GPU: smoke, pytest -m cuda, benchmarks, into out/gpu/gpu.{json,md}; PYTHON_GPU=interpreter, see tools/gpu_check.py
#   make benchmark   measure three models in eager PyTorch, inductor and on ONNX Runtime (a few minutes)
PYTHON ?= python3.11
VENV ?= .venv
PLAIN ?= .venv-plain
WORKERS ?= 2
ARGS ?=
# Of the parameters of the tests of operators and of their lowerings a part runs, to keep CI short: `make test EVERY=1` runs all. With the plain
# onnxruntime half as many, of all tests.
EVERY ?= 4
EVERY_PLAIN ?= $(if $(filter 1,$(EVERY)),1,8)
SAMPLED = --every $(EVERY):tests/ops --every $(EVERY):tests/lowering
# What the plain onnxruntime is tested with: behaviours of training, users' Functions, real models, operators, the zoo (less its slowest) at one size. Left out is
# what takes long and does not depend on the package.
PLAIN_TESTS ?= tests/test_regions.py tests/behaviours tests/autograd_function tests/test_training.py tests/test_zoo.py tests/ops tests/lowering/test_recompute.py \
	tests/lowering/test_cheap.py tests/lowering/test_recurrent.py tests/lowering/test_statistics.py tests/lowering/test_activation.py \
	tests/lowering/test_written_activations.py tests/lowering/test_written_attention.py tests/lowering/test_batched_rows.py tests/lowering/test_selections.py \
	--ignore=tests/ops/test_opinfo.py --ignore=tests/behaviours/test_denormals.py \
	--deselect=tests/behaviours/test_dumps.py::test_the_repro_script_runs[dynamic] --deselect=tests/ops/test_supported.py::test_it_is_a_command \
	--deselect=tests/autograd_function/test_lifetimes.py::test_five_hundred_steps_are_flat[False] \
	--deselect=tests/autograd_function/test_processes.py::test_two_processes[unknown_shapes] \
	--deselect=tests/autograd_function/test_processes.py::test_two_processes[fsdp] \
	$(foreach folder,ops lowering behaviours autograd_function,--every $(EVERY_PLAIN):tests/$(folder))

# One thread per process: PyTorch's OpenMP pool with two threads is many times slower than with one on small machines.
export OMP_NUM_THREADS = 1
# Tests start many processes, and each would compile this package anew.
export PYTHONDONTWRITEBYTECODE =

PYTHON_GPU ?= $(VENV)/bin/python

.PHONY: train benchmark gpu-check test test-plain test-training test-all lint format clean

train: $(VENV)/installed-examples
	$(VENV)/bin/python examples/train_gpt.py $(ARGS)

benchmark: $(VENV)/installed-benchmarks
	$(VENV)/bin/python -m benchmarks run --quick $(ARGS)

# An interpreter that is given is taken as it is: a machine with a GPU may have no network.
gpu-check: $(if $(filter $(VENV)/bin/python,$(PYTHON_GPU)),$(VENV)/installed-dev)
	$(PYTHON_GPU) tools/gpu_check.py $(ARGS)

# Twice: with the training kernels, and a part of the tests with the plain onnxruntime, which has none.
test: test-plain test-training

test-training: $(VENV)/installed-dev
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal $(SAMPLED) $(ARGS)

test-plain: $(PLAIN)/installed
	$(PLAIN)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PLAIN_TESTS)

test-all: $(VENV)/installed-dev
	PYTHONPATH=tests $(VENV)/bin/python -m ops.run_all --workers $(WORKERS) $(ARGS)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(PLAIN) build dist out

# A stamp for each set of extras: `installed-examples` holds what `make train` needs, `installed-dev` everything.
$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable '.[$*]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The plain onnxruntime, and behind it all that the first environment has.
PURELIB = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(PLAIN)/installed: constraints-plain.txt $(VENV)/installed-dev
	$(PYTHON) -m venv $(PLAIN)
	$(PLAIN)/bin/python -m pip install --no-deps --requirement constraints-plain.txt
	echo "import site; site.addsitedir('$$($(VENV)/bin/python $(PURELIB))')" > "$$($(PLAIN)/bin/python $(PURELIB))/behind.pth"
	touch $@
