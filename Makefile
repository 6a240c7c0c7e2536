# virtshim: each pod is a virtual machine. All targets want root on Debian 12 or Ubuntu.
PYTHON := .venv/bin/python
DIR ?= /var/lib/virtshim-up

.PHONY: demo test test-half-one test-half-two test-e2e test-machine test-anywhere test-faults test-vfio faults long e2e-vfio soak bench bench-compare setup lock guest debian-guest vfio-machine dashboard-assets dashboard-picture up down deb deb-packages e2e-install image docs lint clean

demo: guest            ## a VM pod through the CRI socket, step by step
	$(PYTHON) deploy/demo.py

# What needs a processor and nothing else of the machine.
ANYWHERE := tests/unit tests/property tests/policy tests/contract/cri tests/contract/proxy tests/contract/streaming tests/contract/ports

test:                  ## every test: two halves beside each other, each of lanes that run one after the other
	+@$(MAKE) -j 2 --output-sync=line vfio-machine debian-guest deb-packages
	@rm -rf build/failures
	+@status=0; $(MAKE) -j 2 --output-sync=line test-half-one test-half-two || status=$$?; \
	  cat build/failures/* 2>/dev/null; exit $$status

# The lanes in turn, whatever becomes of the first.
in_turn = status=0; for lane in $(1); do $(MAKE) $$lane || status=$$?; done; exit $$status

test-half-one:         # both would see the other's processes
	+@$(call in_turn,test-e2e test-anywhere)

test-half-two:         # out of sight of the other half: tests/apart.sh tells how
	+@$(call in_turn,test-machine test-vfio test-faults)

test-e2e:              ## whole nodes with VMs
	$(PYTHON) -m pytest $(PYTEST_ARGS) --failures=build/failures/e2e tests/e2e

test-machine:          ## namespaces, links, mounts, libvirt, programs: a part of the product at a time
	tests/apart.sh $(PYTHON) -m pytest $(PYTEST_ARGS) --failures=build/failures/machine $(addprefix --ignore=,$(ANYWHERE) tests/e2e tests/faults)

test-anywhere:         ## what needs a processor and nothing else of the machine
	$(PYTHON) -m pytest $(PYTEST_ARGS) --failures=build/failures/anywhere $(ANYWHERE)

test-faults:           ## kills, hangs, full disks, and a soak, on real parts: a sample of each
	tests/apart.sh $(PYTHON) -m pytest $(PYTEST_ARGS) --failures=build/failures/faults tests/faults

test-vfio:             ## devices of device plugins in VMs, on an emulated machine with IOMMU and SR-IOV
	tests/apart.sh $(PYTHON) -m pytest $(PYTEST_ARGS) --failures=build/failures/vfio tests/vfio -s --strict-areas -o faulthandler_timeout=2800

faults: guest          ## every kill point on real parts; `make test` takes a sample
	$(PYTHON) -m pytest tests/faults -s --all-faults

long: guest            ## much data through a guest, a GiB each way; a pod's bandwidth over seconds
	$(PYTHON) -m pytest tests/e2e/test_big_transfers.py tests/integration/network/test_bandwidth.py -s --long -o faulthandler_timeout=3000

e2e-vfio: vfio-machine ## passthrough alone; some minutes
	$(MAKE) test-vfio

e2e-install: guest     ## the package on a real Debian, emulated: installed, upgraded under a VM, rebooted, purged; some minutes
	tests/install/machine/build.sh build/install
	$(PYTHON) -m tests.install

soak: guest            ## pod cycles with random kills; SOAK_ARGS="--minutes 60"
	$(PYTHON) -m tests.soak $(SOAK_ARGS)

bench: guest           ## measures the promises; writes bench/results.json
	$(PYTHON) -m tests.bench $(BENCH_ARGS)

bench-compare: guest   ## the same of revision REV and of this checkout, in turns; writes bench/compare.json
	$(PYTHON) -m tests.bench.compare $(BENCH_ARGS) $(REV)

LOCK := .venv/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-index-url \
  --no-emit-find-links --no-emit-trusted-host --no-emit-options

lock:                  ## the locks, of what pyproject.toml and requirements-build.in ask for; asks the package index
	$(LOCK) --extra dev --output-file requirements.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --output-file requirements-run.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --output-file requirements-build.lock requirements-build.in

setup:                 ## system packages, machine preparation, .venv
	deploy/setup.sh

guest: setup           ## the small guests: build/guest.qcow2, build/null.qcow2; what tests read our network-config with
	deploy/guest/build.sh build/guest.qcow2
	deploy/guest/build-null.sh build/null.qcow2
	tests/integration/guest/cloudinit/fetch.sh build/cloud-init

debian-guest: guest    ## a Debian of Debian's own packages: build/debian.qcow2
	tests/e2e/debian/build.sh build/debian.qcow2

vfio-machine: guest    ## what test-vfio boots: build/vfio
	tests/vfio/machine/build.sh build/vfio

deb: setup             ## the Debian package of a node: dist/virtshim_VERSION_amd64.deb; VERSION=... for another one
	deploy/deb/build.sh dist $(VERSION)

deb-packages: setup    # what the package brings of the package index: its tests have no network
	deploy/deb/build.sh --packages

OWN_VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
image: deb             ## an image that puts virtshim onto nodes (deploy/daemonset.yaml): dist/virtshim-image_VERSION.tar
	deploy/image/build.sh dist/virtshim_$(or $(VERSION),$(OWN_VERSION))_amd64.deb dist/virtshim-image_$(or $(VERSION),$(OWN_VERSION)).tar

dashboard-assets:      ## the dashboard's page: build/dashboard
	deploy/dashboard.sh

dashboard-picture: setup ## docs/dashboard.png, of a node that is made up
	PYTHONPATH=.:tests:deploy $(PYTHON) tests/integration/operator/dashboard/picture.py docs/dashboard.png

up: setup              ## a node for trying things, in the foreground below DIR
	.venv/bin/virtshim up --dir $(DIR)

down:                  ## removes all that `make up` made
	.venv/bin/virtshim down --dir $(DIR)

docs: setup            ## the documentation site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --config-file deploy/docs_site/mkdocs.yml

lint: setup            ## formats, then checks style, types and import contracts
	.venv/bin/ruff format . && $(PYTHON) -m pytest tests/policy

clean:
	rm -rf build dist bench/results.json
