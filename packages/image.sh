#!/bin/sh
# Makes a container image of what has been built, as a file in DIR. It has uSMC in /usmc and nothing else; its entry point is usmc,
# whose `export` copies all of it into a volume. Docker, Podman, containerd and skopeo read the file: it is an OCI layout, with
# the list that `docker load` of old wants beside it. No daemon is needed to make it, and the same sources make the same image.
# Usage: image.sh TARGET DIR
set -eu
cd "$(dirname "$0")/.."
target=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
[ -f "$target/release/usmc-static" ] || { echo "image: usmc has to be linked statically; install libc6-dev" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
case $(uname -m) in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; *) machine=$(uname -m) ;; esac
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
created=$(date --utc -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
work=$out/image.work
layout=$work/layout
blobs=$layout/blobs/sha256
rm -rf "$work"
mkdir -p "$blobs"

pack() {
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$1" -cf "$2" .
}

# Makes a file a blob, and prints its digest.
blob() {
    digest=$(sha256sum "$1" | cut -d ' ' -f 1)
    mv "$1" "$blobs/$digest"
    echo "$digest"
}

size() {
    stat -c %s "$blobs/$1"
}

sh packages/install.sh "$target" /usr "$work/staged"
# The library is where `usmc` looks first, so that both can be copied anywhere.
root=$work/tree/usmc
mkdir -p "$root"
cp -a "$work"/staged/usr/lib/usmc/. "$root/"
rm "$root/usmc-agent"
cp "$work/staged/usr/bin/usmc" "$root/"
cp LICENSE-APACHE LICENSE-MIT "$work/staged/usr/share/doc/usmc/NOTICES" "$root/"
pack "$work/tree" "$work/layer"
layer=$(blob "$work/layer")

cat >"$work/config" <<END
{"created": "$created", "architecture": "$machine", "os": "linux",
 "config": {"Entrypoint": ["/usmc/usmc"], "Cmd": ["--help"], "WorkingDir": "/",
  "Labels": {"org.opencontainers.image.title": "usmc", "org.opencontainers.image.version": "$version",
   "org.opencontainers.image.licenses": "(Apache-2.0 OR MIT) AND LGPL-2.1-or-later"}},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]},
 "history": [{"created": "$created", "created_by": "packages/image.sh"}]}
END
config=$(blob "$work/config")
oci=application/vnd.oci.image
cat >"$work/manifest" <<END
{"schemaVersion": 2, "mediaType": "$oci.manifest.v1+json",
 "config": {"mediaType": "$oci.config.v1+json", "digest": "sha256:$config", "size": $(size "$config")},
 "layers": [{"mediaType": "$oci.layer.v1.tar", "digest": "sha256:$layer", "size": $(size "$layer")}]}
END
manifest=$(blob "$work/manifest")
cat >"$layout/index.json" <<END
{"schemaVersion": 2, "mediaType": "$oci.index.v1+json", "manifests": [
 {"mediaType": "$oci.manifest.v1+json", "digest": "sha256:$manifest", "size": $(size "$manifest"),
  "platform": {"architecture": "$machine", "os": "linux"},
  "annotations": {"io.containerd.image.name": "docker.io/library/usmc:$version", "org.opencontainers.image.ref.name": "$version"}}]}
END
echo '{"imageLayoutVersion": "1.0.0"}' >"$layout/oci-layout"
cat >"$layout/manifest.json" <<END
[{"Config": "blobs/sha256/$config", "RepoTags": ["usmc:$version"], "Layers": ["blobs/sha256/$layer"]}]
END
pack "$layout" "$out/usmc-$version-$machine.image.tar"
rm -rf "$work"
echo "$out/usmc-$version-$machine.image.tar"
