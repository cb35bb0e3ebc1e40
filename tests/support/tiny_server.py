"""A program for pods: answers HTTP on $PAGEFLEET_HOST:8000 and does what its command line says.

Runs with `python -I -S` in about 20 ms. Paths: / (the pod's name), /env/NAME, /exit/CODE, /ready, /fail (/ready turns
503). `--term SECONDS` goes on serving for so long after SIGTERM, `--deaf` ignores it, `--wait SECONDS` binds late,
`--say TEXT` writes a termination message to $MESSAGE when it exits."""

import os
import signal
import socket
import sys
import time


def option(name: str, default: float = 0.0) -> float:
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


def on_term(number: int, frame: object) -> None:
    if "--deaf" not in sys.argv:
        print("terminating", flush=True)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, option("--term") + 1e-3)


def answer(path: str, ready: list[bool]) -> tuple[int, str]:
    head, _, rest = path.strip("/").partition("/")
    if head == "env":
        return 200, os.environ.get(rest, "<unset>")
    if head == "exit":
        if "--say" in sys.argv:
            with open(os.environ["MESSAGE"], "w") as file:
                file.write(sys.argv[sys.argv.index("--say") + 1])
        print(f"exiting with {rest}", flush=True)
        os._exit(int(rest))
    if head == "fail":
        ready[0] = False
        return 200, head
    if head == "ready":
        return (200, "ok") if ready[0] else (503, "not ready")
    return 200, os.environ.get("HOSTNAME", "?")


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    print("started", *sys.argv[1:], flush=True)
    time.sleep(option("--wait"))
    listener = socket.create_server((os.environ["PAGEFLEET_HOST"], 8000), backlog=64)
    ready = [True]
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            request = b""
            while b"\r\n\r\n" not in request and (data := connection.recv(65536)):
                request += data
            if not request:
                continue
            path = request.split(b" ", 2)[1].decode()
            code, text = answer(path, ready)
            payload = text.encode()
            head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + payload)


if __name__ == "__main__":
    main()
