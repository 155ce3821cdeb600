#!/usr/bin/env bash
# Measures collectives (E8) and broadcasts (E13) on the GPUs of one machine, most important first:
#   benchmarks/comm_campaign.sh OUT
# Each part has its own time limit and keeps what it has measured. LIMIT=... is the limit of all parts in seconds (325
# by default); parts that do not fit are skipped. Without GPUs, set DEVICE=cpu, RANKS="2" and small sizes (LARGE,
# SMALL, PLAIN, TENSOR, BLOCKS, RING, GLOO). Needs an installed stepgauge, or PYTHONPATH=src.
# Writes OUT/{comm,plain,broadcast}.jsonl, OUT/hardware.json, OUT/failures.log and OUT/log.txt.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
device=${DEVICE:-cuda}
read -ra ranks <<< "${RANKS:-2 4}"
most=${ranks[-1]}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/src"
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
ops=(all_reduce all_gather reduce_scatter broadcast all_to_all send_recv)
keep() { # NAME SECONDS COMMAND...: runs a part; its output goes to the log
  local name=$1 limit=$2 start=$SECONDS left=$((${LIMIT:-325} - SECONDS))
  shift 2
  ((left < 12)) && { echo "$name: skipped, no time left" | tee -a "$out/log.txt"; return; }
  ((limit > left)) && limit=$left
  timeout -k 5 "$limit" "$@" >> "$out/log.txt" 2>&1
  echo "$name: exit $?, $((SECONDS - start)) s" | tee -a "$out/log.txt"
}
comm() { # NAME SECONDS OPTIONS...: runs bench comm and copies its records, even if it fails
  local name=$1 limit=$2
  shift 2
  keep "$name" "$limit" python3 -m stepgauge bench comm --device "$device" --out "$work/comm" --seconds 0.08 -w 3 "$@"
  cp "$work/comm/records.jsonl" "$out/comm.jsonl" 2> /dev/null
  cp "$work/comm/failures.log" "$out/failures.log" 2> /dev/null
}

keep topo 30 python3 -m stepgauge topo --format json
large=(${LARGE:-524288 786432 1M 1536K 2M 3M 4M 6M 8M 12M 16M 24M 32M 48M 64M 96M 128M 192M 256M 384M 512M 768M 1G})
small=(${SMALL:-16 256 4K 16K 64K 128K 256K})
comm large 110 --op "${ops[@]}" --ranks "${ranks[@]}" --size "${small[@]}" "${large[@]}"
keep fit 20 python3 -m stepgauge comm fit "$work/comm" --hardware "$out/hardware.json"
for n in $most ${ranks[0]}; do
  keep "plain $n" 45 python3 benchmarks/comm_plain.py "$out/plain.jsonl" --device "$device" --ranks "$n" \
    --seconds 0.03 --sizes ${PLAIN:-524288 1048576 4194304 16777216 67108864 268435456 1073741824}
done
keep broadcast 80 python3 -m stepgauge bench broadcast --device "$device" --gpus "$most" --size "${TENSOR:-1G}" \
  --schedule naive pinned scatter-gather tree staged chain --block ${BLOCKS:-32M 8M} --out "$work/broadcast"
cp "$work/broadcast/records.jsonl" "$out/broadcast.jsonl" 2> /dev/null
if [ "$device" = cuda ]; then
  comm graph 35 --op all_reduce all_gather reduce_scatter --ranks "${ranks[@]}" --size 16 4K 64K 256K --timing graph blocking
  comm gloo-gpu 35 --op all_reduce --backend gloo --ranks "${ranks[@]}" --size 1M 10M 100M
fi
comm ring 35 --op all_reduce reduce_scatter all_gather --algorithm ring --ranks "${ranks[@]}" --size ${RING:-1M 16M 256M}
device=cpu
comm gloo-cpu 45 --op all_reduce broadcast --ranks "${ranks[@]}" --size ${GLOO:-1M 10M 100M}
exit 0
