# Functions for campaigns that have several parts. Source it with `known` set to the names of the parts, in order.
# PARTS="..." selects parts, all by default; an unknown name ends the campaign. BUDGET=... is the limit of all parts in
# seconds (540 by default).
#   chosen NAME              succeeds if the part is selected
#   timed SECONDS COMMAND... runs a command until SECONDS or the end of the budget; continues if the command fails
parts=" ${PARTS:-$known} "
for name in $parts; do
  [[ " $known " = *" $name "* ]] || { echo "PARTS has '$name'; choose from $known" >&2; exit 2; }
done
chosen() { [[ "$parts" = *" $1 "* ]]; }
timed() {
  local limit=$1 left=$((${BUDGET:-540} - SECONDS)); shift
  [ "$left" -gt 5 ] || { echo "no time left for: $*" >&2; return; }
  echo "== $* ($SECONDS s)" >&2
  timeout -k 5 $((limit < left ? limit : left)) "$@" || echo "ended with status $?" >&2
}
