# uSMC. `make demo` shows it, `make test` proves it; both install what they need on a fresh Debian 12.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
NARROW := i686-unknown-linux-gnu
TARGET = $(abspath $(or $(CARGO_TARGET_DIR),target))

BUILD_DEPS := gcc:gcc libc6-dev:- binutils:nm clang:clang
FUZZ_DEPS := g++:g++
LINT_DEPS := python3:/usr/bin/python3 python3-pip:-
TEST_DEPS := liburing-dev:- libibverbs-dev:- python3:/usr/bin/python3 curl:curl redis-server:redis-server redis-tools:redis-cli \
	nginx-light:nginx wrk:wrk sockperf:sockperf memcached:memcached postgresql:- \
	openbsd-inetd:inetd socat:socat systemd:systemd-socket-activate tshark:tshark rsync:rsync openssh-server:sshd \
	openssh-client:ssh openssl:openssl iperf3:iperf3 qperf:qperf nodejs:node default-jdk-headless:javac \
	python3-pip:- mariadb-server:mariadbd mariadb-client:mariadb-slap \
	musl-tools:musl-gcc iproute2:ip nftables:nft tcpdump:tcpdump strace:strace docker.io:dockerd \
	prometheus:prometheus python3-prometheus-client:- tmux:tmux docker-compose:docker-compose passwd:groupadd
VM_DEPS := qemu-system-x86:qemu-system-x86_64 busybox-static:busybox cpio:cpio kmod:modprobe gzip:gzip tcpdump:tcpdump iproute2:ip procps:pgrep udev:udevadm \
	ndctl:ndctl passwd:groupadd redis-server:redis-server redis-tools:redis-cli nginx-light:nginx curl:curl sockperf:sockperf python3:/usr/bin/python3 postgresql:-
PACKAGE_DEPS := debhelper:dh_builddeb rpm:rpmbuild lintian:lintian debootstrap:debootstrap docker.io:dockerd \
	systemd-container:systemd-nspawn
SITE_DEPS := mandoc:mandoc python3:/usr/bin/python3 python3-pip:-
LOOK_DEPS := chromium:chromium fonts-dejavu-core:-
DEMO_DEPS := redis-server:redis-server redis-tools:redis-benchmark \
	nginx-light:nginx wrk:wrk sockperf:sockperf

.PHONY: all build deps32 quick test test-loom test-tsan torture storm fuzz lint oldest demo install deb rpm image test-packages test-systemd test-kubernetes \
	site site-look test-deps fuzz-deps lint-deps package-deps site-deps \
	demo-deps vm-deps rdma-vm-deps test-rdma test-vm test-vm-rdma test-vm-long bench-vm bench-vm-rdma bench-agent python-suite suites roots zoo clean

# For `make torture`: how many random programs. For `make storm`: how many events. For both: the first seed.
PROGRAMS ?= 50000
EVENTS ?= 10000
SEED ?= $(shell date +%s)

# For `make test-vm-long`.
ROUNDS_LONG ?= 100

# For `make demo`: what is measured, and how often.
CASES ?= sockperf/pp-14B/two-cores sockperf/pp-14B/one-core sockperf/tp-64000B redis/c200-d1024 redis/c1 \
	nginx/keep-alive/c200 nginx/close/c10-t4
ROUNDS ?= 5

# For `make fuzz`: how long new inputs are looked for, all targets together.
FUZZ_SECONDS ?= 60

all: build

build:
	$(CARGO) build --release --locked -p usmc-preload
	$(CARGO) build --release --locked -p usmc-agent
	@CARGO='$(CARGO)' sh crates/usmc-cli/build.sh
	@CARGO='$(CARGO)' sh crates/usmc-preload/narrow.sh
	@CARGO='$(CARGO)' sh crates/usmc-cli/build.sh --static

# What `make build` needs to build the library for 32-bit programs, too.
deps32:
	@sh .ci/deps32

# The fuzz targets for a minute; unit, property and hostile-peer tests, the preloaded programs, whole processes, and two virtual machines
# where there is QEMU.
test: test-deps rdma-vm-deps build fuzz
	@USMC_TESTS_VM=1 sh .ci/test $(CARGO) test --profile tools --locked --workspace --no-fail-fast

# For a change under way: unit tests, the layers, and some three hundred cases (one of seven ways in which ends can be), with a library
# that is built without link-time optimization. Under a minute once all has been built; no root, nothing to install.
quick:
	$(CARGO) build --quiet --profile tools --locked -p usmc-cli -p usmc-preload
	$(CARGO) test --quiet --profile tools --locked -p usmc -p usmc-shm -p smc-proto --lib -- --skip asked::model
	$(CARGO) test --quiet --profile tools --locked -p usmc --test layers
	USMC_BIN=$(TARGET)/tools/usmc $(CARGO) test --profile tools --locked -p usmc-tests --test sockets -- \
		::local_client_warm --skip musl --skip 32

# The models of the rings, doorbells, the handshake and the span switch: weak memory by loom, schedules at
# random by shuttle. About two minutes.
test-loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom CARGO_PROFILE_RELEASE_LTO=off \
		$(CARGO) test --release --locked -p usmc-shm --test loom -- --test-threads=1
	RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle CARGO_PROFILE_RELEASE_LTO=off \
		$(CARGO) test --release --locked -p usmc-shm --test shuttle -- --test-threads=1

# The ring on real threads under ThreadSanitizer; says so and succeeds where there is no nightly toolchain.
test-tsan:
	crates/usmc-shm/tests/sanitize.sh tsan

# Programs of two virtual machines that have a region in common, under QEMU without /dev/kvm: Debian's kernel, and this machine's root file
# system. Three minutes or so, and `make test` has a part of it; says so and succeeds where there is no QEMU.
test-vm: vm-deps build
	USMC_TESTS_VM=1 USMC_TESTS_VM_LONG=1 $(CARGO) test --profile tools --locked -p usmc-tests --test vm -- --nocapture

# Two virtual machines with soft-RoCE: SMC-R with the kernel's AF_SMC as a peer. Five minutes; `make test` has a part of it.
test-vm-rdma: rdma-vm-deps build
	USMC_TESTS_VM=1 USMC_TESTS_VM_LONG=1 $(CARGO) test --profile tools --locked -p usmc-tests --test vm_rdma -- --nocapture

# Debian's services under a real systemd and under docker compose, brought under uSMC and back. A part of `make test`; says so and
# succeeds where systemd cannot be started in namespaces.
test-systemd: test-deps build
	$(CARGO) test --profile tools --locked -p usmc-tests --test systemd --test compose -- --nocapture

# Pods that `usmc nri` brings under uSMC: of a real containerd, and of a cluster of Kubernetes with one node. Both are built from the Go module
# proxy, once, into target/kubernetes: half an hour on two processors; then a minute. Needs root.
test-kubernetes: test-deps build
	@sh .ci/packages python3-pip:- runc:runc
	@sh tests/kubernetes.sh $(TARGET)/kubernetes cluster
	USMC_TESTS_KUBERNETES=1 $(CARGO) test --profile tools --locked -p usmc-tests --test nri --test kubernetes -- --nocapture

# All conformance cases that fit, over the agent and the fake libibverbs. Three minutes.
test-rdma: test-deps build
	USMC_TESTS_RDMA=1 $(CARGO) test --profile tools --locked -p usmc-tests --test sockets -- cases-rdma
	$(CARGO) test --profile tools --locked -p usmc-tests --test rdma --test rdma_keys --test rdma_brief --test bench_rdma

# Three virtual machines and this host, of which any is killed, stands still, loses its power, its device or its server while programs
# stream. ROUNDS_LONG: how often; half an hour or so.
test-vm-long: vm-deps build
	USMC_TESTS_VM=1 USMC_TESTS_VM_LONG=1 USMC_TESTS_VM_ROUNDS=$(ROUNDS_LONG) \
		$(CARGO) test --profile tools --locked -p usmc-tests --test vm_long -- --nocapture

# What two virtual machines gain, beside TCP in the same ones. They are emulated: read what it prints first.
bench-vm: vm-deps build
	USMC_TESTS_VM=1 USMC_TESTS_VM_SPEED=1 $(CARGO) test --profile tools --locked -p usmc-tests --test vm -- --nocapture gain

# TCP, the kernel's SMC and uSMC in turn, between two virtual machines with soft-RoCE. They are emulated: only ratios mean anything.
bench-vm-rdma: rdma-vm-deps build
	@sh .ci/packages perftest:ib_send_lat
	USMC_TESTS_VM=1 USMC_TESTS_VM_SPEED=1 $(CARGO) test --profile tools --locked -p usmc-tests --test vm_rdma -- --nocapture carries

# What a message costs agents that are awake, over a fabric that costs nothing: no device, and no machine but this one.
bench-agent:
	$(CARGO) build --release --locked -p usmc-fake-verbs
	$(CARGO) test --release --locked -p usmc-agent --test awake -- --ignored hop --nocapture --test-threads=1

# Random programs of socket operations, over TCP and under uSMC: what a program can observe is the same. A find is
# printed as the shortest program that shows it. `make test` runs six hundred.
torture: build
	USMC_TORTURE=$(PROGRAMS) USMC_TORTURE_SEED=$(SEED) $(CARGO) test --profile tools --locked -p usmc-tests --test torture \
		random -- --nocapture

# Kills, stops, forks and execs at random among processes that move streams. `make test` has a storm of a thousand.
storm: build
	USMC_STORM=$(EVENTS) USMC_STORM_SEED=$(SEED) $(CARGO) test --profile tools --locked -p usmc-tests --test storm -- --nocapture

# Everything that reads a peer's bytes, under libFuzzer: what is kept, then what is new. See docs/fuzzing.md.
fuzz: fuzz-deps
	CARGO="$(CARGO)" FUZZ_SECONDS=$(FUZZ_SECONDS) fuzz/run

# The 32-bit library's where there is a Rust library for it (make deps32).
lint: fuzz-deps lint-deps
	CARGO="$(CARGO)" fuzz/run -l
	$(CARGO) fmt --all --check
	$(CARGO) clippy --profile tools --locked --workspace --all-targets -- -D warnings
	! ls "$$(rustc --print target-libdir --target $(NARROW))"/libcore-* >/dev/null 2>&1 || \
		$(CARGO) clippy --release --locked -p usmc-preload --target $(NARROW) -- -D warnings
	CARGO="$(CARGO)" sh .ci/deny $(TARGET)/ci

# The oldest Rust that compiles it still does.
oldest:
	@sh .ci/oldest $(TARGET)/oldest

# Some of what `usmc bench` measures. CASES: others, or `make demo CASES=` for all.
demo: demo-deps build
	$(TARGET)/release/usmc bench --rounds $(ROUNDS) $(CASES)

# CPython's own socket tests, with and without the library: same outcomes. MODULES: some of them only. PYTHON: another
# one, such as the 32-bit target/python32/python3.
python-suite: test-deps build
	PYTHON='$(PYTHON)' sh tests/python-suite.sh $(MODULES)

# libevent's, redis', PostgreSQL's and uvloop's test suites, likewise, and Go as a control.
# SUITES: some of them only.
suites: build
	sh tests/suites.sh $(SUITES)

# Roots of other systems, each with a shell, C, Python and redis, plain and under uSMC: Debian's releases, and musl. Needs
# root and Debian's mirror. ROOT: some of them only.
roots: build
	@sh .ci/packages debootstrap:debootstrap musl-tools:musl-gcc dpkg-dev:dpkg-source
	sh tests/roots.sh $(ROOT)

# Real servers with clients of their own, over TCP and under uSMC in turn; what comes back is checked. SERVERS: some only.
# BY=rdma: by an agent over the fake libibverbs, as between two hosts.
zoo: build
	@[ "$(BY)" != rdma ] || $(CARGO) build --release --locked -p usmc-fake-verbs
	BY=$(BY) sh tests/zoo.sh $(SERVERS)

# Programs, libraries, the manual, completions, an example of the configuration, units of systemd: packages/install.sh.
install: build
	@sh packages/install.sh $(TARGET) $(PREFIX) $(DESTDIR)

# Packages of what `make build` has built, in target/packages: for Debian, for systems with RPM, and an image for containers. See
# docs/packages.md.
deb: package-deps build
	@sh packages/deb.sh $(TARGET) $(TARGET)/packages

rpm: package-deps build
	@sh packages/rpm.sh $(TARGET) $(TARGET)/packages

image: build
	@sh packages/image.sh $(TARGET) $(TARGET)/packages

# The documentation in target/site: README, docs and the manual, by mdBook. Every link inside it is followed. Needs no network once mdBook
# is there.
site: site-deps
	@mdbook=$$(sh .ci/mdbook $(TARGET)/ci) && docs/site/build "$$mdbook" $(TARGET)/site
	@docs/site/check $(TARGET)/site

# All of its pages in Chromium: none has anything to say, all pictures load. Pictures of some of them, light, dark and narrow, in
# target/site.looks.
site-look: site
	@sh .ci/packages $(LOOK_DEPS)
	@docs/site/look $(TARGET)/site $(TARGET)/site.looks

# They are installed into roots of their own, used, exchanged for newer ones while connections live, and removed. Needs root and
# Debian's mirror.
test-packages: deb rpm image
	sh tests/packages.sh

test-deps: deps32
	@sh .ci/packages $(BUILD_DEPS) $(TEST_DEPS)
	@sh tests/python32.sh $(TARGET)/python32
	@sh tests/node24.sh $(TARGET)/node24

fuzz-deps:
	@sh .ci/packages $(BUILD_DEPS) $(FUZZ_DEPS)

lint-deps:
	@sh .ci/packages $(LINT_DEPS)

# Where they cannot be installed the test says so, and without a compiler for 32-bit programs has none of those.
vm-deps:
	@sh .ci/deps32 || echo 'no 32-bit programs in virtual machines' >&2
	@! sh .ci/packages $(BUILD_DEPS) $(VM_DEPS) || sh tests/vm/image $(TARGET)/vm

# A kernel whose SMC is a peer of ours, over soft-RoCE.
rdma-vm-deps: vm-deps
	@sh .ci/packages wrk:wrk ibverbs-providers:- iproute2:rdma
	@sh tests/vm/image $(TARGET)/vm-rdma 6.12 || echo 'no kernel whose SMC-R is a peer' >&2

# The 32-bit library, where it can be built, is in all of them.
package-deps:
	@sh .ci/deps32 || echo 'no library for 32-bit programs in the packages' >&2
	@sh .ci/packages $(BUILD_DEPS) $(PACKAGE_DEPS)

site-deps:
	@sh .ci/packages $(SITE_DEPS)

demo-deps:
	@sh .ci/packages $(BUILD_DEPS) $(DEMO_DEPS)

clean:
	$(CARGO) clean
