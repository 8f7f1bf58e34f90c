#!/bin/sh
# Packs a directory as an image in the form of `docker save`, which `ctr image import` reads. Usage: image.sh NAME ROOT FILE PROGRAM...
set -eu
name=$1 root=$2 file=$3
shift 3
work=$file.work
mkdir -p "$work"
tar --owner=0 --group=0 --numeric-owner -C "$root" -cf "$work/layer.tar" .
layer=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
words=
for word in "$@"; do words="$words${words:+, }\"$word\""; done
case $(uname -m) in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; *) machine=$(uname -m) ;; esac
cat >"$work/config.json" <<END
{"architecture": "$machine", "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin"], "Entrypoint": [$words], "WorkingDir": "/"},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$name\"], \"Layers\": [\"layer.tar\"]}]" >"$work/manifest.json"
tar -C "$work" -cf "$file" manifest.json config.json layer.tar
rm -rf "$work"
