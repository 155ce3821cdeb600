# What campaigns that come in parts share. Sourced, with `known`: the parts' names, in order.
# PARTS="..." chooses among them, all by default; another name ends the campaign. BUDGET=... seconds for all of them.
# chosen NAME: whether the part is wanted. timed SECONDS COMMAND...: no longer than that and than what is left of the
# budget; its failure is not the end.
parts=" ${PARTS:-$known} "
for name in $parts; do
  [[ " $known " = *" $name "* ]] || { echo "PARTS names '$name'; choose from $known" >&2; exit 2; }
done
chosen() { [[ "$parts" = *" $1 "* ]]; }
timed() {
  local limit=$1 left=$((${BUDGET:-540} - SECONDS)); shift
  [ "$left" -gt 5 ] || { echo "no time left for: $*" >&2; return; }
  echo "== $* ($SECONDS s)" >&2
  timeout -k 5 $((limit < left ? limit : left)) "$@" || echo "ended with $?" >&2
}
