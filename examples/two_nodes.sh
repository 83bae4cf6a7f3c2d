#!/usr/bin/env bash
# Two nodes on one machine: two network namespaces joined by a cable, torchrun in each, two ranks a node.
#
#   sudo examples/two_nodes.sh [ARGUMENTS OF examples/started.py …]
#
# Needs root, iproute2 and a python with cpkv (PYTHON=…; default: python3). What it makes it removes, always.
# Ends as the first node's torchrun ends.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
# Names of this run alone; the kernel takes at most 15 characters for a cable's end.
id=$$
left=cpkv-a-$id right=cpkv-b-$id
port=29400
pids=()

clean_up() {
    trap - EXIT INT TERM
    for pid in "${pids[@]}"; do
        # torchrun ends its ranks when it is asked to.
        kill -TERM "$pid" 2>/dev/null || true
    done
    wait 2>/dev/null || true
    # With the namespaces go the cable and the addresses.
    ip netns delete "$left" 2>/dev/null || true
    ip netns delete "$right" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ $(id -u) != 0 ]]; then
    echo "two_nodes.sh: needs root, to make network namespaces" >&2
    exit 2
fi

ip netns add "$left"
ip netns add "$right"
ip link add "a-$id" netns "$left" type veth peer name "b-$id" netns "$right"
ip -n "$left" address add 10.77.0.1/24 dev "a-$id"
ip -n "$right" address add 10.77.0.2/24 dev "b-$id"
for end in "$left a-$id" "$right b-$id"; do
    read -r namespace cable <<<"$end"
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set "$cable" up
done

node() { # number, namespace, arguments of the program
    local number=$1 namespace=$2
    shift 2
    # A host name of its own, as a machine has: ranks report it.
    exec ip netns exec "$namespace" unshare --uts sh -c 'hostname "$0" && exec "$@"' "node$number" \
        "$python" -m torch.distributed.run --nnodes 2 --node-rank "$number" --nproc-per-node 2 \
        --master-addr 10.77.0.1 --master-port "$port" "$here/started.py" "$@"
}

export OMP_NUM_THREADS=1
node 0 "$left" "$@" &
pids+=($!)
node 1 "$right" "$@" &
pids+=($!)

status=0
wait "${pids[0]}" || status=$?
wait "${pids[1]}" || true
pids=()
echo "two_nodes.sh: torchrun of node 0 ended with $status"
exit "$status"
