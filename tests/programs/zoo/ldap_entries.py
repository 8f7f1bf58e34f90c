# A client of OpenLDAP: adds entries, changes them, and compares what a search finds. Prints operations per second.
# Usage: ldap_entries.py PORT SECONDS
import hashlib
import sys
import threading
import time

import ldap


def text(thread, number):
    part = hashlib.sha256(b"%d %d" % (thread, number)).hexdigest()
    return (part * (1 + number * number * 97 % 300)).encode()


def talk(port, end, thread, counts):
    server = ldap.initialize("ldap://127.0.0.1:%d" % port)
    server.set_option(ldap.OPT_TIMEOUT, 20)
    server.simple_bind_s("cn=root,dc=zoo", "zoo")
    number = 0
    while time.monotonic() < end:
        name = "cn=%d-%d,dc=zoo" % (thread, number)
        server.add_s(name, [("objectClass", [b"device"]), ("serialNumber", [b"%d" % number]), ("description", [text(thread, number)])])
        server.modify_s(name, [(ldap.MOD_REPLACE, "description", [text(thread, number + 1)])])
        (_, found), = server.search_s(name, ldap.SCOPE_BASE)
        assert found["description"] == [text(thread, number + 1)], "entry %s is another" % name
        number += 1
    # All of them in one answer.
    found = server.search_s("dc=zoo", ldap.SCOPE_ONELEVEL, "(cn=%d-*)" % thread)
    assert len(found) == number, (len(found), number)
    for _, entry in found:
        assert entry["description"] == [text(thread, int(entry["serialNumber"][0]) + 1)], "another"
    server.unbind_s()
    counts[thread] = 3 * number


port, seconds, counts = int(sys.argv[1]), float(sys.argv[2]), {}
end = time.monotonic() + seconds
threads = [threading.Thread(target=talk, args=(port, end, thread, counts)) for thread in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(counts) == len(threads), "a thread has failed"
print("%.0f" % (sum(counts.values()) / seconds))
