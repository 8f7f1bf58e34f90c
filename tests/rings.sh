# To be sourced by the scripts that run other projects' suites.

# Counts in a log of programs under uSMC (USMC_LOG=debug:FILE) the ends of connections that might have left TCP, and those that
# sent through a ring: `ends` and `in_rings`.
count_rings() {
    ends=$(grep -cE 'fd [0-9]+: (connects to|accepted from) port' "$1" || :)
    in_rings=$(grep -c 'sending through the ring' "$1" || :)
}
