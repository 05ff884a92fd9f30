"""`verbatim lens`: `verbatim serve`, and a browser that opens its page once the server listens."""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
import webbrowser
from typing import Any

import click
from click.core import ParameterSource

from verbatim.base.errors import ParameterError
from verbatim.cli.commands import serve
from verbatim.cli.lib.command_class import Command, Option
from verbatim.cli.lib.options import Values
from verbatim.server.settings import Settings

HOST, PORT = Settings().host, Settings().port
OPEN_SECONDS = 60.0  # until a server that does not listen is given up; binding takes milliseconds


def free_port(host: str, port: int) -> int:
    """`port` (0: any), if a server can listen on it: show_page() would open the page of another
    program that does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            return int(sock.getsockname()[1])
    except OverflowError:
        return port  # not a port; the server's settings reject it
    except OSError as error:
        where = f"{host}:{port}" if port else host
        why = f"cannot listen on {where}: {error.strerror}; choose another --port or --host"
        raise ParameterError("port" if port else "host", why) from None


def page_address(flags: Values) -> str:
    host = flags["host"] or HOST
    scheme = "https" if flags["tls_cert"] else "http"
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{flags['port']}/lens"


def show_page(address: str, host: str, port: int, browser: bool) -> None:
    """Print the address, and open it when the port accepts connections."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    deadline = time.monotonic() + OPEN_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((target, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
            continue
        opened = browser and webbrowser.open(address)
        sys.stderr.write(f"the Lens: {address}{'' if opened else '  (open it in a browser)'}\n")
        return


def serves_lens() -> bool:
    """Whether a server of ours listens at the default address."""
    try:  # not urllib, which would ask a proxy
        connection = http.client.HTTPConnection(HOST, PORT, timeout=2)
        connection.request("GET", "/lens")
        return b"<title>Verbatim Lens</title>" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False


def start(no_browser: bool, **flags: Any) -> int:
    host, port = flags["host"] or HOST, flags["port"]
    if host == HOST and port is None and serves_lens():
        return show_running(not no_browser)
    flags["port"] = free_port(host, PORT if port is None else port)
    arguments = (page_address(flags), host, flags["port"], not no_browser)
    threading.Thread(target=show_page, args=arguments, daemon=True).start()
    code: int = serve.command.callback(**flags)  # type: ignore[misc]
    return code


def show_running(browser: bool) -> int:
    """Open the page of the server that runs here already. Flags of another server contradict it."""
    context = click.get_current_context()
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is ParameterSource.COMMANDLINE and param.name != "no_browser":
            why = f"a server of Verbatim runs at port {PORT} already, with settings of its own"
            remedy = "leave this out to open its page, or choose another --port"
            raise ParameterError(param.name or "", f"{why}; {remedy}")
    sys.stderr.write("a server of Verbatim runs here already: no model is loaded\n")
    show_page(page_address({"host": HOST, "tls_cert": None, "port": PORT}), HOST, PORT, browser)
    return 0


command = Command(
    "lens",
    callback=start,
    params=[
        Option(["--no-browser"], is_flag=True, help="print the address, and do not open a browser"),
        *serve.command.params,
    ],
    help="""Start the server and open the Lens, the page that shows how each token is made.

    The flags are those of `verbatim serve`. Ctrl-C ends the server. Where a server runs at the
    default port already, its page is opened and no model is loaded.
    """,
)
