# A client of MariaDB. "write" puts in rows until the server is gone, and notes in FILE what was committed; "check" compares them.
# Usage: mariadb.py PORT write|check FILE
import hashlib
import sys

import pymysql


def row(number):
    part = hashlib.sha256(b"%d" % number).digest()
    return part * (1 + number * number * 97 % 30000)


port, what, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
connection = pymysql.connect(host="127.0.0.1", port=port, user="zoo", database="zoo", read_timeout=20, write_timeout=20)
cursor = connection.cursor()
if what == "write":
    cursor.execute("create table rows_ (number int primary key, data longblob)")
    number = 0
    with open(name, "w", buffering=1) as written:
        try:
            while True:
                cursor.execute("insert into rows_ values (%s, %s)", (number, row(number)))
                connection.commit()
                cursor.execute("select data from rows_ where number = %s", (number // 2,))
                assert cursor.fetchone()[0] == row(number // 2), "row %d is another" % (number // 2)
                written.write("%d\n" % number)
                number += 1
        except pymysql.err.OperationalError as error:
            assert error.args[0] == 2013 or error.args[0] == 2006, error
else:
    cursor.execute("select number, data from rows_ order by number")
    rows = cursor.fetchall()
    count = len(open(name).readlines())
    assert count <= len(rows) <= count + 1, (count, len(rows))
    for number, (is_number, data) in enumerate(rows):
        assert number == is_number and data == row(number), "row %d is another" % number
