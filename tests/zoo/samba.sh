# Samba: files go to a share and come back, by three clients at once. Its figure is megabytes.
setup_samba() {
    sh .ci/packages samba:smbd smbclient:smbclient
    share=90
}

smb() {
    client smbclient -s "$dir/conf" -p "$port" -N "//127.0.0.1/zoo" -c "$1"
}

transfer() {
    smb "lcd $dir; put data there.$1; get there.$1 back.$1" >&2
    cmp "$dir/data" "$dir/back.$1"
    mkdir "$dir/back/$1"
    smb "lcd $work/www; mkdir www.$1; cd www.$1; prompt off; mput *; lcd $dir/back/$1; mget *" >&2
    diff -r "$work/www" "$dir/back/$1"
}

zoo_samba() {
    scratch
    port=$(free_port)
    mkdir "$dir/share" "$dir/state" "$dir/back" "$dir/ncalrpc"
    head -c 30000000 /dev/urandom >"$dir/data"
    cat >"$dir/conf" <<END
[global]
server role = standalone server
map to guest = bad user
guest account = $(id -un)
interfaces = 127.0.0.1
bind interfaces only = yes
smb ports = $port
private dir = $dir/state
lock directory = $dir/state
state directory = $dir/state
cache directory = $dir/state
pid directory = $dir/state
ncalrpc dir = $dir/ncalrpc
log file = $dir/log
disable spoolss = yes
load printers = no
[zoo]
path = $dir/share
read only = no
guest ok = yes
END
    start smbd -F --no-process-group -s "$dir/conf"
    await_port "$port"
    begin=$(date +%s%N)
    transfers=
    for n in 1 2 3; do
        transfer $n &
        transfers="$transfers $!"
    done
    for each in $transfers; do
        wait "$each"
    done
    echo $((3 * 63 * 1000000000 / ($(date +%s%N) - begin)))
    finish
}
