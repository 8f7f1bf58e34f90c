# OpenLDAP: entries are added, changed, searched for and compared by four clients at once.
setup_openldap() {
    sh .ci/packages slapd:slapd ldap-utils:ldapsearch python3-ldap:-
}

zoo_openldap() {
    scratch
    port=$(free_port)
    mkdir "$dir/db"
    cat >"$dir/conf" <<END
include /etc/ldap/schema/core.schema
modulepath /usr/lib/ldap
moduleload back_mdb
pidfile $dir/pid
database mdb
suffix "dc=zoo"
rootdn "cn=root,dc=zoo"
rootpw zoo
directory $dir/db
dbnosync
maxsize 268435456
sizelimit unlimited
END
    start slapd -d 0 -f "$dir/conf" -h "ldap://127.0.0.1:$port"
    await_port "$port"
    printf 'dn: dc=zoo\nobjectClass: dcObject\nobjectClass: organization\no: zoo\ndc: zoo\n' |
        client ldapadd -x -H "ldap://127.0.0.1:$port" -D cn=root,dc=zoo -w zoo >&2
    client /usr/bin/python3 tests/programs/zoo/ldap_entries.py "$port" "$seconds"
    finish
}
