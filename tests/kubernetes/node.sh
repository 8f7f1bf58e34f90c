#!/bin/sh
# The first process of a node: namespaces of its own (network, name, mounts, processes), in which /run, /opt and /var/lib are empty. What is
# started in there ends with it. Usage: unshare --mount --net --uts --pid --fork --kill-child --mount-proc sh node.sh DIR PROGRAMS
set -eu
dir=$1 programs=$2
mkdir -p "$dir/lib" "$dir/net"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /opt
mount --bind "$dir/lib" /var/lib
ip link set lo up
hostname node
cat >"$dir/net/10-net.conflist" <<'END'
{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.217.0.0/24"}]]}}]}
END
cat >"$dir/containerd.toml" <<END
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = 'usmc.test/pause:1'
[plugins.'io.containerd.cri.v1.runtime']
netns_mounts_under_state_dir = true
# Whoever runs the tests may not be allowed to lower it.
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['$programs']
conf_dir = '$dir/net'
END
cat >"$dir/crictl.yaml" <<'END'
runtime-endpoint: unix:///run/containerd/containerd.sock
image-endpoint: unix:///run/containerd/containerd.sock
timeout: 30
END
echo ready
exec sleep infinity
