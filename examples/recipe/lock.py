"""Lock an open file for the process that opened it, or say which job holds it.

    exec {LOCK}<>run.lock; python examples/recipe/lock.py "$LOCK" run

The lock belongs to the open file, which the shell and its children share: it ends with the last of
them, however they end. Exits with status 1 where another job holds it.
"""

import errno
import fcntl
import os
import sys
import time

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LONGEST = 200

descriptor, path = int(sys.argv[1]), sys.argv[2]
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    text = os.pread(descriptor, LONGEST, 0).decode(errors="replace").strip()
    holder = "".join(c if c.isprintable() else "?" for c in text) or "it does not say which"
    sys.exit(
        f"error: {path!a}: another job is at it ({holder}): wait for its end, or give this one a "
        "RUN and EXPORT of its own"
    )
except OSError as error:
    if error.errno not in NO_LOCKS:
        raise
    print(f"warning: {path!a}: this file system has no locks; start one job at a time")
else:
    os.ftruncate(descriptor, 0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(
        descriptor, f"process {os.getppid()} on {os.uname().nodename}, {started}\n".encode(), 0
    )
