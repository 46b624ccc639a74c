"""``python -m promptmill.supervisor.fakeserver PORT``: fakeredis over TCP, the last resort of `up`.

It keeps nothing over a restart and is slow; good enough to try promptmill where no server runs.
"""

import sys

from fakeredis import TcpFakeServer

from promptmill.supervisor.services import HOST


def main(port: int) -> None:
    with TcpFakeServer((HOST, port), server_type="valkey") as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
