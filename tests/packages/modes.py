# Reads what `usmc ss --json` prints, and prints the modes of both ends of the connection with a port.
import json
import sys

port = ":" + sys.argv[1]
sockets = json.load(sys.stdin)
print(*sorted(s["mode"] for s in sockets if s["local"].endswith(port) or s["peer"].endswith(port)))
